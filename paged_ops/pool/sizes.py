"""How large a pool is: what a block takes, and how many fit into given memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_ops.arguments import INT32_MAX, checked_int
from paged_ops.dtypes import FLOAT_DTYPES
from paged_ops.pool.layout import BlockLayout
from paged_ops.pool.memory import available_bytes
from paged_ops.pool.scales import CacheScales, checked_cache_dtype


@dataclass(frozen=True)
class Sizes:
    """What the size of a block depends on. Python's integers don't wrap, however large."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    cache_dtype: torch.dtype
    scale_granularity: str | None

    @classmethod
    def checked(
        cls,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None,
        scale_granularity: str,
    ) -> Sizes:
        """Return the sizes of a pool, or refuse them; the arguments are those of the pool."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype is {dtype}, expected one of {FLOAT_DTYPES}")
        return cls(
            checked_int("num_layers", num_layers, 1),
            checked_int("block_size", block_size, 1),
            checked_int("num_kv_heads", num_kv_heads, 1),
            checked_int("head_dim", head_dim, 1),
            checked_int("head_dim_v", head_dim if head_dim_v is None else head_dim_v, 1),
            *checked_cache_dtype(dtype, cache_dtype, scale_granularity),
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, its scales per token included."""
        row = (self.head_dim + self.head_dim_v) * self.cache_dtype.itemsize + self._scale_bytes
        return self.num_layers * self.block_size * self.num_kv_heads * row

    @property
    def _scale_bytes(self) -> int:
        """Bytes of scales for each token and head."""
        return 2 * torch.float32.itemsize if self.scale_granularity == "token" else 0

    def block_layout(self, num_blocks: int, layout: str) -> BlockLayout:
        """Return how the elements of a layer lie in memory."""
        heads = self.num_kv_heads, self.head_dim, self.head_dim_v
        return BlockLayout(layout, num_blocks, self.block_size, *heads)

    def scale_form(self, blocks: BlockLayout) -> CacheScales | None:
        """Return what the scales of a layer are; None where the pool isn't quantised."""
        return CacheScales(self.scale_granularity, blocks) if self.scale_granularity else None

    def arithmetic(self, num_blocks: int) -> str:
        """Show how the size of a pool comes about."""
        if self.head_dim == self.head_dim_v:
            elements = f"2 x {self.head_dim} (head_dim)"
        else:
            elements = f"({self.head_dim} (head_dim) + {self.head_dim_v} (head_dim_v))"
        row = f"{elements} x {self.cache_dtype.itemsize} ({self.cache_dtype})"
        if self._scale_bytes:
            row = f"({row} + {self._scale_bytes} (scales))"
        return (
            f"{num_blocks} (num_blocks) x {self.num_layers} (num_layers) x "
            f"{self.block_size} (block_size) x {self.num_kv_heads} (num_kv_heads) x {row} = "
            f"{num_blocks * self.bytes_per_block} bytes"
        )

    def checked_num_blocks(self, num_blocks: int, device: torch.device) -> int:
        """Return the number of blocks, or refuse a pool larger than the memory available."""
        num_blocks = checked_int("num_blocks", num_blocks, 1)
        available = available_bytes(device)
        if available is not None and num_blocks * self.bytes_per_block > available:
            raise MemoryError(
                f"num_blocks is {num_blocks}, expected at most "
                f"{available // self.bytes_per_block}: {self.arithmetic(num_blocks)}, and "
                f"{available} bytes are available on {device}"
            )
        return checked_int("num_blocks", num_blocks, 1, INT32_MAX)

    def num_blocks_for(
        self, device: torch.device, num_bytes: int | None, memory_fraction: float | None
    ) -> int:
        """Return how many blocks fit into so many bytes, or into a share of the memory."""
        if (num_bytes is None) == (memory_fraction is None):
            raise ValueError(
                f"num_bytes is {num_bytes} and memory_fraction is {memory_fraction}, "
                f"expected exactly one of them"
            )
        if memory_fraction is not None:
            budget, origin = share_of_memory(memory_fraction, device)
        else:
            budget, origin = checked_int("num_bytes", num_bytes, 0), "num_bytes"
        num_blocks = budget // self.bytes_per_block
        if not num_blocks:
            raise ValueError(
                f"{origin} is {budget} bytes, expected at least one block: {self.arithmetic(1)}"
            )
        return min(num_blocks, INT32_MAX)


def share_of_memory(memory_fraction: float, device: torch.device) -> tuple[int, str]:
    """Return a share of the available memory in bytes, and words for where it comes from."""
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction is {memory_fraction}, expected above 0 and at most 1")
    available = available_bytes(device)
    if available is None:
        raise MemoryError(
            f"memory_fraction is {memory_fraction}, but {device} does not say how much memory is "
            f"available; give num_bytes instead"
        )
    origin = f"memory_fraction {memory_fraction} of the {available} bytes available on {device}"
    return int(available * memory_fraction), origin
