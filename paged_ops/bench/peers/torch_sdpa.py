"""torch's own attention, sequence by sequence, on gathered and on contiguous K and V."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_ops.bench.peers.peer import Call, Peer
from paged_ops.bench.workloads import Inputs


def _contiguous(inputs: Inputs) -> Call:
    key, value = inputs.gathered()
    return lambda: _attend_each(inputs, key, value)


def _gathered(inputs: Inputs) -> Call:
    return lambda: _attend_each(inputs, *inputs.gathered())


def _attend_each(inputs: Inputs, key: Tensor, value: Tensor) -> list[Tensor]:
    lengths = list(inputs.workload.seq_lens)
    queries = inputs.query.split(list(inputs.workload.query_lens))
    keys, values = key.split(lengths), value.split(lengths)
    return [_attend_contiguous(*row) for row in zip(queries, keys, values, strict=True)]


def _attend_contiguous(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend ``[tokens, heads, head_dim]``, end-aligned: a mask where torch's own one is not."""
    new, length = query.shape[0], key.shape[0]
    mask = None
    if 1 < new < length:
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=new == length and new > 1,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


GATHERED = Peer(None, lambda: None, _gathered)
CONTIGUOUS = Peer(None, lambda: None, _contiguous)
