"""How the elements of a layer's pool lie in memory, and the views that show them in one shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYOUTS = ("HND", "NHD")


@dataclass(frozen=True)
class BlockLayout:
    """The form of the elements of a pool.

    Attributes
    ----------
    layout : str
        One of `LAYOUTS`: inside a block, rows of head_dim elements lie head by head, or token by
        token.
    num_blocks, block_size, num_kv_heads, head_dim, head_dim_v : int
        As of the pool.
    """

    layout: str
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, expected one of {LAYOUTS}")

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of the buffer of a layer: the keys of a block, then its values."""
        rows = self.rows
        if self.head_dim == self.head_dim_v:
            return (self.num_blocks, 2, *rows, self.head_dim)
        return (self.num_blocks, rows[0] * rows[1] * (self.head_dim + self.head_dim_v))

    def caches(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key_cache and value_cache as the ops take them, as views of a layer's buffer."""
        if self.head_dim == self.head_dim_v:
            key_cache, value_cache = buffer.unbind(1)
        else:
            rows = (self.num_blocks, *self.rows)
            keys = self.block_size * self.num_kv_heads * self.head_dim
            values = self.block_size * self.num_kv_heads * self.head_dim_v
            key_cache = buffer.narrow(1, 0, keys).view(*rows, self.head_dim)
            value_cache = buffer.narrow(1, keys, values).view(*rows, self.head_dim_v)
        if self.layout == "HND":
            return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        return key_cache, value_cache

    def kv_blocks(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a layer's buffer as one view in the shape of all layouts, or refuse to."""
        if self.head_dim != self.head_dim_v:
            raise ValueError(
                f"head_dim_v is {self.head_dim_v}, but one view of keys and values needs "
                f"{self.head_dim}, as head_dim; take layer(i) instead"
            )
        return buffer.transpose(2, 3) if self.layout == "HND" else buffer

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows of head_dim elements a block has, as they are ordered in memory."""
        if self.layout == "HND":
            return self.num_kv_heads, self.block_size
        return self.block_size, self.num_kv_heads
