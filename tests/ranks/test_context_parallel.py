"""Sequences cut over ranks: the bits of the documented merge, the values of one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import paged_ops
from paged_ops import BlockManager, PagedKVCache, build_batch
from paged_ops.distributed import build_context_batch, context_parallel_attention, split_context
from paged_ops.distributed.context_attention import attend_to_part
from paged_ops.distributed.context_batch import ContextBatch, place_parts
from tests.support.checks import relative_error, same_bits

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 16, 4, 96
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([1.0, -1.0, 3.0, 0.0])

# Lengths and new tokens: decode, chunks that begin in every part, whole prompts, more queries than
# keys, an empty sequence, and one shorter than a block.
LENGTHS = (61, 61, 61, 40, 18, 3, 0, 2)
NEW = (1, 7, 45, 40, 1, 5, 2, 2)

OPTIONS = (
    {},
    {"causal": False, "scale": 0.3},
    {"sliding_window": 9},
    {"sliding_window": 33, "alibi_slopes": SLOPES, "softcap": 4.0},
    {"sliding_window": 9, "causal": False, "sinks": SINKS},
    {"alibi_slopes": SLOPES, "sinks": SINKS},
)


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Whole(NamedTuple):
    """All tokens of all sequences, as every rank can make them."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def make(cls, dtype: torch.dtype) -> Whole:
        shape = NUM_KV_HEADS, HEAD_DIM
        keys = [normal(n, *shape, seed=2 * i, dtype=dtype) for i, n in enumerate(LENGTHS)]
        values = [normal(n, *shape, seed=2 * i + 1, dtype=dtype) for i, n in enumerate(LENGTHS)]
        return cls(normal(sum(NEW), NUM_HEADS, HEAD_DIM, seed=99, dtype=dtype), keys, values)

    def pool(
        self, starts: list[int], lengths: list[int], **form: Any
    ) -> tuple[BlockManager, PagedKVCache]:
        """Put a part of each sequence into a new pool, in blocks that stand anywhere."""
        manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        cache = PagedKVCache(
            1, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, self.query.dtype, **form
        )
        if cache.scale_granularity == "head":
            cache.set_scales(0, 0.035, torch.tensor([0.035, 0.04]))
        for buffer in cache.buffers() if cache.scale_granularity != "head" else ():
            buffer.fill_(torch.nan if buffer.is_floating_point() else 99)
        manager.allocate("elsewhere", 5 * BLOCK_SIZE)
        for request, length in reversed(list(enumerate(lengths))):
            manager.allocate(request, length)
        manager.free("elsewhere")
        batch = build_batch(manager, range(len(lengths)), lengths)
        pairs = [slice(a, a + n) for a, n in zip(starts, lengths, strict=True)]
        rows = [
            torch.cat([t[part] for t, part in zip(tensors, pairs, strict=True)])
            for tensors in (self.keys, self.values)
        ]
        paged_ops.write_kv(*rows, *cache.layer(0), batch.slot_mapping, **cache.scales(0))
        return manager, cache

    def on_one_process(self, form: dict[str, Any] | None = None, **options: Any) -> Tensor:
        """Attend with everything in one pool."""
        manager, cache = self.pool([0] * len(LENGTHS), list(LENGTHS), **form or {})
        batch = build_batch(manager, range(len(LENGTHS)), [0] * len(LENGTHS))
        starts = torch.tensor([0, *NEW]).cumsum(0).to(torch.int32)
        tables = batch.block_tables, batch.seq_lens, starts
        options |= cache.scales(0)
        return paged_ops.attention(self.query, *cache.layer(0), *tables, **options)


def held_by_ranks(num_ranks: int) -> list[list[int]]:
    """Return how many tokens of each sequence each rank holds."""
    split = [split_context(length, BLOCK_SIZE, num_ranks) for length in LENGTHS]
    # One is cut anywhere, by an engine that knows better, with a rank that holds nothing of it.
    split[3] = [0] * num_ranks
    split[3][:2] = [11, LENGTHS[3] - 11]
    return [list(lengths) for lengths in zip(*split, strict=True)]


