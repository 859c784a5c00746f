"""Compile Ascend C kernels for the host and run them on the simulated device.

>>> import numpy as np
>>> from tests.sim.harness import HERE, Kernel, launch, write
>>> add = Kernel(HERE / "kernels" / "correct.cpp", "add_queues")
>>> x, y, z = (np.arange(1024, dtype=np.float32) for _ in range(3))
>>> result = launch(add, 4, x, y, write(z), 1024)
>>> result.violations
()
>>> bool((z == x + y).all()), result.counters.total.gm_read_bytes
(True, 8192)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tests.sim import counting
from tests.sim.build import HERE, ROOT, CompileError, build_kernel, build_runtime, check_source

__all__ = ["HERE", "ROOT", "CompileError", "Kernel", "build_kernel", "check_source", "launch"]

MAX_CORES = 96
PIPES = ("S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX")

# Bits of sim_register's `access`.
_READ, _WRITE, _POISON = 1, 2, 4


class _CoreStruct(ctypes.Structure):
    _fields_ = (
        ("is_cube", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("gm_read_bytes", ctypes.c_uint64),
        ("gm_written_bytes", ctypes.c_uint64),
        ("scalar_gm_reads", ctypes.c_uint64),
        ("scalar_gm_writes", ctypes.c_uint64),
        ("copy_calls", ctypes.c_uint64),
        ("gm_l1_bytes", ctypes.c_uint64),
        ("l1_l0a_bytes", ctypes.c_uint64),
        ("l1_l0b_bytes", ctypes.c_uint64),
        ("l0c_gm_bytes", ctypes.c_uint64),
        ("hbm_bytes", ctypes.c_uint64),
        ("mmad_instructions", ctypes.c_uint64),
        ("mmad_steps", ctypes.c_uint64),
        ("vector_instructions", ctypes.c_uint64),
        ("vector_repeats", ctypes.c_uint64),
        ("bank_conflicts", ctypes.c_uint64),
        ("busy_cycles", ctypes.c_uint64 * len(PIPES)),
        ("scalar_instructions", ctypes.c_uint64),
        ("total_cycles", ctypes.c_uint64),
    )


class _CountersStruct(ctypes.Structure):
    _fields_ = (
        ("num_cores", ctypes.c_uint32),
        ("violations", ctypes.c_uint32),
        ("total_cycles", ctypes.c_uint64),
        ("total", _CoreStruct),
        ("core", _CoreStruct * MAX_CORES),
    )


class _TrafficStruct(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("hbm_bytes", ctypes.c_uint64),
    )


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.sim_launch.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_uint32,
        ctypes.c_uint64,
    )
    library.sim_report.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    library.sim_report.restype = ctypes.c_size_t
    library.sim_counters.argtypes = (ctypes.POINTER(_CountersStruct),)
    library.sim_traffic.argtypes = (ctypes.POINTER(_TrafficStruct), ctypes.c_size_t)
    library.sim_traffic.restype = ctypes.c_size_t
    library.sim_register.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_int,
    )
    library.sim_unregister.argtypes = (ctypes.c_void_p,)
    library.sim_scalar.argtypes = (
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_uint64,
    )
    library.sim_configure.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    return library


@contextmanager
def configured(**settings: int) -> Iterator[None]:
    """Change settings of the device (sim_api.h names them) for the duration of a block."""
    defaults = {"cores": 48, "ub_reserved": 8192, "max_violations": 100, "clock_mhz": 1800}
    for key, value in settings.items():
        _runtime().sim_configure(key.encode(), value)
    try:
        yield
    finally:
        for key in settings:
            _runtime().sim_configure(key.encode(), defaults[key])


class Kernel:
    """An entry point of a kernel source, compiled for the host."""

    def __init__(
        self,
        source: Path,
        name: str,
        *,
        includes: Sequence[Path] = (),
        defines: Sequence[str] = (),
    ) -> None:
        _runtime()
        self.source = source
        self.name = name
        self.includes = includes
        self.defines = defines
        library = ctypes.CDLL(str(build_kernel(source, includes=includes, defines=defines)))
        self.entry = ctypes.cast(getattr(library, name), ctypes.c_void_p)


@dataclass(frozen=True)
class CoreCounters:
    """What one core, or all together, did in a launch; cycles are modelled."""

    is_cube: int
    block: int
    gm_read_bytes: int
    gm_written_bytes: int
    scalar_gm_reads: int
    scalar_gm_writes: int
    copy_calls: int
    gm_l1_bytes: int
    l1_l0a_bytes: int
    l1_l0b_bytes: int
    l0c_gm_bytes: int
    hbm_bytes: int
    mmad_instructions: int
    mmad_steps: int
    vector_instructions: int
    vector_repeats: int
    bank_conflicts: int
    busy_cycles: dict[str, int]
    scalar_instructions: int
    total_cycles: int

    def busy_share(self, pipe: str) -> float:
        """The part of the core's time in which `pipe`, one of PIPES, works."""
        return self.busy_cycles[pipe] / self.total_cycles if self.total_cycles else 0.0

    def work(self) -> int:
        """Cycles of the core's busiest unit: the least that its work takes."""
        return max(cycles for pipe, cycles in self.busy_cycles.items() if pipe != "S")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one tensor that a launch moved; `hbm_bytes` of those read were not in L2."""

    read_bytes: int
    written_bytes: int
    hbm_bytes: int


@dataclass(frozen=True)
class Counters:
    """Counters of a launch: the sums over the cores, each core, and the cycles of the launch.

    These are its start and the slowest core's.

    The cores are the cube cores (AIC), if there are any, then the vector cores (AIV). `traffic` is
    by tensor; parts of a tensor that were named are apart from it.
    """

    total: CoreCounters
    cores: tuple[CoreCounters, ...]
    total_cycles: int
    traffic: dict[str, Traffic]

    def of_kind(self, *, cube: bool) -> tuple[CoreCounters, ...]:
        """Return the cube cores, or the vector cores."""
        return tuple(core for core in self.cores if bool(core.is_cube) == cube)


@dataclass(frozen=True)
class Result:
    """What a launch left: the rules that were broken, one text each, and the counters.

    `scalar` is what each core's scalar unit does by itself, where that was counted.
    """

    violations: tuple[str, ...]
    counters: Counters
    scalar: tuple[counting.CoreCount, ...] = ()


@dataclass(frozen=True)
class Part:
    """Bytes of a tensor that count as a tensor of their own, with a name and bounds."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class _Argument:
    array: np.ndarray
    access: int
    name: str
    parts: Sequence[Part] = ()


