"""Key ranges: what each row sees, where one rule for the whole call doesn't say it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from tests.support.checks import assert_accurate, same_bits
from tests.support.sequences import DTYPES, INT32_MAX, Placement, Sequences, make_sequences, run
from tests.support.strategies import placements, sequences
from tests.support.trees import tree_mask


@st.composite
def ranged(draw: st.DrawFn) -> Sequences:
    """Draw sequences whose rows see ranges: of neighbours, at random, or whatever int32 holds."""
    made = draw(sequences(min_batch=1, max_batch=3))
    longest = max(made.seq_lens)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shape = len(made.query), 2
    kind = draw(st.sampled_from(["random", "sorted", "far out", "open"]))
    if kind == "far out":
        edges = torch.tensor([-(2**31), -1, 0, longest, INT32_MAX], dtype=torch.int32)
        ranges = edges[torch.randint(5, shape, generator=generator)]
    elif kind == "open":
        ranges = torch.tensor([0, INT32_MAX], dtype=torch.int32).expand(shape)
    else:
        ranges = torch.randint(-3, longest + 4, shape, generator=generator, dtype=torch.int32)
        ranges = ranges.sort(1).values if kind == "sorted" else ranges
    if draw(st.booleans()):
        ranges = ranges.T.contiguous().T
    more = {}
    if not {"sliding_window", "alibi_slopes"} & set(made.options) and draw(st.booleans()):
        more["tree_mask"] = tree_mask(list(made.query_lens), draw(st.integers(0, 99)))
    return made.with_options(key_ranges=ranges, **more)


@given(ranged(), placements())
def test_every_range_equals_the_reference(made: Sequences, placement: Placement) -> None:
    output, lse = run(made, placement)
    assert_accurate(made, output, lse)


@given(ranged(), placements(), placements())
def test_bits_depend_on_neither_blocks_nor_threads(
    made: Sequences, first: Placement, second: Placement
) -> None:
    output, lse = run(made, first)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        other, other_lse = run(made, second)
        assert same_bits(output, other)
        assert same_bits(lse, other_lse)


@given(ranged(), placements(), st.data())
def test_a_row_has_the_bits_that_it_has_alone(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    """Neither the other rows' ranges nor what they see changes a bit of it."""
    made = made.with_options(tree_mask=None, causal=False, sliding_window=None, alibi_slopes=None)
    sequence = data.draw(st.integers(0, len(made.keys) - 1), "sequence")
    if not made.query_lens[sequence]:
        return
    row = data.draw(st.integers(0, made.query_lens[sequence] - 1), "row")
    row += made.rows(sequence).start
    first, end = made.options["key_ranges"][row].tolist()
    keys, values = made.keys[sequence].clone(), made.values[sequence].clone()
    if made.quantisation is None:
        hidden = torch.ones(len(keys), dtype=torch.bool)
        hidden[max(first, 0) : max(end, 0)] = False
        keys[hidden], values[hidden] = data.draw(st.sampled_from([math.nan, math.inf])), math.nan
    alone = replace(
        made,
        query=made.query[row : row + 1],
        query_lens=(1,),
        keys=(keys,),
        values=(values,),
    ).with_options(key_ranges=made.options["key_ranges"][row : row + 1])
    (output, lse), (own, own_lse) = run(made, placement), run(alone)
    assert same_bits(output[row], own[0])
    assert same_bits(lse[row], own_lse[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 600])
def test_ranges_that_say_the_rule_of_the_call_change_no_bit(
    dtype: torch.dtype, window: int | None
) -> None:
    made = make_sequences([700, 40, 3], [70, 1, 5], num_heads=4, head_dim=32, dtype=dtype)
    lens = torch.tensor(made.seq_lens, dtype=torch.int32)
    starts = torch.tensor([0, 70, 71, 76], dtype=torch.int32)
    output, lse = run(made.with_options(sliding_window=window))
    ranges = paged_ops.build_key_ranges(lens, starts, sliding_window=window)
    other, other_lse = run(made.with_options(causal=False, key_ranges=ranges))
    assert same_bits(output, other)
    assert same_bits(lse, other_lse)


