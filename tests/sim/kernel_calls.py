"""Calls of the project's Ascend kernels on simulated cores, with torch tensors on the host.

The same tiling functions and kernel sources as on the device, but without torch_npu: for tests that
look at counters, violations and mutated kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.sim import tiling as host
from tests.sim.harness import ROOT, Kernel, Part, Result, launch, read, update, write

OP_KERNEL = ROOT / "op_kernel"
SLOTS = 5  # kExchangeBuffers of op_kernel/attention_tiling_data.h


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return the tensor's elements as an array; bfloat16, which numpy lacks, as its bits."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


@cache
def kernel(name: str, source: str, folder: Path = OP_KERNEL) -> Kernel:
    return Kernel(folder / source, name, includes=(folder,))


def _bytes(struct: ctypes.Structure) -> np.ndarray:
    return np.frombuffer(bytes(struct), dtype=np.uint8)


def _plan(op: str, shape: ctypes.Structure, cores: int, wanted: str = "") -> host.Plan:
    """Plan a call, or raise what the tiling refused."""
    plan = host.plan(op, shape, cores, wanted)
    if plan.refusal:
        raise ValueError(plan.refusal)
    return plan


def _dtype(tensor: Tensor) -> int:
    return host.DTYPES.index(str(tensor.dtype).removeprefix("torch."))


def _pool(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Any:
    """Return the pool, with addresses of the host, which a plan compares."""
    return host.Pool(
        _dtype(key_cache),
        *key_cache.shape[:3],
        _cache(key_cache, key_scale),
        _cache(value_cache, value_scale),
    )


def _cache(cache: Tensor, scale: Tensor | None) -> Any:
    scales = host.Scales(None, 0, 0, 0, False)
    if scale is not None:
        strides = (0,) * (3 - scale.dim()) + scale.stride()
        scales = host.Scales(scale.data_ptr(), *strides, scale.dim() == 3)
    return host.Cache(cache.data_ptr(), cache.shape[3], *cache.stride()[:3], scales)


class _Memory:
    """The storages behind the tensors of a call: those that share one share its copy."""

    def __init__(self) -> None:
        self.passed: dict[int, Any] = {}

    def pass_on(
        self, how: Callable[[np.ndarray, str], Any], tensor: Tensor | None, name: str
    ) -> Any:
        """Return the argument for a tensor that lies where its storage begins; 0 for None."""
        if tensor is None:
            return 0
        assert tensor.storage_offset() == 0
        key = tensor.untyped_storage().data_ptr()
        if key not in self.passed:
            self.passed[key] = how(to_numpy(_storage(tensor)), name)
        return self.passed[key]


def _rows(num_heads: int, head_dim: int) -> Any:
    """Return contiguous rows."""
    return host.Rows(None, num_heads * head_dim, head_dim)


@dataclass(frozen=True)
class AttentionRun:
    """What a launch gave: the op's results, the plan and what the simulated device says."""

    output: Tensor
    lse: Tensor
    kernel: str  # "vector" or "mixed"
    tiling: Any  # host.AttentionTilingData
    num_cores: int
    result: Any  # what `how` gave: a Result


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    with_lse: bool = True,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
    adjust: Callable[[Any], None] | None = None,
    wanted: str = "",
    how: Callable[..., Any] = launch,
) -> AttentionRun:
    """Plan and launch the attention kernel on contiguous tensors; the caches may be permuted.

    Parameters
    ----------
    query ... tree_mask
        As `paged_ops.attention`; the rows of tree_mask are dense.
    with_lse
        Whether the kernel writes lse, as attention_with_lse asks; else lse stays 0.
    cores, seed
        Vector cores of the chip; order in which they run.
    folder
        Where the kernel's sources are: a mutated copy, for example.
    adjust
        Changes the tiling after it was planned.
    wanted
        The kernel, "vector" or "mixed"; empty: the usual one.
    how
        What takes the kernel and its arguments: `launch` or `count` of harness.py.
    """
    num_tokens, num_heads, head_dim = query.shape
    head_dim_v = value_cache.shape[3]
    output = np.zeros((num_tokens, num_heads, head_dim_v), dtype=to_numpy(query).dtype)
    lse = np.zeros((num_tokens, num_heads), dtype=np.float32)
    shape = host.AttentionShape(
        dtype=_dtype(query),
        pool=_pool(key_cache, value_cache, key_scale, value_scale),
        block_tables=host.BlockTables(None, block_tables.shape[1], 1),
        max_blocks_per_seq=block_tables.shape[1],
        batch=len(seq_lens),
        num_tokens=num_tokens,
        num_heads=num_heads,
        tree_mask=_tree_mask(tree_mask),
        query=_rows(num_heads, head_dim),
        output=_rows(num_heads, head_dim_v),
        lse=lse.ctypes.data if with_lse else None,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        sliding_window=sliding_window or 0,
        causal=causal,
        has_query_start_loc=query_start_loc is not None,
        has_alibi_slopes=alibi_slopes is not None,
        has_sinks=sinks is not None,
    )
    plan = _plan("attention", shape, cores, wanted)
    if adjust is not None:
        adjust(plan.tiling)
    workspace = np.zeros(plan.workspace_bytes, dtype=np.uint8)
    memory = _Memory()
    result = how(
        kernel(plan.kernel, f"{plan.stem}.cpp", folder),
        plan.num_cores,
        read(to_numpy(query), "query"),
        memory.pass_on(read, key_cache, "key_cache"),
        memory.pass_on(read, value_cache, "value_cache"),
        read(to_numpy(block_tables), "block_tables"),
        read(to_numpy(seq_lens), "seq_lens"),
        0 if query_start_loc is None else read(to_numpy(query_start_loc), "query_start_loc"),
        0 if alibi_slopes is None else read(to_numpy(alibi_slopes), "alibi_slopes"),
        0 if sinks is None else read(to_numpy(sinks), "sinks"),
        memory.pass_on(read, key_scale, "key_scale"),
        memory.pass_on(read, value_scale, "value_scale"),
        0 if tree_mask is None else read(to_numpy(tree_mask), "tree_mask"),
        write(output, "output"),
        write(lse, "lse") if with_lse else 0,
        write(workspace, "workspace", parts=_exchange_parts(plan.tiling, plan.num_cores, query))
        if plan.workspace_bytes
        else 0,
        read(_bytes(plan.tiling), "tiling"),
        seed=seed,
    )
    return AttentionRun(
        from_numpy(output, query.dtype),
        torch.from_numpy(lse),
        "mixed" if "mixed" in plan.kernel else "vector",
        plan.tiling,
        plan.num_cores,
        result,
    )