def part_of(whole: Whole, rank: int, held: list[list[int]]) -> tuple[ContextBatch, PagedKVCache]:
    starts = [sum(lengths[:rank]) for lengths in zip(*held, strict=True)]
    manager, cache = whole.pool(starts, held[rank])
    return place_parts(manager, range(len(LENGTHS)), NEW, held, rank), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_the_merge_over_ranks_has_the_documented_bits_and_the_values_of_one_process(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    whole, rank, num_ranks = Whole.make(dtype), dist.get_rank(), dist.get_world_size()
    held = held_by_ranks(num_ranks)
    starts = [sum(lengths[:rank]) for lengths in zip(*held, strict=True)]
    manager, cache = whole.pool(starts, held[rank])
    batch = build_context_batch(manager, range(len(LENGTHS)), NEW)
    got = context_parallel_attention(whole.query, *cache.layer(0), batch, **options)

    of_part = {name: value for name, value in options.items() if name != "sinks"}
    parts = [part_of(whole, other, held) for other in range(num_ranks)]
    states = [attend_to_part(whole.query, *c.layer(0), b, **of_part) for b, c in parts]
    out, lse = states[0][0].float(), states[0][1]
    for other_out, other_lse in states[1:]:
        out, lse = paged_ops.merge_states(out, lse, other_out.float(), other_lse)
    if "sinks" in options:
        sinks = options["sinks"].expand_as(lse).contiguous()
        out, lse = paged_ops.merge_states(out, lse, torch.zeros_like(out), sinks)
    assert same_bits(got, out.to(dtype))

    want = whole.on_one_process(**options)
    bound = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert relative_error(got, want.double()) <= bound


@pytest.mark.parametrize("granularity", ["token", "head"])
def test_parts_of_a_quantised_pool_are_read_with_their_scales(granularity: str) -> None:
    whole, rank, num_ranks = Whole.make(torch.float32), dist.get_rank(), dist.get_world_size()
    form = {"cache_dtype": torch.int8, "scale_granularity": granularity}
    held = held_by_ranks(num_ranks)
    starts = [sum(lengths[:rank]) for lengths in zip(*held, strict=True)]
    manager, cache = whole.pool(starts, held[rank], **form)
    batch = build_context_batch(manager, range(len(LENGTHS)), NEW)
    got = context_parallel_attention(whole.query, *cache.layer(0), batch, **cache.scales(0))
    assert relative_error(got, whole.on_one_process(form).double()) <= 2e-6
    assert 1e-4 < relative_error(got, whole.on_one_process().double()) < 0.05


def test_tokens_are_written_by_the_rank_that_holds_them() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    manager.allocate("a", split_context(20, BLOCK_SIZE, num_ranks)[rank])
    cache = PagedKVCache(1, NUM_BLOCKS, BLOCK_SIZE, 1, 8)
    rows = torch.arange(40.0).view(40, 1, 1).expand(-1, -1, 8).contiguous()
    batch = build_context_batch(manager, ["a"], [20])
    paged_ops.write_kv(rows[:20], rows[:20], *cache.layer(0), batch.slot_mapping)
    for position in range(20, 40):  # decode: the last rank takes them all
        manager.append("a", int(rank == num_ranks - 1))
        batch = build_context_batch(manager, ["a"])
        row = rows[position : position + 1]
        paged_ops.write_kv(row, row, *cache.layer(0), batch.slot_mapping)
    part = batch.parts[0]
    local = build_batch(manager, ["a"])
    keys, _ = paged_ops.gather_kv(*cache.layer(0), local.block_tables, local.seq_lens)
    assert keys[:, 0, 0].tolist() == list(range(part.start, part.stop))
    assert part.length == 40


def test_ranks_that_disagree_are_refused_everywhere() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    manager.allocate("a", 3)
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=rf"query_lens is \[{min(rank, 1)}\] on rank {rank}"):
        build_context_batch(manager, ["a"], [min(rank, 1)])


def test_a_manager_with_a_window_is_refused() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, sliding_window=4)
    with pytest.raises(ValueError, match="sliding_window 4, expected None"):
        build_context_batch(manager, [])
