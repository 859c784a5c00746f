"""The ways in which a compiled function may get at a pool, some of which make it copy the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paged_ops
from paged_ops import PagedKVCache

SEQUENCES, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 4, 4096, 16, 4, 64
POOL_BYTES = 2 * NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 4

Caches = tuple[Tensor, Tensor]


class Form(NamedTuple):
    """A function that writes and attends, what it takes, and how it is compiled."""

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    backend: str = "inductor"


def forms() -> Iterator[Form]:
    """Yield every form; each has a pool of its own, all of whose pages are committed."""
    rows = torch.randn(SEQUENCES, NUM_KV_HEADS, HEAD_DIM)
    step = rows, torch.arange(SEQUENCES) * BLOCK_SIZE
    cache = PagedKVCache(1, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    cache.kv_blocks(0).fill_(1)

    def inside(rows: Tensor, slots: Tensor) -> Tensor:
        return write_and_attend(cache.layer(0), rows, slots)

    def read_first(rows: Tensor, slots: Tensor) -> Tensor:
        return attend(cache.layer(0), rows, slots) + inside(rows, slots)

    yield Form("cache.layer(i), inside", inside, step)
    pool = torch.ones(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    yield Form("[num_blocks, 2, ...], unbind(1) inside", _unbind(1), (pool, *step))
    yield Form("[num_blocks, 2, ...], unbind(1) outside", write_and_attend, (pool.unbind(1), *step))
    both = pool.transpose(0, 1).contiguous()
    separate = both[0].clone(), both[1].clone()
    yield Form("two tensors", write_and_attend, (separate, *step))
    yield Form("[2, num_blocks, ...], [0] and [1] inside", _unbind(0), (both, *step))
    yield Form(
        "[2, num_blocks, ...], [0] and [1] outside", write_and_attend, (both.unbind(0), *step)
    )
    layers = torch.ones(2, *both.shape)
    outside = [layer.unbind(0) for layer in layers.unbind(0)]
    yield Form("one buffer for two layers, views outside", _each_layer, (outside, *step))
    yield Form("cache.layer(i), read before the write", read_first, step)
    yield Form("cache.layer(i), inside, aot_eager", inside, step, "aot_eager")


def write_and_attend(caches: Caches, rows: Tensor, slots: Tensor) -> Tensor:
    """Write one row for each sequence, of one block, and attend to it."""
    paged_ops.write_kv(rows, rows * 2, *caches, slots)
    return attend(caches, rows, slots)


def attend(caches: Caches, rows: Tensor, slots: Tensor) -> Tensor:
    """Attend to the first token of each sequence's block."""
    block_tables = (slots // BLOCK_SIZE).to(torch.int32)[:, None]
    return paged_ops.attention(rows + 1, *caches, block_tables, torch.ones_like(block_tables[:, 0]))


def _unbind(dim: int) -> Callable[..., Tensor]:
    return lambda pool, rows, slots: write_and_attend(pool.unbind(dim), rows, slots)


def _each_layer(layers: list[Caches], rows: Tensor, slots: Tensor) -> Tensor:
    for caches in layers:
        rows = write_and_attend(caches, rows, slots)
    return rows
