"""The CPU kernels in a program of their own, without torch and Python.

So they run where torch does not: under an emulator of another machine, and under valgrind and
callgrind.
"""
