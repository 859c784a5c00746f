"""The part of the package for the first runs on an Ascend NPU, and the build of its kernels."""
