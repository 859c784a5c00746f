"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from tests.support.checks import assert_merged, largest, same_bits
from tests.support.sequences import DTYPES, normal

assert paged_ops  # Loads the library that registers torch.ops.paged.

State = tuple[Tensor, Tensor]


def assert_merges_like_the_reference(a: State, b: State) -> State:
    """Merge with the op, hold it against the reference in float64, and return the result."""
    out, lse = torch.ops.paged.merge_states(*a, *b)
    assert out.is_contiguous()
    assert_merged(a, b, out, lse)
    return out, lse


@st.composite
def states(draw: st.DrawFn) -> tuple[State, State]:
    shape = (
        draw(st.integers(0, 9)),
        draw(st.sampled_from([1, 2, 7, 71])),
        draw(st.sampled_from([1, 5, 8, 64, 100, 512])),
    )
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**16))
    spread = draw(st.sampled_from([0.1, 3.0, 100.0]))
    made = []
    for i in (0, 1):
        lse = normal(shape[:2], torch.float32, seed + 1 + i, spread)
        empty = normal(shape[:2], torch.float32, seed + 3 + i) > 1.0
        lse[empty] = -math.inf
        out = normal(shape, dtype, seed + 5 + i)
        out[empty] = draw(st.sampled_from([0.0, math.nan, math.inf]))
        made.append((_strided(out, draw(st.booleans())), lse))
    return made[0], made[1]


def _strided(out: Tensor, strided: bool) -> Tensor:
    if not strided:
        return out
    num_tokens, num_heads, width = out.shape
    return (
        out.new_empty(num_heads + 1, num_tokens, width + 3)[1:, :, 1:-2].transpose(0, 1).copy_(out)
    )


@given(states())
def test_any_two_states_merge_like_the_reference(pair: tuple[State, State]) -> None:
    assert_merges_like_the_reference(*pair)


@given(states())
def test_bits_do_not_depend_on_threads_strides_or_repeats(pair: tuple[State, State]) -> None:
    before = torch.get_num_threads()
    (out_a, lse_a), (out_b, lse_b) = pair
    want = torch.ops.paged.merge_states(out_a, lse_a, out_b, lse_b)
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        got = torch.ops.paged.merge_states(
            out_a.contiguous(), lse_a.t().contiguous().t(), out_b.contiguous(), lse_b
        )
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3.0])
def test_a_state_that_saw_nothing_adds_nothing_whatever_it_holds(
    dtype: torch.dtype, garbage: float
) -> None:
    state = normal((3, 2, 40), dtype, 1), normal((3, 2), torch.float32, 2)
    empty = torch.full((3, 2, 40), garbage, dtype=dtype), torch.full((3, 2), -math.inf)
    for pair in ((state, empty), (empty, state)):
        for got, want in zip(torch.ops.paged.merge_states(*pair[0], *pair[1]), state, strict=True):
            assert same_bits(got, want)
    out, lse = torch.ops.paged.merge_states(*empty, *empty)
    assert out.eq(0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_natural_exponentials_of_the_logs(dtype: torch.dtype) -> None:
    a = torch.full((1, 1, 9), 2.0, dtype=dtype), torch.zeros(1, 1)
    b = torch.full((1, 1, 9), 6.0, dtype=dtype), torch.full((1, 1), math.log(3.0))
    out, lse = torch.ops.paged.merge_states(*a, *b)
    assert largest(out.double() - 5.0) <= 5 * torch.finfo(dtype).eps
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-6)


@pytest.mark.parametrize("offset", [-1e30, -1e4, 0.0, 88.0, 1e4, 1e30])
@pytest.mark.parametrize("difference", [0.0, 1.0, 50.0, 1e5])
def test_logs_of_any_magnitude_neither_overflow_nor_underflow(
    offset: float, difference: float
) -> None:
    a = normal((4, 3, 16), torch.float32, 1), torch.full((4, 3), offset)
    b = normal((4, 3, 16), torch.float32, 2), torch.full((4, 3), offset + difference)
    out, lse = assert_merges_like_the_reference(a, b)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_the_order_of_the_two_states_does_not_matter() -> None:
    a = normal((50, 3, 16), torch.float32, 1), normal((50, 3), torch.float32, 2, 5.0)
    b = normal((50, 3, 16), torch.float32, 3), normal((50, 3), torch.float32, 4, 5.0)
    ab, ba = torch.ops.paged.merge_states(*a, *b), torch.ops.paged.merge_states(*b, *a)
    for x, y in zip(ab, ba, strict=True):
        assert largest(x - y) <= 1e-6 * largest(x)


def test_a_state_may_be_merged_with_itself() -> None:
    state = normal((4, 3, 16), torch.float32, 1), normal((4, 3), torch.float32, 2)
    out, lse = torch.ops.paged.merge_states(*state, *state)
    assert largest(out - state[0]) <= 1e-6
    assert largest(lse - state[1] - math.log(2)) <= 1e-6


def test_inputs_are_unchanged() -> None:
    tensors = (
        normal((4, 3, 16), torch.bfloat16, 1),
        normal((4, 3), torch.float32, 2),
        normal((4, 3, 16), torch.bfloat16, 3),
        normal((4, 3), torch.float32, 4),
    )
    before = [tensor.clone() for tensor in tensors]
    torch.ops.paged.merge_states(*tensors)
    assert all(same_bits(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8), (0, 0, 8), (3, 2, 0)], ids=str)
def test_empty_states_merge_into_empty_results(shape: tuple[int, int, int]) -> None:
    out = torch.empty(shape)
    lse = torch.zeros(shape[:2])
    merged, merged_lse = torch.ops.paged.merge_states(out, lse, out, lse)
    assert merged.shape == shape
    assert torch.allclose(merged_lse, torch.full(shape[:2], math.log(2.0)))


def test_a_large_merge_equals_the_reference() -> None:
    a = normal((3000, 8, 64), torch.float32, 1), normal((3000, 8), torch.float32, 2, 3.0)
    b = normal((3000, 8, 64), torch.float32, 3), normal((3000, 8), torch.float32, 4, 3.0)
    assert_merges_like_the_reference(a, b)


def test_the_public_function_is_the_op() -> None:
    state = normal((4, 3, 16), torch.float32, 1), normal((4, 3), torch.float32, 2)
    got = paged_ops.merge_states(*state, *state)
    want = torch.ops.paged.merge_states(*state, *state)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
