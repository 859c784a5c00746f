"""Attention by the online algorithm, in readable torch: what the compiled kernels follow.

It goes block by block, as FlashAttention and PagedAttention do, and never holds more than one block
of scores. For each block with scores ``s`` and values ``V``::

    M'   = max(M, max(s))
    Z'   = Z * exp(M - M') + sum(exp(s - M'))
    acc' = acc * exp(M - M') + exp(s - M') @ V

and at the end ``output = acc / Z`` and ``lse = M + log(Z)``. It starts from ``M = sink, Z = 1``
(``M = -inf, Z = 0`` without a sink) and ``acc = 0``: the sink is a key whose value is zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from paged_ops import reference
from paged_ops.ops.checks import AttentionOptions


def attention_by_blocks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """Compute `reference.attention_with_lse`, to within rounding."""
    key_half, value_half = reference.halves(key_cache, value_cache, options)
    visible = reference.Visibility.of(options)
    rule = reference.ScoreRule.of(query, options)
    sinks = reference.in_arithmetic(options.get("sinks"), query)
    output, lse = reference.empty_results(query, value_cache)
    block_size = key_cache.shape[1]

    for sequence, rows in reference.sequences(query, seq_lens, query_start_loc):
        length = int(seq_lens[sequence])
        for row in rows:
            position = length - (rows.stop - row)
            seen = visible.keys(row, position, length, length - len(rows))
            state = OnlineSoftmax(query.shape[1], value_cache.shape[3], sinks, output)
            for index in (seen // block_size).unique().tolist():
                block = int(block_tables[sequence, index])
                in_block = seen[seen // block_size == index]
                offsets = in_block % block_size
                state.add(
                    rule.scores(
                        query[row].to(output.dtype),
                        key_half.rows(block, offsets, output.dtype),
                        in_block - position,
                    ),
                    value_half.rows(block, offsets, output.dtype),
                )
            output[row], lse[row] = state.result()
    return output.to(query.dtype), lse


class OnlineSoftmax:
    """The running maximum, denominator and weighted sum of one query token, for all its heads."""

    def __init__(self, num_heads: int, head_dim_v: int, sinks: Tensor | None, like: Tensor) -> None:
        if sinks is None:
            sinks = like.new_full((num_heads,), -math.inf)
        self.maximum = sinks
        self.denominator = torch.where(torch.isneginf(sinks), 0.0, torch.ones_like(sinks))
        self.accumulator = like.new_zeros(num_heads, head_dim_v)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take in one block: ``scores [num_heads, n]``, ``values [n, num_kv_heads, ...]``."""
        maximum = torch.maximum(self.maximum, scores.amax(dim=1))
        rescale = torch.exp(self.maximum - maximum)
        weights = torch.exp(scores - maximum.unsqueeze(1))
        self.denominator = self.denominator * rescale + weights.sum(dim=1)
        self.accumulator = self.accumulator * rescale.unsqueeze(1) + reference.weigh(
            weights, values
        )
        self.maximum = maximum

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output ``[num_heads, head_dim_v]`` and the lse ``[num_heads]``."""
        nothing_seen = self.denominator == 0.0
        divisor = torch.where(nothing_seen, 1.0, self.denominator).unsqueeze(1)
        return self.accumulator / divisor, self.maximum + torch.log(self.denominator)
