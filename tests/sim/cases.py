"""Small attention calls that together reach every branch of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )


def make_case(
    dtype: torch.dtype,
    *,
    seq_lens: list[int],
    query_lens: list[int] | None = None,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    block_size: int = 16,
    layout: str = "NHD",
    seed: int = 0,
    **options: Any,
) -> Case:
    """Return a call with random values; what no row may look at holds NaN.

    `sinks` and `alibi_slopes` may be given as True for random ones. `layout` "HND" is that of
    PagedKVCache: the tokens of a block and KV head are dense.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(blocks) + 2
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    key_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan)
    value_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim_v), torch.nan)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(blocks), max(blocks, default=0)), 2**31 - 1, dtype=torch.int32)
    for row, (length, needed) in enumerate(zip(seq_lens, blocks, strict=True)):
        for column in range(needed):
            block = order.pop()
            tables[row, column] = block
            filled = min(block_size, length - column * block_size)
            key_cache[block, :filled] = normal(filled, num_kv_heads, head_dim)
            value_cache[block, :filled] = normal(filled, num_kv_heads, head_dim_v)
    if layout == "HND":
        key_cache, value_cache = (
            cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (key_cache, value_cache)
        )
    num_heads = num_kv_heads * group
    for name in ("sinks", "alibi_slopes"):
        if options.get(name) is True:
            options[name] = normal(num_heads).abs() / 4
    starts = None
    num_tokens = len(seq_lens)
    if query_lens is not None:
        starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
        num_tokens = sum(query_lens)
    return Case(
        normal(num_tokens, num_heads, head_dim).to(dtype),
        key_cache.to(dtype),
        value_cache.to(dtype),
        tables,
        torch.tensor(seq_lens, dtype=torch.int32),
        starts,
        options,
    )


def _scales_of(rows: Tensor, granularity: str) -> Tensor:
    """Return scales for rows [..., num_kv_heads, head_dim]; those of NaN rows are NaN."""
    largest = rows.float().abs().amax(-1) / 127
    if granularity.startswith("token"):
        if granularity == "token":  # as PagedKVCache in HND: the tokens of a block are dense
            return largest.transpose(1, 2).contiguous().transpose(1, 2)
        return largest
    by_head = largest.nan_to_num(0.0).amax((0, 1))
    return by_head if granularity == "head" else by_head.amax()


def quantised(case: Case, granularity: str) -> Case:
    """Return the case over int8 caches; what no row may look at has NaN for a scale, or any int."""
    scales = [_scales_of(cache, granularity) for cache in (case.key_cache, case.value_cache)]
    caches = []
    for cache, scale in zip((case.key_cache, case.value_cache), scales, strict=True):
        divisor = scale if scale.dim() == 3 else scale.expand(cache.shape[:3])
        elements = (cache.float() / divisor[..., None]).nan_to_num(99.0).round().clamp(-127, 127)
        caches.append(elements.to(torch.int8))
    names = {"key_scale": scales[0], "value_scale": scales[1]}
    return replace(case, key_cache=caches[0], value_cache=caches[1], options=case.options | names)


# Keyword arguments of make_case, by what they look at.
CASES: dict[str, dict[str, Any]] = {
    "decode, ragged": {"seq_lens": [5, 100, 0, 700]},
    "decode, one token": {"seq_lens": [1], "num_kv_heads": 1, "group": 1},
    "decode, large group": {"seq_lens": [33, 530], "num_kv_heads": 1, "group": 23},
    "several tokens": {"seq_lens": [520, 70, 3], "query_lens": [3, 1, 3], "head_dim": 80},
    "prefill": {"seq_lens": [130], "query_lens": [130], "head_dim_v": 96},
    "chunk on context": {"seq_lens": [600], "query_lens": [40], "num_kv_heads": 1},
    "more queries than keys": {"seq_lens": [3, 0], "query_lens": [9, 2]},
    "mixed": {"seq_lens": [600, 17, 64, 0], "query_lens": [1, 17, 0, 1]},
    "bidirectional": {"seq_lens": [90], "query_lens": [20], "causal": False},
    "window": {"seq_lens": [700, 50], "query_lens": [20, 50], "sliding_window": 33},
    "window past the first piece": {"seq_lens": [1600], "sliding_window": 300},
    "softcap": {"seq_lens": [80], "query_lens": [5], "softcap": 4.0, "scale": 1.5},
    "alibi": {"seq_lens": [600, 20], "query_lens": [4, 20], "alibi_slopes": True},
    "sinks": {"seq_lens": [600, 0, 3], "query_lens": [4, 2, 9], "sinks": True},
    "negative scale": {"seq_lens": [40], "scale": -0.7},
    "all options": {
        "seq_lens": [1100, 64],
        "query_lens": [6, 64],
        "sliding_window": 600,
        "softcap": 8.0,
        "alibi_slopes": True,
        "sinks": True,
    },
    "head_dim 256": {"seq_lens": [100], "head_dim": 256, "num_kv_heads": 1, "query_lens": [9]},
    "head_dim 16, block 128": {"seq_lens": [300], "head_dim": 16, "block_size": 128},
    "strided cache, block 32": {
        "seq_lens": [1200, 9],
        "query_lens": [3, 9],
        "block_size": 32,
        "layout": "HND",
    },
    "block 3": {"seq_lens": [100], "block_size": 3},
}
