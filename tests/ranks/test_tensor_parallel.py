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


def test_the_query_heads_of_one_quantised_kv_head_are_shared_out() -> None:
    cache = PagedKVCache(1, NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_DIM, cache_dtype=torch.int8)
    scales = cache.scales(0)
    paged_ops.write_kv(ROWS[:, :1], ROWS[:, 1:2], *cache.layer(0), SLOTS, **scales)
    want = paged_ops.attention(QUERY, *cache.layer(0), TABLES, SEQ_LENS, **scales)
    placed = [everywhere(half) for half in cache.layer(0)]
    placed_scales = {name: everywhere(scale) for name, scale in scales.items()}
    got = paged_ops.attention(on_heads(QUERY, 1), *placed, TABLES, SEQ_LENS, **placed_scales)
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


@pytest.mark.parametrize("granularity", ["token", "head", "tensor"])
def test_scales_lie_with_their_heads(granularity: str) -> None:
    """Every op on a quantised pool, and a tree mask, which is the same everywhere."""
    form = (1, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    cache = PagedKVCache(*form, cache_dtype=torch.int8, scale_granularity=granularity)
    if granularity != "token":
        per_head = torch.linspace(0.02, 0.05, NUM_KV_HEADS)
        cache.set_scales(0, per_head if granularity == "head" else 0.03, 0.04)
    scales = {name: scale.clone() for name, scale in cache.scales(0).items()}
    caches = tuple(half.clone() for half in cache.layer(0))
    placed = tuple(on_heads(half, 2) for half in caches)
    place = everywhere if granularity == "tensor" else lambda scale: on_heads(scale, -1)
    placed_scales = {name: place(scale) for name, scale in scales.items()}

    key, value = KEY_CACHE.flatten(0, 1), VALUE_CACHE.flatten(0, 1)
    slots, mapping = torch.arange(len(key)).flip(0), torch.tensor([[0, 1], [1, 0], [4, 7]])
    paged_ops.write_kv(key, value, *caches, slots, **scales)
    paged_ops.write_kv(on_heads(key, 1), on_heads(value, 1), *placed, slots, **placed_scales)
    paged_ops.copy_blocks(*caches, mapping, **scales)
    paged_ops.copy_blocks(*placed, mapping, **placed_scales)
    for got, want in zip(placed, caches, strict=True):
        assert_sharded_and_equal(got, want, dim=2)
        assert want.any()
    for name, scale in scales.items():
        assert same_bits(placed_scales[name].full_tensor(), scale)

    starts = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    mask = torch.tensor([[True, False], [True, False], [False, True]])
    index = TABLES, SEQ_LENS, starts
    want = paged_ops.attention(QUERY, *caches, *index, **scales, tree_mask=mask)
    mask_everywhere = everywhere(mask)
    got = paged_ops.attention(
        on_heads(QUERY, 1), *placed, *index, **placed_scales, tree_mask=mask_everywhere
    )
    assert_sharded_and_equal(got, want)
    gathered = paged_ops.gather_kv(*caches, TABLES, SEQ_LENS, **scales)
    sharded = paged_ops.gather_kv(*placed, TABLES, SEQ_LENS, num_tokens=16, **placed_scales)
    for rows, expected in zip(sharded, gathered, strict=True):
        assert_sharded_and_equal(rows, expected)


def test_scales_and_masks_that_lie_elsewhere_are_refused() -> None:
    cache = PagedKVCache(1, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, cache_dtype=torch.int8)
    placed = tuple(on_heads(half, 2) for half in cache.layer(0))
    scales = {name: on_heads(scale, 2) for name, scale in cache.scales(0).items()}
    query = on_heads(QUERY, 1)
    wrong = scales | {"key_scale": everywhere(cache.scales(0)["key_scale"])}
    with pytest.raises(RuntimeError, match=r"key_scale is placed R.*, expected S.*2.*keyword"):
        paged_ops.attention(query, *placed, TABLES, SEQ_LENS, **wrong)
    with pytest.raises(RuntimeError, match=r"key_scale is placed R.*, expected S.*2.*keyword"):
        paged_ops.copy_blocks(*placed, torch.tensor([[0, 1]]), **wrong)
    mask = on_heads(torch.ones(3, 4, dtype=torch.bool), 1)
    with pytest.raises(RuntimeError, match=r"tree_mask is placed S.*1.*, expected R.*keyword"):
        paged_ops.attention(query, *placed, TABLES, SEQ_LENS, **scales, tree_mask=mask)


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


def test_a_compiled_step_changes_a_sharded_quantised_pool_and_its_scales_in_place() -> None:
    def step(
        rows: Tensor, query: Tensor, halves: list[Tensor], scales: dict[str, Tensor], *index: Any
    ) -> Any:
        paged_ops.write_kv(rows + 1, rows * 2, *halves, index[2], **scales)
        return paged_ops.attention(query * 2, *halves, *index[:2], **scales)

    form = (1, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches: list[list[Tensor]] = []
    scales: list[dict[str, Tensor]] = []
    for place in (torch.clone, lambda tensor: on_heads(tensor, 2)):
        cache = PagedKVCache(*form, cache_dtype=torch.int8)
        caches.append([place(half) for half in cache.layer(0)])
        scales.append({name: place(scale) for name, scale in cache.scales(0).items()})
    index = TABLES, SEQ_LENS, SLOTS
    with torch.no_grad():
        want = step(ROWS, QUERY, caches[0], scales[0], *index)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        placed = on_heads(ROWS, 1), on_heads(QUERY, 1), caches[1], scales[1]
        got = compiled(*placed, *map(everywhere, index))
    assert_sharded_and_equal(got, want)
    assert_sharded_and_equal(caches[1][1], caches[0][1], dim=2)
    assert_sharded_and_equal(scales[1]["value_scale"], scales[0]["value_scale"], dim=2)
    assert scales[0]["value_scale"].any()


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
