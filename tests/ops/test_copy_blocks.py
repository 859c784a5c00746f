"""Copying blocks inside the pool."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from paged_ops import reference
from tests.support.checks import same_bits
from tests.support.sequences import CACHE_LAYOUTS, DTYPES, make_caches, normal

assert paged_ops  # Loads the library that registers torch.ops.paged.


def random_caches(
    layout: str, shape: tuple[int, int, int], dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> tuple[Tensor, Tensor]:
    caches = make_caches(layout, shape, head_dim, head_dim_v, dtype)
    for cache in caches:
        _storage(cache).fill_(math.nan)
    for seed, cache in enumerate(caches):
        cache.copy_(normal(tuple(cache.shape), dtype, seed))
    return caches


def _storage(tensor: Tensor) -> Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def assert_copies(
    caches: tuple[Tensor, Tensor], pairs: list[list[int]], dtype: torch.dtype
) -> None:
    """Copy, and compare with plain indexing; nothing else in the storage may change."""
    mapping = torch.tensor(pairs, dtype=dtype).view(-1, 2)
    want = [cache.clone() for cache in caches]
    reference.copy_blocks(*want, mapping)
    outside = []
    for cache in caches:
        inside = torch.zeros_like(_storage(cache), dtype=torch.bool)
        for view in caches:
            if view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
                inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        outside.append((~inside, _storage(cache)[~inside].clone()))
    assert torch.ops.paged.copy_blocks(*caches, mapping) is None
    for cache, expected, (mask, before) in zip(caches, want, outside, strict=True):
        assert same_bits(cache, expected)
        assert same_bits(_storage(cache)[mask], before)


@given(st.data())
def test_any_mapping_equals_the_reference_and_touches_nothing_else(data: st.DataObject) -> None:
    shape = (
        data.draw(st.integers(1, 8), "num_blocks"),
        data.draw(st.integers(1, 9), "block_size"),
        data.draw(st.integers(1, 3), "num_kv_heads"),
    )
    layout = data.draw(st.sampled_from(CACHE_LAYOUTS), "layout")
    head_dim = data.draw(st.sampled_from([1, 8, 17, 64]), "head_dim")
    head_dim_v = head_dim if "article" in layout or "then" in layout else 11
    destinations = data.draw(st.permutations(range(shape[0])), "destinations")
    count = data.draw(st.integers(0, shape[0]), "count")
    blocks = st.integers(0, shape[0] - 1)
    pairs = [[data.draw(blocks, "source"), destination] for destination in destinations[:count]]
    caches = random_caches(
        layout, shape, data.draw(st.sampled_from(DTYPES), "dtype"), head_dim, head_dim_v
    )
    assert_copies(caches, pairs, data.draw(st.sampled_from([torch.int32, torch.int64]), "index"))


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [[2, 2]],
        [[0, 1]],
        [[0, 1], [1, 2]],
        [[1, 2], [0, 1]],
        [[0, 1], [1, 0]],
        [[0, 1], [1, 2], [2, 3], [3, 0]],
        [[0, 1], [0, 2], [0, 3]],
        [[1, 1], [1, 0]],
        [[3, 0], [3, 1], [0, 3], [2, 2]],
    ],
    ids=str,
)
def test_chains_swaps_and_cycles_read_before_they_write(
    layout: str, pairs: list[list[int]]
) -> None:
    assert_copies(random_caches(layout, (5, 4, 2), torch.float32, 8, 8), pairs, torch.int64)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_long_cycle_over_many_blocks_is_exact_for_every_number_of_threads(
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    cache = torch.arange(1000.0).view(-1, 1, 1, 1).expand(1000, 16, 2, 32).contiguous()
    value_cache = -cache
    pairs = torch.stack([torch.arange(1000), torch.arange(1000).roll(-1)], dim=1)
    torch.ops.paged.copy_blocks(cache, value_cache, pairs)
    want = torch.arange(1000.0).roll(1).view(-1, 1, 1, 1).expand(1000, 16, 2, 32)
    assert torch.equal(cache, want)
    assert torch.equal(value_cache, -want)


def test_blocks_are_copied_where_values_are_a_view_of_the_keys() -> None:
    latent = normal((5, 4, 1, 24), torch.bfloat16, 0)
    want = latent[[2, 0, 1, 0, 4]].clone()
    mapping = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 3]])
    torch.ops.paged.copy_blocks(latent, latent[..., :16], mapping)
    assert same_bits(latent, want)


def test_a_strided_mapping_is_read_by_its_strides() -> None:
    cache = torch.arange(4.0).view(4, 1, 1, 1).clone()
    mapping = torch.tensor([[3, 2], [0, 1]]).t()
    assert mapping.stride() == (1, 2)
    torch.ops.paged.copy_blocks(cache, cache.clone(), mapping)
    assert cache.flatten().tolist() == [3.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_an_empty_mapping_changes_nothing_in_an_empty_pool_either(num_blocks: int) -> None:
    key_cache, value_cache = normal((2, num_blocks, 4, 1, 8), torch.float32, 0)
    before = key_cache.clone(), value_cache.clone()
    mapping = torch.empty(0, 2, dtype=torch.int64)
    torch.ops.paged.copy_blocks(key_cache, value_cache, mapping)
    assert same_bits(key_cache, before[0])
    assert same_bits(value_cache, before[1])


def test_blocks_beyond_2_to_the_31_elements_are_copied() -> None:
    num_blocks = 2**31 // (2 * 16 * 1 * 512) + 3
    try:
        blocks = torch.empty(num_blocks, 2, 16, 1, 512, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for the pool: {error}")
    contents = normal((2, 16, 1, 512), torch.float16, 0)
    last = num_blocks - 1
    blocks[last] = contents
    mapping = torch.tensor([[last, 1], [last, last - 1]])
    torch.ops.paged.copy_blocks(blocks[:, 0], blocks[:, 1], mapping)
    assert same_bits(blocks[1], contents)
    assert same_bits(blocks[last - 1], contents)


def test_the_public_function_is_the_op() -> None:
    caches = random_caches("NHD", (3, 2, 1), torch.float32, 8, 8)
    want = [cache[[1, 0, 2]].clone() for cache in caches]
    assert paged_ops.copy_blocks(*caches, torch.tensor([[0, 1], [1, 0]])) is None
    assert all(same_bits(a, b) for a, b in zip(caches, want, strict=True))
