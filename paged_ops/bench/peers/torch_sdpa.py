"""What attention is compared with: torch itself, on gathered and on contiguous K and V."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_ops.bench.workloads import Inputs

Call = Callable[[], object]


def paged(inputs: Inputs) -> Call:
    """Return a call of ``torch.ops.paged.attention``."""
    arguments = (
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.query_start_loc,
    )
    return lambda: torch.ops.paged.attention.default(*arguments)


def _attend_contiguous(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend ``[tokens, heads, head_dim]``, end-aligned: a mask where torch's own one is not."""
    new, length = query.shape[0], key.shape[0]
    mask = None
    if 1 < new < length:
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    return scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=new == length and new > 1,
        enable_gqa=True,
    )


def contiguous_sdpa(inputs: Inputs) -> Call:
    """Return SDPA sequence by sequence on K and V that are contiguous already."""
    key, value = inputs.gathered()
    return lambda: _attend_each(inputs, key, value)


def gather_sdpa(inputs: Inputs) -> Call:
    """Return SDPA sequence by sequence after gathering K and V out of the pool."""
    return lambda: _attend_each(inputs, *inputs.gathered())


def _attend_each(inputs: Inputs, key: Tensor, value: Tensor) -> list[Tensor]:
    lengths = list(inputs.workload.seq_lens)
    queries = inputs.query.split(list(inputs.workload.query_lens))
    keys, values = key.split(lengths), value.split(lengths)
    return [_attend_contiguous(*row) for row in zip(queries, keys, values, strict=True)]


def read_limit(inputs: Inputs) -> Call:
    """Return a call that streams as many bytes as the K and V of the workload, and only that."""
    memory = torch.zeros(inputs.workload.kv_bytes // 8, dtype=torch.int64)
    return memory.sum


PEERS: dict[str, Callable[[Inputs], Call]] = {
    "paged": paged,
    "gather+sdpa": gather_sdpa,
    "sdpa": contiguous_sdpa,
    "read": read_limit,
}
