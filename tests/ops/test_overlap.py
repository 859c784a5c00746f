"""What a call writes shares no memory with what else it reads or writes: exactly that is refused.

The addresses of small tensors with all kinds of strides are written down, element by element, and
compared with what the ops take. What is taken is right: the reference gives the same memory.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from paged_ops import reference

SHARED = "shares memory|must not share memory"
Shape = tuple[int, ...]


def addresses(tensor: Tensor) -> list[int]:
    """List the address of each byte, element by element in the order of the indices."""
    size = tensor.element_size()
    index = product(*map(range, tensor.shape))
    steps = [sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) for at in index]
    return [tensor.data_ptr() + step * size + byte for step in steps for byte in range(size)]


def overlaps_itself(tensor: Tensor) -> bool:
    at = addresses(tensor)
    return len(set(at)) < len(at)


def share(a: Tensor, b: Tensor) -> bool:
    return not set(addresses(a)).isdisjoint(addresses(b))


def steps_alike(a: Tensor, b: Tensor) -> bool:
    return all(a.shape[i] == 1 or a.stride(i) == b.stride(i) for i in range(3))


def share_beyond_rows(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Say whether a row of V shares memory with a row of K, and not with just its own, in step."""
    if not share(key_cache, value_cache):
        return False
    indices = list(product(*map(range, key_cache.shape[:3])))
    keys = [set(addresses(key_cache[i])) for i in indices]
    values = [set(addresses(value_cache[i])) for i in indices]
    pairs = product(range(len(indices)), repeat=2)
    return not steps_alike(key_cache, value_cache) or any(
        i != j and not keys[i].isdisjoint(values[j]) for i, j in pairs
    )


@st.composite
def views(draw: st.DrawFn, buffer: Tensor, shape: Shape, dense_last: bool = True) -> Tensor:
    """View the buffer in some shape: with any strides, or one dimension within another."""
    strides = [1] * len(shape)
    if draw(st.booleans()):
        span = shape[-1] if dense_last else 1
        for dim in draw(st.permutations(range(len(shape) - dense_last))):
            strides[dim] = span + draw(st.integers(0, 2))
            span = strides[dim] * (shape[dim] - 1) + span
    else:
        for dim in range(len(shape) - dense_last):
            strides[dim] = draw(st.integers(0, 9))
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assume(last < buffer.numel())
    return buffer.as_strided(shape, strides, draw(st.integers(0, buffer.numel() - 1 - last)))


sizes = st.integers(1, 3)


@given(st.data(), sizes, sizes, sizes, sizes)
def test_out_may_lie_anywhere_but_in_an_element_of_an_input(
    data: st.DataObject, tokens: int, heads: int, dim: int, dim_v: int
) -> None:
    buffer = torch.arange(data.draw(st.integers(8, 48)), dtype=torch.float32).cos()
    query = data.draw(views(buffer, (tokens, heads, dim)))
    out = data.draw(views(buffer, (tokens, heads, dim_v)))
    caches = torch.randn(2, 3, 1, dim), torch.randn(2, 3, 1, dim_v)
    table = torch.tensor([[1]] * tokens, dtype=torch.int32)
    lens = torch.arange(tokens, dtype=torch.int32) + 1
    before = buffer.clone()
    if overlaps_itself(out) or share(out, query):
        with pytest.raises(RuntimeError, match=SHARED):
            paged_ops.attention(query, *caches, table, lens, out=out)
        assert torch.equal(buffer, before)
        return
    want = paged_ops.attention(query.clone(), *caches, table, lens)
    paged_ops.attention(query, *caches, table, lens, out=out)
    assert torch.equal(out, want)
    out.copy_(before.as_strided(out.shape, out.stride(), out.storage_offset()))
    assert torch.equal(buffer, before), "it wrote beside out"


