"""Sequences of several segments, and scores far above a row's first ones.

A kernel may attend to 2,048 keys with weights relative to what a row's first keys score, instead of
its maximum. Nothing of that may show: not where a segment ends, not where a weight would be cut.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.driver.cases import each_option
from tests.support.checks import assert_accurate, same_bits
from tests.support.sequences import (
    Placement,
    Sequences,
    exact,
    make_sequences,
    one_thread,
    place,
    run,
)

BF16 = torch.bfloat16
SEGMENT = 2048


def assert_one_answer(sequences: Sequences, cut: int) -> None:
    """Check a prefill against the reference, and its bits against chunks of it and decode."""
    output, lse = run(sequences)
    assert_accurate(sequences, output, lse)
    got, got_lse = run(in_parts(sequences, cut), Placement(1, "slice", garbage="inf"))
    assert same_bits(output, got)
    assert same_bits(lse, got_lse)


def in_parts(sequences: Sequences, cut: int) -> Sequences:
    """Return the first two rows and the last one as decode, and the others in two chunks."""
    return sequences.split_rows(
        lambda query_len: sorted({1, 2, cut, query_len - 1} & set(range(1, query_len)))
    )


*OPTIONS, TOGETHER = [option for option in each_option(4) if "causal" not in option]
CASES = [
    *[(option, (64, 64)) for option in OPTIONS],
    *[(TOGETHER, head_dims) for head_dims in ((128, 128), (53, 37))],
    *[({}, head_dims) for head_dims in ((64, 64), (256, 96), (1, 130), (576, 512))],
]


@pytest.mark.parametrize(("option", "head_dims"), CASES)
def test_bits_depend_neither_on_the_phase_nor_on_where_a_segment_ends(
    option: dict, head_dims: tuple[int, int]
) -> None:
    sequences = make_sequences(
        (2 * SEGMENT + 3, SEGMENT + 30),
        (20, 35),
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=BF16,
    )
    assert_one_answer(sequences.with_options(**option), 17)


def test_a_window_that_begins_within_a_segment_has_the_bits_of_decode() -> None:
    sequences = make_sequences((2600,), (300,), num_heads=2, head_dim=32, dtype=BF16)
    for window in (1, 290, 700):
        assert_one_answer(sequences.with_options(sliding_window=window), 256)


def test_a_tree_that_is_a_line_has_the_bits_of_a_causal_chunk() -> None:
    sequences = make_sequences((SEGMENT + 11,), (40,), num_heads=4, head_dim=64, dtype=BF16)
    line = torch.ones(40, 40, dtype=torch.bool).tril()
    output, lse = run(sequences)
    for causal in (True, False):
        again, lse_again = run(sequences.with_options(tree_mask=line, causal=causal))
        assert same_bits(output, again)
        assert same_bits(lse, lse_again)


@pytest.mark.parametrize("magnitude", [15.0, 30.0, 100.0])
def test_scores_far_from_each_other_are_weighed_as_exactly_as_near_ones(magnitude: float) -> None:
    sequences = make_sequences(
        (2500, 700), (60, 40), num_heads=4, num_kv_heads=2, head_dim=64, dtype=BF16
    )
    far = replace(sequences, query=(sequences.query * magnitude).to(BF16))
    assert_one_answer(far, 33)


@settings(max_examples=20)
@given(
    rise=st.sampled_from([60.0, 87.0, 88.5, 100.0, 300.0, 3e4]),
    place_of_it=st.sampled_from([31, 32, 500, 2047, 2048, 2100]),
    value=st.sampled_from([1.0, 1e30, -3e38]),
    query_len=st.sampled_from([1, 4, 40]),
)
def test_a_score_that_rises_after_the_first_keys_takes_its_weight(
    rise: float, place_of_it: int, value: float, query_len: int
) -> None:
    sequences = make_sequences((2150,), (query_len,), num_heads=2, head_dim=16, dtype=BF16)
    keys, values = torch.zeros(2150, 1, 16, dtype=BF16), sequences.values[0].clone()
    query = torch.zeros(query_len, 2, 16, dtype=BF16)
    query[..., 0] = 1.0
    keys[place_of_it, 0, 0] = rise
    values[place_of_it, 0, 3] = value
    keys = keys.expand_as(sequences.keys[0]).clone()
    risen = replace(sequences, query=query, keys=(keys,), values=(values,)).with_options(scale=1.0)
    assert_one_answer(risen, query_len // 2)


@one_thread()
def test_far_scores_take_a_few_times_as_long_as_near_ones() -> None:
    sequences = make_sequences((1024,), (1024,), num_heads=1, head_dim=128, dtype=BF16)
    cost = {}
    for magnitude in (1, 30, 100):
        far = place(replace(sequences, query=sequences.query * magnitude), Placement())
        calls = []
        for _ in range(9):
            start = time.process_time()
            far.run()
            calls.append(time.process_time() - start)
        cost[magnitude] = min(calls)
    assert cost[30] < 5 * cost[1], cost
    assert cost[100] < 15 * cost[1], cost


@pytest.mark.parametrize("query_len", [1, 50])
def test_first_keys_that_weigh_nothing_leave_the_weight_to_later_ones(query_len: int) -> None:
    sequences = make_sequences((2200,), (query_len,), num_heads=2, head_dim=32, dtype=BF16)
    keys = sequences.keys[0].clone()
    keys[:40] = -math.inf
    query = sequences.query.abs() + 0.1
    far = replace(sequences, query=query, keys=(keys,)).with_options(scale=0.05)
    later = replace(
        sequences, query=query, keys=(keys[40:],), values=(sequences.values[0][40:],)
    ).with_options(scale=0.05)
    (output, lse), (want, want_lse) = run(far), run(later)
    torch.testing.assert_close(output, want, rtol=0.02, atol=2e-3)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("query_len", [1, 50])
@pytest.mark.parametrize("sink", [-1e4, 80.0, 1e4])
def test_a_huge_sink_joins_the_denominator(sink: float, query_len: int) -> None:
    sequences = make_sequences((2200,), (query_len,), num_heads=2, head_dim=32, dtype=BF16)
    with_sink = sequences.with_options(sinks=torch.tensor([sink, 0.0]))
    output, lse = run(with_sink)
    assert_accurate(with_sink, output, lse)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [5, 2046, 2049, 2199])
def test_what_isnt_finite_reaches_the_rows_that_see_it_and_no_others(
    value: float, position: int
) -> None:
    query_len = 180
    clean = make_sequences((2200,), (query_len,), num_heads=2, head_dim=48, dtype=BF16)
    values = clean.values[0].clone()
    values[position, :, 7] = value
    poisoned = replace(clean, values=(values,))
    output, lse = run(clean)
    got, got_lse = run(poisoned)
    sees = torch.arange(query_len) + 2200 - query_len >= position
    torch.testing.assert_close(got_lse, lse)
    assert same_bits(got_lse[~sees], lse[~sees])
    assert same_bits(got[~sees], output[~sees])
    assert not got[sees][..., 7].isfinite().any()
    others = torch.arange(48) != 7
    torch.testing.assert_close(
        got[sees][..., others], output[sees][..., others], rtol=0.02, atol=2e-3
    )
    alone, _ = run(in_parts(poisoned, 90))
    assert torch.equal(got.nan_to_num(), alone.nan_to_num())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_error_is_about_that_of_torch(head_dim: int) -> None:
    """The root of the mean square, which a bound on the largest error wouldn't notice."""
    made = make_sequences((700,), (700,), num_heads=4, head_dim=head_dim, dtype=BF16)
    want, _ = exact(made)
    rows = (made.query, made.keys[0].expand_as(made.query), made.values[0].expand_as(made.query))
    torchs = scaled_dot_product_attention(*(r.transpose(0, 1)[None] for r in rows), is_causal=True)
    ours, others = (
        (output.double() - want).square().mean().sqrt()
        for output in (run(made)[0], torchs[0].transpose(0, 1))
    )
    assert ours <= 1.2 * others
