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

import numpy as np
import torch
from torch import Tensor

from tests.sim import tiling as host
from tests.sim.harness import ROOT, Kernel, Part, Result, launch, read, update, write

OP_KERNEL = ROOT / "op_kernel"
SLOTS = 5  # kExchangeBuffers of op_kernel/attention_tiling_data.h
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


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


def _planned(answer: host.Answer) -> str:
    """Return the name of the entry point, or raise what the tiling refused."""
    if answer.refusal:
        raise ValueError(answer.refusal.decode())
    return str(answer.kernel.decode())


@dataclass(frozen=True)
class AttentionRun:
    """What a launch gave: the op's results, the plan and what the simulated device says."""

    output: Tensor
    lse: Tensor
    kernel: str  # "vector" or "mixed"
    tiling: host.AttentionTilingData
    num_cores: int
    result: Result


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
    with_lse: bool = True,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
    adjust: Callable[[host.AttentionTilingData], None] | None = None,
    wanted: str = "",
) -> AttentionRun:
    """Plan and launch the attention kernel on contiguous tensors; the caches may be permuted.

    Parameters
    ----------
    query ... sinks
        As `paged_ops.attention`.
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
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, head_dim_v = value_cache.shape
    shape = host.AttentionTilingData(
        num_tokens=num_tokens,
        batch=len(seq_lens),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks_per_seq=block_tables.shape[1],
        table_row_stride=block_tables.shape[1],
        table_column_stride=1,
        query=host.RowLayout(num_heads * head_dim, head_dim),
        output=host.RowLayout(num_heads * head_dim_v, head_dim_v),
        key=_cache_layout(key_cache),
        value=_cache_layout(value_cache),
        sliding_window=sliding_window or 0,
        causal=causal,
        has_query_start_loc=query_start_loc is not None,
        has_alibi_slopes=alibi_slopes is not None,
        has_sinks=sinks is not None,
        has_lse=with_lse,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
    )
    dtype = _NAMES[query.dtype]
    answer = host.plan_attention(shape, dtype, cores, wanted)
    name = _planned(answer)
    if adjust is not None:
        adjust(shape)
    output = np.zeros((num_tokens, num_heads, head_dim_v), dtype=to_numpy(query).dtype)
    lse = np.zeros((num_tokens, num_heads), dtype=np.float32)
    workspace = np.zeros(answer.workspace_bytes, dtype=np.uint8)
    result = launch(
        kernel(name, f"{answer.stem.decode()}.cpp", folder),
        answer.num_cores,
        read(to_numpy(query), "query"),
        read(to_numpy(_storage(key_cache)), "key_cache"),
        read(to_numpy(_storage(value_cache)), "value_cache"),
        read(to_numpy(block_tables), "block_tables"),
        read(to_numpy(seq_lens), "seq_lens"),
        0 if query_start_loc is None else read(to_numpy(query_start_loc), "query_start_loc"),
        0 if alibi_slopes is None else read(to_numpy(alibi_slopes), "alibi_slopes"),
        0 if sinks is None else read(to_numpy(sinks), "sinks"),
        write(output, "output"),
        write(lse, "lse") if with_lse else 0,
        write(workspace, "workspace", parts=_exchange_parts(shape, answer.num_cores, query))
        if answer.workspace_bytes
        else 0,
        read(_bytes(shape), "tiling"),
        seed=seed,
    )
    return AttentionRun(
        from_numpy(output, query.dtype),
        torch.from_numpy(lse),
        "mixed" if "mixed" in name else "vector",
        shape,
        answer.num_cores,
        result,
    )


def _exchange_parts(shape: host.AttentionTilingData, groups: int, query: Tensor) -> list[Part]:
    """Name what the cores of the mixed kernel's groups hand each other, as exchange.h."""
    if not shape.exchange_bytes:
        return []
    pairs = shape.max_rows * shape.exchange_keys
    sizes = {
        "scores": SLOTS * pairs * 4,
        "weights": SLOTS * pairs * query.element_size(),
        "products": SLOTS * shape.max_rows * shape.value.head_dim * 4,
    }
    parts = []
    for group in range(groups):
        at = group * shape.exchange_bytes
        for name, size in sizes.items():
            parts.append(Part(name, at, size))
            at += size
    return parts