@given(st.data(), sizes, sizes, st.integers(1, 2), sizes, sizes)
def test_caches_may_share_memory_row_by_row_and_with_nothing_else(
    data: st.DataObject, blocks: int, block_size: int, heads: int, dim: int, dim_v: int
) -> None:
    shape = blocks, block_size, heads
    buffer = torch.arange(data.draw(st.integers(16, 90)), dtype=torch.float32).sin()
    key_cache = data.draw(views(buffer, (*shape, dim)))
    value_cache = data.draw(views(buffer, (*shape, dim_v)))
    if data.draw(st.booleans()) and key_cache.storage_offset() + 1 < buffer.numel():
        offset = key_cache.storage_offset() + data.draw(st.integers(0, 2))
        with_strides = (*shape, dim_v), key_cache.stride(), offset
        last = sum((n - 1) * s for n, s in zip(*with_strides[:2], strict=True)) + offset
        assume(last < buffer.numel())
        value_cache = buffer.as_strided(*with_strides)
    caches = key_cache, value_cache
    bad = any(map(overlaps_itself, caches)) or share_beyond_rows(*caches)
    slots = torch.arange(blocks * block_size).flip(0)
    rows = torch.randn(len(slots), heads, dim), torch.randn(len(slots), heads, dim_v)
    mapping = torch.tensor([[i, (i + 1) % blocks] for i in range(blocks)])
    for op, arguments in (
        ("write_kv", (*rows, *caches, slots)),
        ("copy_blocks", (*caches, mapping)),
    ):
        before = buffer.clone()
        if bad:
            with pytest.raises(RuntimeError, match=SHARED):
                getattr(paged_ops, op)(*arguments)
            assert torch.equal(buffer, before)
            continue
        getattr(paged_ops, op)(*arguments)
        got = buffer.clone()
        buffer.copy_(before)
        getattr(reference, op)(*arguments)
        assert torch.equal(got, buffer)


@given(st.data(), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), sizes, st.booleans())
def test_scales_may_lie_beside_the_elements_and_not_in_them(
    data: st.DataObject, blocks: int, block_size: int, heads: int, dim: int, has_one_scale: bool
) -> None:
    shape = blocks, block_size, heads
    memory = torch.zeros(data.draw(st.integers(8, 40)))
    in_bytes = memory.view(torch.int8)
    caches = [data.draw(views(in_bytes, (*shape, dim))) for _ in range(2)]
    scales = [data.draw(views(memory, shape, dense_last=False)) for _ in range(2)]
    if has_one_scale:
        scales[1] = scales[0]
    slots = torch.arange(blocks * block_size)
    rows = [torch.randn(len(slots), heads, dim) for _ in range(2)]
    if data.draw(st.booleans()) and len(slots) * heads * dim <= memory.numel():
        rows[0] = data.draw(views(memory, rows[0].shape))
    # A quantised cache that is a view of the other has rules of its own.
    assume(not share(*caches) or share_beyond_rows(*caches))
    written = *caches, *scales
    bad = any(map(overlaps_itself, written)) or any(
        share(a, b) for a, b in combinations(written, 2)
    )
    bad = bad or any(share(row, a) for row in rows for a in written)
    before = in_bytes.clone()
    kwargs = {"key_scale": scales[0], "value_scale": scales[1]}
    if bad:
        with pytest.raises(RuntimeError, match=SHARED):
            paged_ops.write_kv(*rows, *caches, slots, **kwargs)
        assert torch.equal(in_bytes, before)
        return
    paged_ops.write_kv(*rows, *caches, slots, **kwargs)
    got = in_bytes.clone()
    in_bytes.copy_(before)
    reference.write_kv(*rows, *caches, slots, **kwargs)
    assert torch.equal(got, in_bytes)