def read(array: np.ndarray, name: str = "") -> _Argument:
    """Pass a tensor that the kernel may only read. Plain arrays are passed this way too."""
    return _Argument(array, _READ, name)


def write(array: np.ndarray, name: str = "", parts: Sequence[Part] = ()) -> _Argument:
    """Pass an output or workspace: garbage at first, and the array gets what the kernel wrote."""
    return _Argument(array, _READ | _WRITE | _POISON, name, parts)


def update(array: np.ndarray, name: str = "") -> _Argument:
    """Pass a tensor that the kernel reads and writes."""
    return _Argument(array, _READ | _WRITE, name)


class _GuardedBuffer:
    """A copy of an array in the middle of a red zone, as the kernel sees it."""

    ZONE = 4096
    ALIGNMENT = 512  # what the device's allocator gives

    def __init__(self, argument: _Argument, name: str) -> None:
        self.argument = argument
        self.name = argument.name or name
        self.size = argument.array.nbytes
        self.memory = np.full(self.size + 2 * self.ZONE + self.ALIGNMENT, 0xA5, dtype=np.uint8)
        self.first = self.ZONE + -(self.memory.ctypes.data + self.ZONE) % self.ALIGNMENT
        inside = self.memory[self.first : self.first + self.size]
        self.inside = inside
        if not argument.access & _POISON:
            inside[:] = np.ascontiguousarray(argument.array).reshape(-1).view(np.uint8)
        self.address = self.memory.ctypes.data + self.first
        self.register(Part(self.name, 0, self.size))
        for part in argument.parts:
            self.register(part)

    def fill(self, value: int) -> None:
        """Give what the kernel only writes a value at first."""
        if self.argument.access & _POISON:
            self.inside[:] = value

    def register(self, part: Part) -> None:
        _runtime().sim_register(
            self.address + part.offset, part.size, part.name.encode(), self.argument.access
        )

    def close(self) -> None:
        for offset in [part.offset for part in self.argument.parts] + [0]:
            _runtime().sim_unregister(self.address + offset)

    def results(self) -> list[str]:
        """Give the results back and report what was written around them."""
        end = self.first + self.size
        if self.argument.access & _WRITE:
            array = self.argument.array
            array[...] = self.memory[self.first : end].view(array.dtype).reshape(array.shape)
        outside = np.concatenate((self.memory[: self.first], self.memory[end:]))
        if (outside != 0xA5).any():
            return [f"launch core 0 red-zone: memory next to {self.name} was written"]
        return []