def _storage(tensor: Tensor) -> Tensor:
    """Return the elements of a whole storage, in the order in which they lie there."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def _cache_layout(cache: Tensor) -> host.CacheLayout:
    block_stride, token_stride, head_stride, _ = cache.stride()
    return host.CacheLayout(cache.shape[3], block_stride, token_stride, head_stride)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
) -> Result:
    """Plan and launch the write_kv kernel; the contiguous caches are written in place."""
    num_tokens, num_kv_heads, head_dim = key.shape
    head_dim_v = value.shape[2]
    shape = host.WriteKvTilingData(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        num_blocks=key_cache.shape[0],
        block_size=key_cache.shape[1],
        key_rows=host.RowLayout(num_kv_heads * head_dim, head_dim),
        value_rows=host.RowLayout(num_kv_heads * head_dim_v, head_dim_v),
        key=_cache_layout(key_cache),
        value=_cache_layout(value_cache),
        has_int64_slots=slot_mapping.dtype == torch.int64,
    )
    answer = host.plan("write_kv", shape, key.element_size(), cores)
    return launch(
        kernel(_planned(answer), "write_kv.cpp", folder),
        answer.num_cores,
        read(to_numpy(key), "key"),
        read(to_numpy(value), "value"),
        update(to_numpy(key_cache), "key_cache"),
        update(to_numpy(value_cache), "value_cache"),
        read(to_numpy(slot_mapping), "slot_mapping"),
        read(_bytes(shape), "tiling"),
        seed=seed,
    )


def copy_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_mapping: Tensor,
    *,
    cores: int = 48,
    seed: int = 0,
    folder: Path = OP_KERNEL,
) -> Result:
    """Plan and launch the copy_blocks kernel; the contiguous caches are written in place."""
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    shape = host.CopyBlocksTilingData(
        num_copies=len(block_mapping),
        num_kv_heads=num_kv_heads,
        num_blocks=num_blocks,
        block_size=block_size,
        key=_cache_layout(key_cache),
        value=_cache_layout(value_cache),
        has_int64_ids=block_mapping.dtype == torch.int64,
        id_row_stride=2,
        id_column_stride=1,
    )
    answer = host.plan("copy_blocks", shape, key_cache.element_size(), cores)
    name = _planned(answer)
    workspace = np.zeros(answer.workspace_bytes, dtype=np.uint8)
    return launch(
        kernel(name, "copy_blocks.cpp", folder),
        answer.num_cores,
        update(to_numpy(key_cache), "key_cache"),
        update(to_numpy(value_cache), "value_cache"),
        read(to_numpy(block_mapping), "block_mapping"),
        write(workspace, "workspace"),
        read(_bytes(shape), "tiling"),
        seed=seed,
    )


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
    rows = host.RowLayout(num_heads * head_dim, head_dim)
    lse_rows = host.RowLayout(num_heads, 1)
    shape = host.MergeStatesTilingData(
        num_tokens, num_heads, head_dim, rows, rows, rows, lse_rows, lse_rows
    )
    answer = host.plan("merge_states", shape, _NAMES[out_a.dtype], cores)
    name = _planned(answer)
    out = np.zeros(tuple(out_a.shape), dtype=to_numpy(out_a).dtype)
    lse = np.zeros((num_tokens, num_heads), dtype=np.float32)
    result = launch(
        kernel(name, "merge_states.cpp", folder),
        answer.num_cores,
        read(to_numpy(out_a), "out_a"),
        read(to_numpy(lse_a), "lse_a"),
        read(to_numpy(out_b), "out_b"),
        read(to_numpy(lse_b), "lse_b"),
        write(out, "out"),
        write(lse, "lse"),
        read(_bytes(shape), "tiling"),
        seed=seed,
    )
    return from_numpy(out, out_a.dtype), torch.from_numpy(lse), result