def _tree_mask(mask: Tensor | None) -> Any:
    if mask is None:
        return host.TreeMask(None, 0, 0, 0)
    return host.TreeMask(mask.data_ptr(), mask.shape[1], 1, mask.shape[1])


def _exchange_parts(tiling: Any, groups: int, query: Tensor) -> list[Part]:
    """Name what the cores of the mixed kernel's groups hand each other, as exchange.h."""
    if not tiling.exchange_bytes:
        return []
    pairs = tiling.max_rows * tiling.exchange_keys
    sizes = {
        "scores": SLOTS * pairs * 4,
        "weights": SLOTS * pairs * query.element_size(),
        "products": SLOTS * tiling.max_rows * tiling.value.head_dim * 4,
    }
    parts = []
    for group in range(groups):
        at = group * tiling.exchange_bytes
        for name, size in sizes.items():
            parts.append(Part(name, at, size))
            at += size
    return parts


def _storage(tensor: Tensor) -> Tensor:
    """Return the elements of a whole storage, in the order in which they lie there."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
) -> Result:
    """Plan and launch the write_kv kernel; caches and scales are written in place."""
    shape = host.WriteKvShape(
        dtype=_dtype(key),
        pool=_pool(key_cache, value_cache, key_scale, value_scale),
        key=host.Rows(key.data_ptr(), *key.stride()[:2]),
        value=host.Rows(value.data_ptr(), *value.stride()[:2]),
        num_tokens=len(key),
        has_int64_slots=slot_mapping.dtype == torch.int64,
    )
    plan = _plan("write_kv", shape, cores)
    memory = _Memory()
    scales = [
        memory.pass_on(update if scale.dim() == 3 else read, scale, name)
        for scale, name in ((key_scale, "key_scale"), (value_scale, "value_scale"))
        if scale is not None
    ]
    return launch(
        kernel(plan.kernel, "write_kv.cpp", folder),
        plan.num_cores,
        memory.pass_on(read, key, "key"),
        memory.pass_on(read, value, "value"),
        memory.pass_on(update, key_cache, "key_cache"),
        memory.pass_on(update, value_cache, "value_cache"),
        *scales,
        read(to_numpy(slot_mapping), "slot_mapping"),
        read(_bytes(plan.tiling), "tiling"),
        seed=seed,
    )


def copy_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
) -> Result:
    """Plan and launch the copy_blocks kernel; caches and scales are written in place."""
    shape = host.CopyBlocksShape(
        pool=_pool(key_cache, value_cache, key_scale, value_scale),
        num_copies=len(block_mapping),
        has_int64_ids=block_mapping.dtype == torch.int64,
        id_row_stride=2,
        id_column_stride=1,
    )
    plan = _plan("copy_blocks", shape, cores)
    workspace = np.zeros(plan.workspace_bytes, dtype=np.uint8)
    memory = _Memory()
    return launch(
        kernel(plan.kernel, "copy_blocks.cpp", folder),
        plan.num_cores,
        memory.pass_on(update, key_cache, "key_cache"),
        memory.pass_on(update, value_cache, "value_cache"),
        memory.pass_on(update, key_scale, "key_scale"),
        memory.pass_on(update, value_scale, "value_scale"),
        read(to_numpy(block_mapping), "block_mapping"),
        write(workspace, "workspace"),
        read(_bytes(plan.tiling), "tiling"),
        seed=seed,
    )


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
) -> tuple[Tensor, Tensor, Result]:
    """Plan and launch the gather_kv kernel; the result has `num_tokens` whatever seq_lens says."""
    num_kv_heads = key_cache.shape[2]
    dtype = torch.float32 if key_cache.dtype == torch.int8 else key_cache.dtype
    shape = host.GatherKvShape(
        pool=_pool(key_cache, value_cache, key_scale, value_scale),
        block_tables=host.BlockTables(None, block_tables.shape[1], 1),
        max_blocks_per_seq=block_tables.shape[1],
        batch=len(seq_lens),
        num_tokens=num_tokens,
    )
    plan = _plan("gather_kv", shape, cores)
    memory = _Memory()
    results = [
        torch.zeros(num_tokens, num_kv_heads, cache.shape[3], dtype=dtype)
        for cache in (key_cache, value_cache)
    ]
    result = launch(
        kernel(plan.kernel, "gather_kv.cpp", folder),
        plan.num_cores,
        memory.pass_on(read, key_cache, "key_cache"),
        memory.pass_on(read, value_cache, "value_cache"),
        memory.pass_on(read, key_scale, "key_scale"),
        memory.pass_on(read, value_scale, "value_scale"),
        read(to_numpy(block_tables), "block_tables"),
        read(to_numpy(seq_lens), "seq_lens"),
        write(to_numpy(results[0]), "key"),
        write(to_numpy(results[1]), "value"),
        read(_bytes(plan.tiling), "tiling"),
        seed=seed,
    )
    return results[0], results[1], result


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
) -> tuple[Tensor, Tensor, Result]:
    """Plan and launch the merge_states kernel on contiguous tensors."""
    num_tokens, num_heads, head_dim = out_a.shape
    rows, lse_rows = _rows(num_heads, head_dim), _rows(num_heads, 1)
    shape = host.MergeStatesParams(
        _dtype(out_a), num_tokens, num_heads, head_dim, rows, rows, rows, lse_rows, lse_rows
    )
    plan = _plan("merge_states", shape, cores)
    out = np.zeros(tuple(out_a.shape), dtype=to_numpy(out_a).dtype)
    lse = np.zeros((num_tokens, num_heads), dtype=np.float32)
    result = launch(
        kernel(plan.kernel, "merge_states.cpp", folder),
        plan.num_cores,
        read(to_numpy(out_a), "out_a"),
        read(to_numpy(lse_a), "lse_a"),
        read(to_numpy(out_b), "out_b"),
        read(to_numpy(lse_b), "lse_b"),
        write(out, "out"),
        write(lse, "lse"),
        read(_bytes(plan.tiling), "tiling"),
        seed=seed,
    )
    return from_numpy(out, out_a.dtype), torch.from_numpy(lse), result
