"""The scales of a quantised pool: how many there are, how they lie in memory, what they begin as.

An element of an int8 or float8 pool stands for itself times a scale. The ops take scales of three
granularities; here each has one buffer per layer, those of the keys beside those of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_ops.dtypes import QUANTISED_DTYPES
from paged_ops.pool.layout import BlockLayout

GRANULARITIES = ("token", "head", "tensor")


@dataclass(frozen=True)
class CacheScales:
    """The form of the scales of a pool; a pool that isn't quantised has none of it.

    Attributes
    ----------
    granularity : str
        One of `GRANULARITIES`.
    blocks : BlockLayout
        Of the pool. Scales per token lie in a block as its rows do: what attention reads together
        lies together.
    """

    granularity: str
    blocks: BlockLayout

    @property
    def is_per_token(self) -> bool:
        """Whether ``write_kv`` chooses the scales, and a block has its own."""
        return self.granularity == "token"

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of the buffer of a layer; K and V are told apart by the dimension of size 2."""
        if self.granularity == "tensor":
            return (2,)
        if self.granularity == "head":
            return 2, self.blocks.num_kv_heads
        return (self.blocks.num_blocks, 2, *self.blocks.rows)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a layer's buffer in the one shape of all layouts."""
        if self.is_per_token and self.blocks.layout == "HND":
            return buffer.transpose(2, 3)
        return buffer

    def halves(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key_scale and value_scale as the ops take them, as views of a layer's buffer."""
        key_scale, value_scale = self.view(buffer).unbind(1 if self.is_per_token else 0)
        return key_scale, value_scale

    def checked(self, name: str, scale: torch.Tensor | float) -> torch.Tensor:
        """Return scales that a caller chose, or refuse them; one number may stand for all heads."""
        if self.is_per_token:
            raise ValueError(
                "scale_granularity is 'token', expected 'head' or 'tensor': write_kv chooses the "
                "scales of each token"
            )
        scale = torch.as_tensor(scale, dtype=torch.float32)
        expected = self.buffer_shape[1:]
        if scale.dim() and scale.shape != expected:
            raise ValueError(
                f"{name} has shape {list(scale.shape)}, expected {list(expected)} or a number"
            )
        wrong = scale[~((scale > 0) & (scale < torch.inf))]
        if len(wrong):
            raise ValueError(f"{name} is {wrong[0].item()}, expected a number above 0")
        return scale.expand(expected)


def first_scale(dtype: torch.dtype) -> float:
    """Return what a scale is before it is set: NaN where 1 would be a silent mistake."""
    return torch.nan if dtype == torch.int8 else 1.0


def checked_cache_dtype(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, scale_granularity: str
) -> tuple[torch.dtype, str | None]:
    """Return the dtype of a pool's elements, and the granularity of its scales if it has any."""
    if scale_granularity not in GRANULARITIES:
        raise ValueError(
            f"scale_granularity is {scale_granularity!r}, expected one of {GRANULARITIES}"
        )
    if cache_dtype is None or cache_dtype == dtype:
        if scale_granularity != "token":
            raise ValueError(
                f"scale_granularity is {scale_granularity!r}, but a cache of {dtype} has no scales"
            )
        return dtype, None
    if cache_dtype not in QUANTISED_DTYPES:
        raise ValueError(
            f"cache_dtype is {cache_dtype}, expected {dtype}, as dtype, or one of "
            f"{QUANTISED_DTYPES}"
        )
    return cache_dtype, scale_granularity
