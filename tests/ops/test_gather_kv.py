"""Gathering the keys and values of whole sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from tests.support.checks import same_bits
from tests.support.sequences import (
    CACHE_LAYOUTS,
    DTYPES,
    Placement,
    Sequences,
    make_sequences,
    normal,
    place,
)
from tests.support.strategies import placements, sequences

assert paged_ops  # Loads the library that registers torch.ops.paged.


def assert_gathers(made: Sequences, placement: Placement) -> None:
    """Gather from the pool and compare with what was put there, bit for bit."""
    case = place(made, placement)
    arguments = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    store, dtype = made.quantisation, made.dtype if made.quantisation is None else torch.float32
    scales = {name: scale for name, scale in case.options.items() if name.endswith("_scale")}

    def joined(rows: tuple[Tensor, ...], head_dim: int) -> Tensor:
        # The product of an element and its scale is exact in float64, and rounded once.
        read = [each if store is None else store.as_read(each).float() for each in rows]
        return torch.cat([torch.empty(0, made.num_kv_heads, head_dim, dtype=dtype), *read])

    want_key = joined(made.keys, made.query.shape[2])
    want_value = joined(made.values, made.head_dim_v)
    for num_tokens in (None, sum(made.seq_lens)):
        key, value = torch.ops.paged.gather_kv(*arguments, num_tokens=num_tokens, **scales)
        assert same_bits(key, want_key)
        assert same_bits(value, want_value)
        assert key.is_contiguous()
        assert value.is_contiguous()


@given(sequences(options=False), placements())
def test_the_sequences_come_back_one_after_another(made: Sequences, placement: Placement) -> None:
    assert_gathers(made, placement)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_every_layout_is_read_in_place(dtype: torch.dtype, layout: str) -> None:
    made = make_sequences([5, 0, 64, 1], num_heads=3, num_kv_heads=3, dtype=dtype)
    assert_gathers(made, Placement(block_size=4, cache_layout=layout))


@given(st.integers(1, 5))
def test_the_number_of_threads_does_not_matter(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    made = make_sequences([3000, 0, 2000, 7], num_heads=2, num_kv_heads=2, head_dim=32)
    assert_gathers(made, Placement())
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [0, 3])
def test_empty_sequences_give_empty_tensors(batch: int) -> None:
    for num_blocks, width in ((0, 0), (2, 0), (2, 3)):
        key, value = torch.ops.paged.gather_kv(
            torch.empty(num_blocks, 4, 2, 8),
            torch.empty(num_blocks, 4, 2, 6),
            torch.full((batch, width), -9, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32),
        )
        assert key.shape == (0, 2, 8)
        assert value.shape == (0, 2, 6)


def test_a_block_may_belong_to_several_sequences() -> None:
    cache = normal((4, 2, 1, 8), torch.float32, 0)
    tables = torch.tensor([[3, 1], [3, 2]], dtype=torch.int32)
    key, _ = torch.ops.paged.gather_kv(
        cache, cache, tables, torch.tensor([4, 3], dtype=torch.int32), num_tokens=7
    )
    assert same_bits(key, torch.cat([cache[3], cache[1], cache[3], cache[2, :1]]))


def test_blocks_beyond_2_to_the_31_elements_are_gathered() -> None:
    num_blocks = 2**31 // (2 * 16 * 1 * 512) + 3
    try:
        blocks = torch.empty(num_blocks, 2, 16, 1, 512, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for the pool: {error}")
    contents = normal((2, 16, 1, 512), torch.float16, 0)
    blocks[-1] = contents
    key, value = torch.ops.paged.gather_kv(
        blocks[:, 0],
        blocks[:, 1],
        torch.tensor([[num_blocks - 1]], dtype=torch.int32),
        torch.tensor([16], dtype=torch.int32),
    )
    assert same_bits(key, contents[0])
    assert same_bits(value, contents[1])


def test_results_share_no_memory_with_the_pool() -> None:
    cache = torch.zeros(1, 2, 1, 8)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    key, value = torch.ops.paged.gather_kv(cache, cache, table, length)
    key.fill_(1.0)
    assert value.eq(0).all()
    assert cache.eq(0).all()


def test_the_public_function_is_the_op() -> None:
    case = place(make_sequences([5, 9]), Placement(block_size=4))
    arguments = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    got = paged_ops.gather_kv(*arguments, num_tokens=14)
    want = torch.ops.paged.gather_kv(*arguments)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