def test_keys_scales_and_values_may_lie_in_one_row() -> None:
    """K | its scale | V | its scale for each token and head."""
    tokens, heads, dim = 6, 2, 8
    row = 2 * (dim + 4)
    memory = torch.zeros(3, 2, heads, row // 4)
    in_bytes = memory.view(torch.int8)
    caches = in_bytes[..., :dim], in_bytes[..., dim + 4 : -4]
    scales = {"key_scale": memory[..., dim // 4], "value_scale": memory[..., -1]}
    rows = torch.randn(2, tokens, heads, dim).unbind()
    paged_ops.write_kv(*rows, *caches, torch.arange(tokens), **scales)
    paged_ops.copy_blocks(*caches, torch.tensor([[0, 1], [1, 0]]), **scales)
    table, lens = torch.tensor([[1, 0, 2]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    for got, want in zip(paged_ops.gather_kv(*caches, table, lens, **scales), rows, strict=True):
        torch.testing.assert_close(got, want, atol=0.02, rtol=0)


@given(st.permutations([0, 1, 2]), st.sampled_from([4, 8, 12]), st.data(), st.integers(1, 3), sizes)
def test_pages_with_scales_inside_are_taken_in_every_order_of_memory(
    order: list[int], dim: int, data: st.DataObject, block_size: int, heads: int
) -> None:
    """[K | its scale | V | its scale] in each row, blocks, tokens and heads in any order."""
    shape, blocks, row = [3, block_size, heads], 3, 2 * (dim + 4)
    memory = torch.zeros(*(shape[i] for i in order), row // 4)
    memory = memory.permute(*(order.index(i) for i in range(3)), 3)
    in_bytes = memory.view(torch.int8)
    caches = in_bytes[..., :dim], in_bytes[..., dim + 4 : -4]
    scales = {"key_scale": memory[..., dim // 4], "value_scale": memory[..., -1]}
    slots = torch.randperm(blocks * block_size)
    rows = torch.randn(2, len(slots), heads, dim).unbind()
    paged_ops.write_kv(*rows, *caches, slots, **scales)
    expected = [torch.zeros_like(cache) for cache in caches]
    separate = {name: torch.zeros(shape) for name in scales}
    reference.write_kv(*rows, *expected, slots, **separate)
    assert all(map(torch.equal, caches, expected))
    assert all(torch.equal(scales[name], separate[name]) for name in scales)
    before = in_bytes.clone()
    shifted = data.draw(st.integers(0, dim // 4 - 1), "a scale within the row of keys")
    name = data.draw(st.sampled_from(sorted(scales)))
    with pytest.raises(RuntimeError, match=f"{name} shares memory with key_cache"):
        paged_ops.write_kv(*rows, *caches, slots, **(scales | {name: memory[..., shifted]}))
    with pytest.raises(RuntimeError, match=SHARED):
        paged_ops.write_kv(*rows, caches[0], in_bytes[..., dim - 1 : -9], slots, **scales)
    assert torch.equal(in_bytes, before)


def test_slots_and_mappings_are_read_and_may_not_lie_in_the_pool() -> None:
    memory = torch.zeros(64)
    caches = memory.view(2, 2, 4, 1, 4).unbind(1)
    index = memory.view(torch.int64)[4:6]
    with pytest.raises(RuntimeError, match="slot_mapping shares memory with key_cache"):
        paged_ops.write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), *caches, index)
    with pytest.raises(RuntimeError, match="block_mapping shares memory with key_cache"):
        paged_ops.copy_blocks(*caches, index.view(1, 2))


def test_a_search_that_would_take_for_ever_ends_in_a_refusal() -> None:
    """Strides without a common divisor that lie within each other nowhere: never a hang."""
    buffer = torch.zeros(2_000_000)
    sizes = 300, 300, 1
    query = buffer.as_strided(sizes, (2011, 2017, 1))
    out = buffer.as_strided(sizes, (2003, 1999, 1), 500)
    caches = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    index = torch.zeros(300, 0, dtype=torch.int32), torch.zeros(300, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=SHARED):
        paged_ops.attention(query, *caches, *index, out=out)