def _counters() -> Counters:
    raw = _CountersStruct()
    _runtime().sim_counters(ctypes.byref(raw))

    def convert(core: _CoreStruct) -> CoreCounters:
        values = {name: getattr(core, name) for name, _ in _CoreStruct._fields_}
        values["busy_cycles"] = dict(zip(PIPES, core.busy_cycles, strict=True))
        return CoreCounters(**values)

    cores = tuple(convert(raw.core[i]) for i in range(raw.num_cores))
    return Counters(convert(raw.total), cores, raw.total_cycles, _traffic())


def _traffic() -> dict[str, Traffic]:
    """Return the bytes of the last launch by name; parts of one name are added up."""
    count = _runtime().sim_traffic(None, 0)
    raw = (_TrafficStruct * count)()
    _runtime().sim_traffic(raw, count)
    sums: dict[str, list[int]] = {}
    for entry in raw:
        total = sums.setdefault(entry.name.decode(), [0, 0, 0])
        total[0] += entry.read_bytes
        total[1] += entry.written_bytes
        total[2] += entry.hbm_bytes
    return {name: Traffic(*total) for name, total in sums.items()}


def _report() -> tuple[str, ...]:
    size = _runtime().sim_report(None, 0)
    text = ctypes.create_string_buffer(size)
    _runtime().sim_report(text, size)
    return tuple(text.value.decode().splitlines())


@contextmanager
def _arguments(
    args: Sequence[np.ndarray | _Argument | int],
) -> Iterator[tuple[ctypes.Array[ctypes.c_uint64], list[_GuardedBuffer]]]:
    """Lay out the arguments of a kernel as words; tensors are registered for so long."""
    buffers: list[_GuardedBuffer] = []
    addresses: dict[_Argument, int] = {}
    words = (ctypes.c_uint64 * max(1, len(args)))()
    try:
        for i, arg in enumerate(args):
            if isinstance(arg, (int, np.integer)):
                words[i] = int(arg) % 2**64
                continue
            argument = arg if isinstance(arg, _Argument) else read(arg)
            if argument not in addresses:
                buffers.append(_GuardedBuffer(argument, f"arg{i}"))
                addresses[argument] = buffers[-1].address
            words[i] = addresses[argument]
        yield words, buffers
    finally:
        for buffer in buffers:
            buffer.close()


def _count(
    kernel: Kernel,
    block_dim: int,
    words: ctypes.Array[ctypes.c_uint64],
    buffers: Sequence[_GuardedBuffer],
) -> tuple[counting.CoreCount, ...]:
    for buffer in buffers:
        buffer.fill(0)
    how = {"includes": kernel.includes, "defines": kernel.defines}
    return tuple(counting.count(kernel.source, kernel.name, block_dim, words, **how))


def count(
    kernel: Kernel, block_dim: int, *args: np.ndarray | _Argument | int, seed: int = 0
) -> tuple[counting.CoreCount, ...]:
    """Count the scalar instructions of each core of a launch (counting.py), without running it.

    The arguments are those of `launch`; the order of the cores, which `seed` stands for, has no
    influence. The kernel must keep its rules: nothing is checked.
    """
    with _arguments(args) as (words, buffers):
        return _count(kernel, block_dim, words, buffers)


def launch(
    kernel: Kernel,
    block_dim: int,
    *args: np.ndarray | _Argument | int,
    seed: int = 0,
    counted: bool = False,
) -> Result:
    """Run a kernel on `block_dim` cores and return what it broke and what it cost.

    Parameters
    ----------
    kernel
        What to run. Its parameters are GM_ADDR or 64-bit integers.
    block_dim
        Number of vector cores, or of groups where the kernel states a type with cube cores.
    *args
        One for each parameter: an array or ``read(array)``, ``write(array)``, ``update(array)``,
        copied to memory of exactly its size with red zones around; or an integer. One argument
        given twice is one copy.
    seed
        Fixes the order in which cores run.
    counted
        Whether the kernel's own scalar instructions are counted first, as by `count`. The modelled
        time is then made of them.

    """
    with _arguments(args) as (words, buffers):
        scalar = _count(kernel, block_dim, words, buffers) if counted else ()
        for index, core in enumerate(scalar):
            trace = core.trace
            _runtime().sim_scalar(index, trace.ctypes.data, len(trace), core.instructions)
        for buffer in buffers:
            buffer.fill(0xFF)
        _runtime().sim_launch(kernel.entry, block_dim, words, len(args), seed)
        counters = _counters()
        damage = [text for buffer in buffers for text in buffer.results()]
    return Result((*_report(), *damage), counters, scalar)
