"""Whole blocks from one pool to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paged_ops.pool.kv_cache import PagedKVCache


def send_blocks(
    source: PagedKVCache,
    destination: PagedKVCache,
    copies: Sequence[tuple[int, int]],
    non_blocking: bool,
) -> None:
    """Do what `PagedKVCache.send_blocks` says."""
    _refuse_unlike(source, destination)
    if not copies:
        return
    sources, targets = torch.tensor(copies, dtype=torch.int64, device="cpu").unbind(1)
    _refuse_ids("source", sources, source.num_blocks)
    _refuse_ids("destination", targets, destination.num_blocks)
    if len(targets.unique()) < len(targets):
        raise ValueError("copies has a destination twice, expected each once")
    sources, targets = sources.to(source.device), targets.to(destination.device)
    for layer in range(source.num_layers):
        here, there = source.block_parts(layer), destination.block_parts(layer)
        for mine, theirs in zip(here, there, strict=True):
            blocks = mine[sources].to(destination.device, non_blocking=non_blocking)
            theirs[targets] = blocks


def _refuse_unlike(source: PagedKVCache, destination: PagedKVCache) -> None:
    """Refuse a destination whose blocks are not laid out like those of the source."""
    names = "num_layers", "block_size", "num_kv_heads", "head_dim", "head_dim_v"
    for name in (*names, "layout", "dtype", "cache_dtype", "scale_granularity"):
        mine, others = getattr(source, name), getattr(destination, name)
        if mine != others:
            raise ValueError(f"destination has {name} {others}, expected {mine}, as here")
    ours, theirs = source.chosen_scales(), destination.chosen_scales()
    if ours != theirs:
        raise ValueError(
            f"destination has scales {theirs}, expected {ours}, as here; set_scales there too"
        )


def _refuse_ids(name: str, ids: torch.Tensor, num_blocks: int) -> None:
    """Refuse block ids that a pool does not have."""
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    if len(wrong):
        raise ValueError(f"copies has the {name} {int(wrong[0])}, expected 0 to {num_blocks - 1}")
