"""What the kernels of any machine must do: checks of a way to run calls in the driver."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.driver import calls
from tests.driver.calls import Call, State
from tests.driver.cases import attention_cases, long_sequences, states, with_last_value
from tests.support.checks import assert_accurate, assert_merged, same_bits
from tests.support.sequences import Placement, make_sequences, place

Run = Callable[[list[Call]], list[State]]
Check = Callable[[Run, torch.dtype], None]


def attention_is_within_the_bounds_of_the_op(run: Run, dtype: torch.dtype) -> None:
    cases = attention_cases(dtype)
    results = run([calls.attention(place(*case)) for case in cases])
    for (made, _), (output, lse) in zip(cases, results, strict=True):
        assert_accurate(made, output, lse)


def bits_depend_on_neither_blocks_nor_threads(run: Run, dtype: torch.dtype) -> None:
    made = long_sequences(dtype)
    placements = [
        Placement(block_size, layout, garbage=garbage, seed=block_size)
        for block_size, layout, garbage in (
            (16, "HND", "nan"),
            (1, "NHD", "inf"),
            (37, "slice", "max"),
            (4096, "article HND", "mixed"),
        )
    ]
    several = [calls.attention(place(made, placement)) for placement in placements]
    several += [calls.attention(place(made, placements[0]), threads) for threads in (2, 3, 5)]
    first, *others = run(several)
    assert_accurate(made, *first)
    for other in others:
        assert same_bits(first[0], other[0])
        assert same_bits(first[1], other[1])


def a_row_has_the_same_bits_alone_and_among_others(run: Run, dtype: torch.dtype) -> None:
    whole = make_sequences(
        (70, 530), (45, 9), num_heads=6, num_kv_heads=2, head_dim=53, dtype=dtype
    )
    decode = whole.split_rows(lambda query_len: list(range(1, query_len)))
    made = [calls.attention(place(each, Placement())) for each in (whole, decode)]
    (output, lse), (alone, lse_alone) = run(made)
    assert same_bits(output, alone)
    assert same_bits(lse, lse_alone)


def a_key_that_a_row_does_not_see_does_not_reach_it(run: Run, dtype: torch.dtype) -> None:
    made = make_sequences((50,), (50,), num_heads=3, num_kv_heads=1, head_dim=20, dtype=dtype)
    for value in (math.inf, math.nan):
        poisoned = with_last_value(made, value)
        both = [calls.attention(place(each, Placement())) for each in (made, poisoned)]
        (clean, _), (output, _) = run(both)
        assert same_bits(clean[:-1], output[:-1])
        assert not output[-1].isfinite().any()


def states_are_merged_as_by_the_op(run: Run, dtype: torch.dtype) -> None:
    a, b = states(dtype)
    (out, lse), threaded = run([calls.merge_states(a, b, num_threads) for num_threads in (1, 3)])
    assert_merged(a, b, out, lse)
    assert same_bits(out, threaded[0])
    assert same_bits(lse, threaded[1])


CHECKS: tuple[Check, ...] = (
    attention_is_within_the_bounds_of_the_op,
    bits_depend_on_neither_blocks_nor_threads,
    a_row_has_the_same_bits_alone_and_among_others,
    a_key_that_a_row_does_not_see_does_not_reach_it,
    states_are_merged_as_by_the_op,
)
