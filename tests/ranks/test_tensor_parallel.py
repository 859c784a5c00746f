"""Every op on DTensors: heads over ranks, bit for bit what one process gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication

import paged_ops
import paged_ops.distributed
from paged_ops import PagedKVCache
from tests.support.checks import same_bits

assert paged_ops.distributed  # Registers the sharding rules.

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 8, 4, 16, 4, 9
TABLES = torch.tensor([[1, 2], [3, 4], [5, 8]], dtype=torch.int32)
SEQ_LENS = torch.tensor([5, 8, 3], dtype=torch.int32)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERY = normal(3, NUM_HEADS, HEAD_DIM, seed=1)
KEY_CACHE, VALUE_CACHE = normal(2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, seed=2).unbind(0)
ROWS = normal(3, NUM_KV_HEADS, HEAD_DIM, seed=3)
SLOTS = torch.tensor([4, 19, -1])
PER_HEAD = normal(NUM_HEADS, seed=4)


@pytest.fixture(autouse=True)
def _plain_tensors_are_replicated() -> Iterator[None]:
    """Tables and lengths are the same everywhere, so they need no placement of their own."""
    with implicit_replication():
        yield


def on_heads(tensor: Tensor, dim: int) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor.clone(), mesh, [Shard(dim)])


def everywhere(tensor: Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor.clone(), mesh, [Replicate()])


def sharded_pool() -> tuple[DTensor, DTensor]:
    return on_heads(KEY_CACHE, 2), on_heads(VALUE_CACHE, 2)


def assert_sharded_and_equal(got: Any, want: Tensor, dim: int = 1) -> None:
    assert got.placements == (Shard(dim),)
    assert same_bits(got.full_tensor(), want)


@pytest.mark.parametrize("place", [lambda t: on_heads(t, 1), everywhere], ids=["sharded", "whole"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3, "softcap": 5.0, "scale": 0.2},
        {"causal": False, "sinks": PER_HEAD, "alibi_slopes": PER_HEAD.abs()},
    ],
    ids=["plain", "window", "sinks and alibi"],
)
def test_attention_runs_on_the_heads_of_each_rank(
    place: Callable[[Tensor], DTensor], options: dict[str, Any]
) -> None:
    placed = {k: on_heads(v, 0) if isinstance(v, Tensor) else v for k, v in options.items()}
    arguments = (*sharded_pool(), TABLES, SEQ_LENS)
    want = paged_ops.attention_with_lse(QUERY, KEY_CACHE, VALUE_CACHE, TABLES, SEQ_LENS, **options)
    got = paged_ops.attention_with_lse(place(QUERY), *arguments, **placed)
    assert_sharded_and_equal(got[0], want[0])
    assert_sharded_and_equal(got[1], want[1])
    assert_sharded_and_equal(paged_ops.attention(place(QUERY), *arguments, **placed), want[0])
    out = on_heads(torch.zeros_like(QUERY), 1)
    paged_ops.attention(place(QUERY), *arguments, **placed, out=out)
    assert_sharded_and_equal(out, want[0])


def test_the_query_heads_of_one_kv_head_are_shared_out() -> None:
    caches = KEY_CACHE[:, :, :1], VALUE_CACHE[:, :, :1]
    want = paged_ops.attention(QUERY, *caches, TABLES, SEQ_LENS, sinks=PER_HEAD)
    placed = [everywhere(cache) for cache in caches]
    got = paged_ops.attention(
        on_heads(QUERY, 1), *placed, TABLES, SEQ_LENS, sinks=on_heads(PER_HEAD, 0)
    )
    assert_sharded_and_equal(got, want)


def test_written_copied_and_gathered_blocks_are_those_of_one_process() -> None:
    caches, placed = (KEY_CACHE.clone(), VALUE_CACHE.clone()), sharded_pool()
    mapping = torch.tensor([[0, 1], [1, 0], [4, 7]])
    for key, value, pool in (
        (ROWS, ROWS * 2, caches),
        (everywhere(ROWS), on_heads(ROWS * 2, 1), placed),
    ):
        paged_ops.write_kv(key, value, *pool, SLOTS)
        paged_ops.copy_blocks(*pool, mapping)
    for got, want, before in zip(placed, caches, (KEY_CACHE, VALUE_CACHE), strict=True):
        assert_sharded_and_equal(got, want, dim=2)
        assert not torch.equal(want, before)
    gathered = paged_ops.gather_kv(*caches, TABLES, SEQ_LENS)
    sharded = paged_ops.gather_kv(*placed, TABLES, SEQ_LENS, num_tokens=16)
    for got, want in zip(sharded, gathered, strict=True):
        assert_sharded_and_equal(got, want)


def test_states_are_merged_where_their_heads_are() -> None:
    outs, lses = normal(2, 3, NUM_HEADS, HEAD_DIM, seed=5), normal(2, 3, NUM_HEADS, seed=6)
    want = paged_ops.merge_states(outs[0], lses[0], outs[1], lses[1])
    placed = [on_heads(tensor, 1) for tensor in (outs[0], lses[0], outs[1], lses[1])]
    for got, expected in zip(paged_ops.merge_states(*placed), want, strict=True):
        assert_sharded_and_equal(got, expected)


def test_a_local_pool_is_a_part_of_a_sharded_one_and_is_written_in_place() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    cache = PagedKVCache(1, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS // ranks, HEAD_DIM)
    mesh = init_device_mesh("cpu", (ranks,))
    pool = DTensor.from_local(cache.kv_blocks(0), mesh, [Shard(3)])
    paged_ops.write_kv(on_heads(ROWS, 1), on_heads(ROWS * 2, 1), *pool.unbind(1), SLOTS)
    mine = ROWS.chunk(ranks, 1)[rank]
    assert same_bits(cache.layer(0)[0][1, 0], mine[0])
    assert same_bits(cache.layer(0)[1][4, 3], mine[1] * 2)


def test_a_compiled_step_changes_the_sharded_pool_in_place() -> None:
    def step(
        rows: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, *index: Any
    ) -> Any:
        paged_ops.write_kv(rows + 1, rows * 2, key_cache, value_cache, index[2])
        return paged_ops.attention(query * 2, key_cache, value_cache, *index[:2])

    caches, placed = (KEY_CACHE.clone(), VALUE_CACHE.clone()), sharded_pool()
    index = TABLES, SEQ_LENS, SLOTS
    with torch.no_grad():
        want = step(ROWS, QUERY, *caches, *index)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        got = compiled(on_heads(ROWS, 1), on_heads(QUERY, 1), *placed, *map(everywhere, index))
    assert_sharded_and_equal(got, want)
    assert_sharded_and_equal(placed[0], caches[0], dim=2)


def test_what_would_move_a_pool_or_part_a_group_is_refused() -> None:
    query, ranks = on_heads(QUERY, 1), dist.get_world_size()
    with pytest.raises(RuntimeError, match=r"key_cache is placed S.*0.*, expected Shard\(dim=2\)"):
        paged_ops.attention(
            query, on_heads(KEY_CACHE, 0), on_heads(VALUE_CACHE, 0), TABLES, SEQ_LENS
        )
    odd = [on_heads(cache[:, :, :3], 2) for cache in (KEY_CACHE, VALUE_CACHE)]
    with pytest.raises(RuntimeError, match=f"has 3 KV heads, expected a multiple of {ranks}"):
        paged_ops.write_kv(on_heads(ROWS[:, :3], 1), on_heads(ROWS[:, :3], 1), *odd, SLOTS)
    with pytest.raises(RuntimeError, match=r"sinks is placed R.*, expected S.*0"):
        paged_ops.attention(query, *sharded_pool(), TABLES, SEQ_LENS, sinks=PER_HEAD)
    with pytest.raises(RuntimeError, match="gather_kv"):  # of a size that nobody knows
        paged_ops.gather_kv(*sharded_pool(), TABLES, SEQ_LENS)
    mesh = init_device_mesh("cpu", (ranks, 1))
    flat = distribute_tensor(QUERY, mesh, [Replicate(), Replicate()])
    with pytest.raises(RuntimeError, match="query is on a mesh of 2 dimensions, expected 1"):
        paged_ops.attention(flat, KEY_CACHE, VALUE_CACHE, TABLES, SEQ_LENS)
