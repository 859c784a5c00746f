"""FlashAttention's documentation in float64: dense scores for one sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIM = 16
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@dataclass(frozen=True)
class Rules:
    """The options of one call, as FlashAttention names them."""

    causal: bool
    window_size: tuple[int, int]
    softcap: float
    softmax_scale: float | None
    attention_chunk: int = 0

    @property
    def local(self) -> bool:
        return self.causal or self.window_size != (-1, -1) or self.attention_chunk > 0


def reference(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend for one sequence: ``[seqlen, heads, head_dim]`` and lse ``[heads, seqlen]``."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if rules.softmax_scale is None else rules.softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))[None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    left, right = rules.window_size
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if rules.attention_chunk:
        seen &= i.div(rules.attention_chunk, rounding_mode="floor") == j // rules.attention_chunk
    if left >= 0:
        seen &= j >= i - left
    if rules.causal:
        right = 0
    if right >= 0:
        seen &= j <= i + right
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int, step: int, interleaved: bool) -> Tensor:
    """Turn ``x [seqlen, heads, head_dim]``, element by element, as the documentation says."""
    x, half = x.double().clone(), cos.shape[1]
    result = x.clone()
    for t in range(len(x)):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[first + step * t, i].double(), sin[first + step * t, i].double()
            result[t, :, a] = x[t, :, a] * c - x[t, :, b] * s
            result[t, :, b] = x[t, :, b] * c + x[t, :, a] * s
    return result
