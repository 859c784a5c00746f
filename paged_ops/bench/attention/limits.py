"""What the machine gives at most: bytes read, and products of matrices.

Reading is done in C, compiled when it is first asked for, by the threads that torch uses. Without
a compiler there is no limit to show.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.workloads import Inputs

# Each piece is a multiple of 256 bytes. The sum is what keeps the reads from being left out.
_SOURCE = """
#include <stddef.h>
#include <stdint.h>

uint64_t read_pieces(const char *pool, const int64_t *pieces, ptrdiff_t count, size_t size,
                     int threads) {
  uint64_t all = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : all)
  for (ptrdiff_t i = 0; i < count; ++i) {
    const char *piece = pool + pieces[i] * size;
    const char *next = pool + pieces[i + 1 < count ? i + 1 : i] * size;
    uint64_t sums[32] = {0};
    for (size_t at = 0; at < size; at += 256) {
      const uint64_t *words = (const uint64_t *)(piece + at);
      for (int line = 0; line < 4; ++line) __builtin_prefetch(next + at + 64 * line);
      for (int k = 0; k < 32; ++k) sums[k] += words[k];
    }
    for (int k = 0; k < 32; ++k) all += sums[k];
  }
  return all;
}
"""

_SIDE = 2048  # of the matrices: large enough for the library's best speed

MATMUL_FLOPS = 2 * _SIDE**3


def limits(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Return the calls that show the limits of a workload.

    Parameters
    ----------
    inputs : Inputs
        The workload. Its pool is what is read.

    Returns
    -------
    dict of str to callable
        "read" reads the pool from its start to its end, "blocks" the same blocks in the order of
        the tables, "matmul" multiplies two matrices of the workload's dtype, float32 for float16,
        with `MATMUL_FLOPS`.
    """
    # Where a processor has no float16 arithmetic, torch's product takes seconds.
    dtype = inputs.workload.dtype
    left, right = torch.randn(2, _SIDE, _SIDE).to(torch.float32 if dtype == torch.half else dtype)
    found: dict[str, Callable[[], object]] = {"matmul": lambda: torch.mm(left, right)}
    order = inputs.block_tables[inputs.block_tables >= 0]
    return found | readings(inputs.key_cache, {"read": order.sort().values, "blocks": order})


def readings(
    key_cache: Tensor, block_tables: Mapping[str, Tensor]
) -> dict[str, Callable[[], object]]:
    """Return calls that read whole blocks, as many bytes as lie between two of them.

    Parameters
    ----------
    key_cache : Tensor
        ``[num_blocks, ...]``: where the blocks begin. Those of `PagedKVCache` hold K and V.
    block_tables : mapping of str to Tensor
        For each call block ids in the order of reading; negative ones are none.

    Returns
    -------
    dict of str to callable
        Empty without a compiler.
    """
    reader = _reader()
    if reader is None:
        return {}
    size = key_cache.stride(0) * key_cache.element_size()
    assert size % 256 == 0, size
    threads = torch.get_num_threads()

    def read(order: Tensor) -> object:
        return reader(key_cache.data_ptr(), order.data_ptr(), len(order), size, threads)

    return {
        name: partial(read, tables[tables >= 0].long()) for name, tables in block_tables.items()
    }


@cache
def _reader() -> Any:
    """Compile the reader; None where there is no compiler, or none with OpenMP."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "read.c"), Path(folder, "read.so")
        source.write_text(_SOURCE)
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        command = [compiler, *flags, "-o", str(library), str(source)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        function = ctypes.CDLL(str(library)).read_pieces
    function.restype = ctypes.c_uint64
    pointer, count, size = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_size_t
    function.argtypes = [pointer, pointer, count, size, ctypes.c_int]
    return function
