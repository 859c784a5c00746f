"""What the machine gives at most: bytes read, and products.

Reading, and products out of registers, are in C (``limits.c``), compiled when first asked for, and
run by as many threads as torch uses. Without a compiler there is torch's product of matrices alone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.workloads import Inputs

_SOURCE = Path(__file__).with_name("limits.c")

_SIDE = 2048  # of the matrices: large enough for the library's best speed

MATMUL_FLOPS = 2 * _SIDE**3

UNIT_FLOPS = 2**33
"""Of a call that shows how fast a unit multiplies: so many that threads' waking up is little."""

Unit = tuple[str, Callable[[], object]]


def limits(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Return the calls that show the limits of a workload.

    Parameters
    ----------
    inputs : Inputs
        The workload. Its pool is what is read.

    Returns
    -------
    dict of str to callable
        "read" reads the pool from its start to its end, "blocks" the same blocks, each once, in the
        order of the tables; "unit" makes `UNIT_FLOPS` by the `fastest_unit`; "matmul" multiplies
        two matrices of the workload's dtype, float32 for float16, with `MATMUL_FLOPS`.
    """
    # Where a processor has no float16 arithmetic, torch's product takes seconds.
    dtype = inputs.workload.dtype
    left, right = torch.randn(2, _SIDE, _SIDE).to(torch.float32 if dtype == torch.half else dtype)
    found: dict[str, Callable[[], object]] = {"matmul": lambda: torch.mm(left, right)}
    unit = fastest_unit(dtype)
    if unit is not None:
        found["unit"] = unit[1]
    order = in_order(inputs.block_tables)
    return found | readings(inputs.key_cache, {"read": order.sort().values, "blocks": order})


def in_order(block_tables: Tensor) -> Tensor:
    """Return the blocks of the tables in the order in which they first appear, each once."""
    order = block_tables[block_tables >= 0].long()
    first = torch.full((int(order.max()) + 1,), len(order))
    first.scatter_reduce_(0, order, torch.arange(len(order)), "amin")
    return order[first[first < len(order)].sort().values]


def fastest_unit(dtype: torch.dtype) -> Unit | None:
    """Return what multiplies elements of a dtype fastest, summing in float32.

    Parameters
    ----------
    dtype : torch.dtype
        bfloat16 may be multiplied by the matrix unit ("tiles") or in vectors of pairs; everything
        else becomes float32 ("floats").

    Returns
    -------
    tuple of (str, callable), or None
        Its name, and a call that makes `UNIT_FLOPS`; None without a compiler.
    """
    return _fastest_unit(dtype, torch.get_num_threads())


@cache
def _fastest_unit(dtype: torch.dtype, threads: int) -> Unit | None:
    """Time the units once."""
    library = _library()
    if library is None:
        return None
    names = ["floats"]
    if dtype == torch.bfloat16:
        names.append("pairs")
        # A process has to ask for the matrix unit before it uses it.
        if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
            names.append("tiles")
    calls = {}
    for name in names:
        products = getattr(library, f"products_by_{name}")
        if flops := products(0, threads):
            rounds = -(-UNIT_FLOPS // (flops * threads))
            calls[name] = partial(products, rounds, threads)
    best = min(calls, key=lambda name: _seconds(calls[name]))
    return best, calls[best]


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
    library = _library()
    if library is None:
        return {}
    size = key_cache.stride(0) * key_cache.element_size()
    assert size % 256 == 0, size
    threads = torch.get_num_threads()

    def read(order: Tensor) -> object:
        return library.read_pieces(
            key_cache.data_ptr(), order.data_ptr(), len(order), size, threads
        )

    return {
        name: partial(read, tables[tables >= 0].long()) for name, tables in block_tables.items()
    }


def _seconds(call: Callable[[], object]) -> float:
    """Return the least time of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@cache
def _library() -> Any:
    """Compile the C functions; None where there is no compiler, or none with OpenMP."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "limits.so")
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        command = [compiler, *flags, "-o", str(path), str(_SOURCE)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        library = ctypes.CDLL(str(path))
    pointer, count, size = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_size_t
    library.read_pieces.restype = ctypes.c_uint64
    library.read_pieces.argtypes = [pointer, pointer, count, size, ctypes.c_int]
    for name in ("tiles", "pairs", "floats"):
        products = getattr(library, f"products_by_{name}")
        products.restype = ctypes.c_int64
        products.argtypes = [ctypes.c_int64, ctypes.c_int]
    return library
