"""Writing new keys and values into the pool."""

from __future__ import annotations

import math
from typing import Any

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

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_layout = pytest.mark.parametrize("layout", CACHE_LAYOUTS)
_SHARED_LAYOUTS = ("article NHD", "article HND", "keys then values")


def storage_of(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage, those outside of the view included."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def filled_caches(
    layout: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    head_dim: int = 8,
    head_dim_v: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return caches whose whole storage holds NaN, so that every stray byte is seen."""
    caches = make_caches(layout, shape, head_dim, head_dim_v or head_dim, dtype)
    for cache in caches:
        storage_of(cache).fill_(math.nan)
    return caches


def copy_with_storage(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return copies with the same strides, in storage of their own that is equal byte for byte."""
    return tuple(
        storage_of(t).clone().as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors
    )


def assert_writes_like_the_reference(
    caches: tuple[Tensor, Tensor], key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Write both ways and compare the whole storage, bit for bit."""
    want = copy_with_storage(caches)
    shared = caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr()
    if shared:
        want = (
            want[0],
            want[0].as_strided(caches[1].shape, caches[1].stride(), caches[1].storage_offset()),
        )
    reference.write_kv(key, value, *want, slots)
    before = [tensor.clone() for tensor in (key, value, slots)]
    assert torch.ops.paged.write_kv(key, value, *caches, slots) is None
    for got, expected in zip(caches, want, strict=True):
        assert same_bits(storage_of(got), storage_of(expected))
    assert all(same_bits(a, b) for a, b in zip((key, value, slots), before, strict=True))


@st.composite
def writes(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(CACHE_LAYOUTS))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(1, 4)))
    head_dim = draw(st.sampled_from([1, 3, 8, 16, 33, 64, 128, 576]))
    head_dim_v = head_dim
    if layout not in _SHARED_LAYOUTS:
        head_dim_v = draw(st.sampled_from([head_dim, 1, 5, 40]))
    num_slots = shape[0] * shape[1]
    slot = st.one_of(st.integers(-1, num_slots - 1), st.sampled_from([-1, 0, num_slots - 1]))
    slots = draw(st.lists(slot, max_size=40))
    rows = (len(slots), shape[2])
    strided = draw(st.booleans())
    key, value = (
        _strided_rows((*rows, width), dtype, seed, strided)
        for seed, width in ((1, head_dim), (2, head_dim_v))
    )
    return {
        "caches": filled_caches(layout, shape, dtype, head_dim, head_dim_v),
        "key": key,
        "value": value,
        "slots": torch.tensor(slots, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
    }


def _strided_rows(
    shape: tuple[int, int, int], dtype: torch.dtype, seed: int, strided: bool
) -> Tensor:
    values = normal(shape, dtype, seed)
    if not strided:
        return values
    num_tokens, num_heads, width = shape
    return values.new_empty(num_tokens, 2, num_heads + 1, width + 3)[:, 1, 1:, 2:-1].copy_(values)


@given(writes())
def test_any_write_equals_the_reference_and_touches_nothing_else(write: dict[str, Any]) -> None:
    assert_writes_like_the_reference(**{k: write[k] for k in ("caches", "key", "value", "slots")})


@each_layout
@each_dtype
def test_every_layout_is_written_in_place(layout: str, dtype: torch.dtype) -> None:
    caches = filled_caches(layout, (4, 6, 3), dtype)
    pointers = [cache.data_ptr() for cache in caches]
    key, value = normal((5, 3, 8), dtype, 1), normal((5, 3, 8), dtype, 2)
    slots = torch.tensor([0, 23, 7, -1, 12])
    assert_writes_like_the_reference(caches, key, value, slots)
    assert [cache.data_ptr() for cache in caches] == pointers
    assert same_bits(caches[0][1, 1], key[2])
    assert same_bits(caches[1][3, 5], value[1])


def test_minus_one_writes_nothing_so_block_0_of_another_request_survives_padding() -> None:
    caches = filled_caches("NHD", (3, 4, 2), torch.float32)
    caches[0][0], caches[1][0] = 1.5, 2.5
    key = normal((8, 2, 8), torch.float32, 1)
    slots = torch.tensor([4, 5, 6, -1, -1, -1, -1, -1])
    torch.ops.paged.write_kv(key, key, *caches, slots)
    assert caches[0][0].eq(1.5).all()
    assert caches[1][0].eq(2.5).all()
    assert same_bits(caches[0][1, :3], key[:3])
    assert caches[0][1, 3:].isnan().all()
    assert caches[0][2].isnan().all()


def test_only_padding_is_a_write_of_nothing() -> None:
    caches = filled_caches("HND", (2, 4, 2), torch.bfloat16)
    key = normal((3, 2, 8), torch.bfloat16, 1)
    torch.ops.paged.write_kv(key, key, *caches, torch.full((3,), -1))
    assert all(cache.isnan().all() for cache in caches)


def test_the_mapping_of_slots_to_blocks_and_offsets_is_that_of_the_pool_not_of_memory() -> None:
    for layout in CACHE_LAYOUTS:
        caches = filled_caches(layout, (3, 4, 2), torch.float32)
        key = torch.arange(12.0).view(12, 1, 1).repeat(1, 2, 8)
        torch.ops.paged.write_kv(key, -key, *caches, torch.arange(12))
        want = torch.arange(12.0).view(3, 4, 1, 1).expand(3, 4, 2, 8)
        assert torch.equal(caches[0], want)
        assert torch.equal(caches[1], -want)


@each_dtype
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_int32_and_int64_slots_write_the_same_bytes(
    dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    caches = filled_caches("article NHD", (4, 6, 2), dtype)
    key, value = normal((4, 2, 8), dtype, 1), normal((4, 2, 8), dtype, 2)
    slots = torch.tensor([3, 1, -1, 22], dtype=slot_dtype)
    assert_writes_like_the_reference(caches, key, value, slots)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_strided_slots_are_read_by_their_stride(slot_dtype: torch.dtype) -> None:
    caches = filled_caches("NHD", (4, 6, 2), torch.float32)
    slots = torch.tensor([[3, 99], [1, -5], [22, 7]], dtype=slot_dtype)[:, 0]
    key = normal((3, 2, 8), torch.float32, 1)
    assert_writes_like_the_reference(caches, key, key.clone(), slots)


@each_dtype
def test_of_rows_with_one_slot_the_last_wins_whole_for_every_number_of_threads(
    dtype: torch.dtype,
) -> None:
    num_tokens = 4096
    key = torch.arange(num_tokens).remainder(251).view(-1, 1, 1).expand(-1, 8, 64).to(dtype)
    slots = torch.arange(num_tokens).remainder(7)
    last = [int((slots == slot).nonzero().max()) for slot in range(7)]
    for num_threads in (1, 2, 3, 5, 16):
        torch.set_num_threads(num_threads)
        for _ in range(20):
            caches = filled_caches("article NHD", (2, 4, 8), dtype, 64)
            torch.ops.paged.write_kv(key, -key, *caches, slots)
            flat_key, flat_value = (cache.flatten(0, 1) for cache in caches)
            assert torch.equal(flat_key[:7], key[last])
            assert torch.equal(flat_value[:7], -key[last])
            assert flat_key[7].isnan().all()


def test_two_rows_with_one_slot_never_mix_over_100_repeats() -> None:
    key = torch.stack([torch.full((4, 576), 1.0), torch.full((4, 576), 2.0)])
    for _ in range(100):
        caches = filled_caches("NHD", (2, 8, 4), torch.float32, 576)
        torch.ops.paged.write_kv(key, key, *caches, torch.tensor([5, 5]))
        assert caches[0][0, 5].eq(2.0).all()
        assert caches[1][0, 5].eq(2.0).all()


@each_dtype
def test_a_large_write_equals_the_reference(dtype: torch.dtype) -> None:
    caches = filled_caches("article HND", (200, 16, 4), dtype, 64)
    slots = torch.randperm(3200)[:3000]
    key, value = normal((3000, 4, 64), dtype, 1), normal((3000, 4, 64), dtype, 2)
    torch.ops.paged.write_kv(key, value, *caches, slots)
    for cache, rows in zip(caches, (key, value), strict=True):
        assert same_bits(cache[slots // 16, slots % 16], rows)
        assert cache.isnan().sum() == 200 * 4 * 64


@each_dtype
def test_keys_and_values_cut_from_a_fused_projection_are_read_in_place(dtype: torch.dtype) -> None:
    fused = normal((5, (6 + 2 + 2) * 8), dtype, 1)
    key = fused[:, 6 * 8 : 8 * 8].unflatten(1, (2, 8))
    value = fused[:, 8 * 8 :].unflatten(1, (2, 8))
    assert_writes_like_the_reference(
        filled_caches("article NHD", (2, 4, 2), dtype), key, value, torch.tensor([7, 0, 3, 1, 2])
    )


def test_expanded_keys_are_read_in_place() -> None:
    caches = filled_caches("NHD", (2, 4, 3), torch.float32)
    key = torch.arange(8.0).expand(5, 3, 8)
    assert_writes_like_the_reference(caches, key, key, torch.tensor([7, 0, 3, 1, 2]))


@each_dtype
def test_every_bit_pattern_survives(dtype: torch.dtype) -> None:
    """Signalling NaN, negative zero and subnormals are copied, never computed with."""
    integer = torch.int16 if dtype != torch.float32 else torch.int32
    limit = 2**15 if integer == torch.int16 else 2**31
    patterns = torch.randint(-limit, limit, (64, 2, 16)).to(integer)
    patterns[0, 0, :4] = torch.tensor([-limit, 1, -limit + 1, limit - 1])
    rows = patterns.view(dtype)
    caches = filled_caches("HND", (8, 8, 2), dtype, 16)
    torch.ops.paged.write_kv(rows, rows, *caches, torch.arange(64))
    for cache in caches:
        assert torch.equal(cache.flatten(0, 1).contiguous().view(integer), patterns)


def test_a_write_of_no_tokens_changes_nothing() -> None:
    for num_blocks in (0, 2):
        caches = filled_caches("NHD", (num_blocks, 4, 2), torch.float32)
        empty = torch.empty(0, 2, 8)
        torch.ops.paged.write_kv(empty, empty, *caches, torch.empty(0, dtype=torch.int64))
        assert all(cache.isnan().all() for cache in caches)


def test_slots_beyond_2_to_the_31_elements_are_written() -> None:
    num_blocks, row = 2**31 // (64 * 512) + 3, (1, 512)
    try:
        blocks = torch.empty(num_blocks, 2, 32, *row, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for the pool: {error}")
    assert blocks[:-2].numel() > 2**31
    slots = torch.tensor([0, num_blocks * 32 - 1, (num_blocks - 2) * 32], dtype=torch.int32)
    for slot in slots.tolist():
        blocks[slot // 32, :, slot % 32] = 0.0
    key, value = normal((3, *row), torch.float16, 1), normal((3, *row), torch.float16, 2)
    torch.ops.paged.write_kv(key, value, blocks[:, 0], blocks[:, 1], slots)
    for token, slot in enumerate(slots.tolist()):
        assert same_bits(blocks[slot // 32, 0, slot % 32], key[token])
        assert same_bits(blocks[slot // 32, 1, slot % 32], value[token])


def test_latent_keys_are_written_where_values_are_a_view_of_them() -> None:
    latent = torch.full((3, 4, 1, 24), math.nan)
    key = normal((5, 1, 24), torch.float32, 1)
    slots = torch.tensor([11, 0, 5, -1, 3])
    torch.ops.paged.write_kv(key, key[..., :16], latent, latent[..., :16], slots)
    rows = latent.flatten(0, 1)
    written = slots[slots >= 0]
    assert same_bits(rows[written], key[slots >= 0])
    assert rows.isnan().all(dim=2).sum() == 12 - 4


def test_the_public_function_is_the_op() -> None:
    key = normal((3, 2, 8), torch.float32, 1)
    caches = [filled_caches("NHD", (2, 4, 2), torch.float32) for _ in range(2)]
    slots = torch.tensor([0, 5, -1])
    assert paged_ops.write_kv(key, key, *caches[0], slots) is None
    torch.ops.paged.write_kv(key, key, *caches[1], slots)
    assert all(same_bits(a, b) for a, b in zip(*caches, strict=True))
