"""How a quantised pool holds keys and values: the rule of `paged_ops.reference`, written apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CACHE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES = ("token", "head", "tensor")


@dataclass(frozen=True)
class Quantisation:
    """The element type of a pool, and what shares a scale.

    ``granularity`` is "token" (and head), "head" or "tensor", or "none" for float8 without scales.
    """

    dtype: torch.dtype
    granularity: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.granularity}"

    @property
    def largest(self) -> float:
        """The largest element."""
        return 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max

    def fixed_scale(self, num_kv_heads: int) -> Tensor:
        """Return scales that standard normal values fit, some of them only just."""
        scales = (1.0 + torch.arange(num_kv_heads) / 8) * 3.5 / self.largest
        return scales if self.granularity == "head" else scales[0].clone()

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elements of ``[n, num_kv_heads, d]`` rows, and each row's float32 scale."""
        rows = rows.float()
        if self.granularity == "token":
            scales = rows.abs().amax(dim=2) / self.largest
            scales = torch.where(scales.isfinite(), scales, math.nan)
        elif self.granularity == "none":
            scales = torch.ones(rows.shape[:2])
        else:
            scales = self.fixed_scale(rows.shape[1]).expand(rows.shape[:2])
        ratio = rows / scales[..., None]
        ratio = torch.where(((scales == 0) | scales.isnan())[..., None], 0.0, ratio)
        if self.dtype == torch.int8:
            ratio = ratio.round().nan_to_num(nan=0.0)
            return ratio.clamp(-128, 127).to(torch.int8), scales
        return ratio.clamp(-self.largest, self.largest).to(self.dtype), scales

    def as_read(self, rows: Tensor) -> Tensor:
        """Return what attention sees of rows once they are stored, in float64."""
        elements, scales = self.stored(rows)
        return elements.double() * scales.double()[..., None]


QUANTISATIONS = (
    *(Quantisation(dtype, each) for dtype in CACHE_DTYPES for each in GRANULARITIES),
    *(Quantisation(dtype, "none") for dtype in CACHE_DTYPES[1:]),
)