def test_blocks_that_no_range_reaches_are_never_looked_at() -> None:
    pool = torch.randn(4, 2, 8, 1, 16)
    table = torch.tensor([[99, 2, -5, 1, INT32_MAX]], dtype=torch.int32)
    lens, starts = torch.tensor([40], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    call = torch.randn(2, 2, 16), pool[:, 0], pool[:, 1], table, lens, starts
    for ranges in ([[8, 16], [12, 13]], [[24, 32], [0, 0]], [[30, 31], [35, 20]]):
        given_ranges = torch.tensor(ranges, dtype=torch.int32)
        paged_ops.attention(*call, causal=False, key_ranges=given_ranges)
    for ranges, column in (([[8, 16], [7, 8]], 0), ([[8, 17], [0, 0]], 2), ([[8, 9], [24, 33]], 2)):
        given_ranges = torch.tensor(ranges, dtype=torch.int32)
        with pytest.raises(RuntimeError, match=rf"block_tables\[0, {column}\] is"):
            paged_ops.attention(*call, causal=False, key_ranges=given_ranges)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_queries", [3, 150])
def test_ranges_of_long_sequences_lie_anywhere_and_garbage_between_them(
    dtype: torch.dtype, num_queries: int
) -> None:
    made = make_sequences([5000, 300], [num_queries, 2], num_heads=2, head_dim=32, dtype=dtype)
    first = torch.randint(0, 4000, (num_queries + 2,)) // 700 * 700
    ranges = torch.stack([first, first + torch.randint(1, 900, first.shape)], 1).int()
    ranges[0] = torch.tensor([0, 5000])
    for options in ({}, {"softcap": 2.0}):
        output, lse = run(made.with_options(causal=False, key_ranges=ranges, **options))
        assert_accurate(made.with_options(causal=False, key_ranges=ranges, **options), output, lse)
    ranges[0] = torch.tensor([4990, 4999])
    seen = torch.zeros(5000, dtype=torch.bool)
    for begin, end in ranges[:num_queries].tolist():
        seen[begin:end] = True
    keys, values = made.keys[0].clone(), made.values[0].clone()
    keys[~seen], values[~seen] = math.nan, math.inf
    poisoned = replace(made, keys=(keys, made.keys[1]), values=(values, made.values[1]))
    for each in zip(
        run(made.with_options(causal=False, key_ranges=ranges)),
        run(poisoned.with_options(causal=False, key_ranges=ranges), Placement(block_size=3)),
        strict=True,
    ):
        assert same_bits(*each)


def dense_rule(made: Sequences, causal: Tensor, window: int | None, spans: Tensor) -> Tensor:
    """Return which keys each row sees, element by element: [num_tokens, longest]."""
    longest = max(made.seq_lens)
    seen = torch.zeros(len(made.query), longest, dtype=torch.bool)
    for s, length in enumerate(made.seq_lens):
        rows = range(made.rows(s).start, made.rows(s).stop)
        for row in rows:
            p = length - (rows.stop - row)
            for k in range(length):
                near = window is None or k > p - window
                seen[row, k] = near and (k <= p or not bool(causal[s]))
                for owner, first, end in spans.tolist():
                    seen[row, k] |= owner == s and first <= p < end and first <= k < end
    return seen


@given(st.data())
def test_build_key_ranges_says_what_its_documentation_says(data: st.DataObject) -> None:
    draw = data.draw
    seq_lens = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    query_lens = [draw(st.integers(0, length)) for length in seq_lens]
    made = make_sequences(seq_lens, query_lens)
    causal = torch.tensor([draw(st.booleans()) for _ in seq_lens])
    window = draw(st.sampled_from([None, 1, 4]))
    spans = []
    for s, length in enumerate(seq_lens):
        cuts = sorted(draw(st.sets(st.integers(0, length + 3), max_size=6)))
        spans += [[s, *pair] for pair in zip(cuts[::2], cuts[1::2], strict=False)]
    span_tensor = torch.tensor(spans, dtype=torch.int64).view(-1, 3)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    pad = draw(st.integers(0, 3))
    ranges = paged_ops.build_key_ranges(
        lens,
        starts,
        causal=causal if draw(st.booleans()) or not bool(causal.all()) else None,
        sliding_window=window,
        spans=span_tensor,
        num_tokens=sum(query_lens) + pad,
    )
    assert ranges.dtype == torch.int32
    assert not ranges[sum(query_lens) :].any()
    keys = torch.arange(max(seq_lens))
    owner = torch.repeat_interleave(torch.tensor(query_lens))
    real = ranges[: sum(query_lens)]
    got = (keys >= real[:, :1]) & (keys < real[:, 1:]) & (keys < lens[owner, None])
    assert torch.equal(got, dense_rule(made, causal, window, span_tensor))


def test_a_graph_serves_ranges_of_every_batch() -> None:
    def step(query: Tensor, *rest: Tensor) -> Tensor:
        *tables, lens, starts, causal = rest
        ranges = paged_ops.build_key_ranges(lens, starts, causal=causal, num_tokens=len(query))
        return paged_ops.attention(query, *tables, lens, starts, causal=False, key_ranges=ranges)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    pool = torch.randn(4, 2, 8, 1, 16)
    for causal in ([True, False], [False, False]):
        arguments = (
            torch.randn(5, 2, 16),
            pool[:, 0],
            pool[:, 1],
            torch.tensor([[0, 1], [3, 2]], dtype=torch.int32),
            torch.tensor([9, 12], dtype=torch.int32),
            torch.tensor([0, 2, 5], dtype=torch.int32),
            torch.tensor(causal),
        )
        assert same_bits(compiled(*arguments), step(*arguments))
