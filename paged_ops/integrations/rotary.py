"""Rotary position embedding as FlashAttention applies it to what it appends."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    rows: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> Tensor:
    """Turn the first ``2 * rotary_half`` elements of each head by the angles of its position.

    Parameters
    ----------
    rows : Tensor
        ``[batch, num_tokens, heads, head_dim]``.
    cos, sin : Tensor
        ``[num_positions, rotary_half]``.
    positions : Tensor
        ``[batch, num_tokens]`` integers below num_positions.
    interleaved : bool
        Whether neighbours make a pair, or element i and element i + rotary_half.

    Returns
    -------
    Tensor
        As `rows`; computed in float32.
    """
    half = cos.shape[1]
    turned, rest = rows[..., : 2 * half].float(), rows[..., 2 * half :]
    cos, sin = (table[positions.long()][:, :, None].float() for table in (cos, sin))
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    result = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([result.to(rows.dtype), rest], dim=-1)
