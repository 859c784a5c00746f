"""What the kernels of any machine and ISA variant must do: checks of a way to make calls."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.driver import calls
from tests.driver.calls import Call, Results
from tests.driver.cases import (
    attention_cases,
    long_sequences,
    quantised_rows,
    states,
    with_last_value,
)
from tests.support.checks import assert_accurate, assert_merged, same_bits
from tests.support.sequences import Placement, make_sequences, place

Run = Callable[[list[Call]], list[Results]]
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


def new_rows_become_the_nearest_elements_of_a_quantised_pool(run: Run, dtype: torch.dtype) -> None:
    cases = quantised_rows(dtype)
    results = run(
        [calls.write_kv(case.key, case.value, case.empty, case.slots, 2) for case in cases]
    )
    for case, (key_cache, value_cache, *scales) in zip(cases, results, strict=True):
        for cache, want in zip((key_cache, value_cache), case.written.caches, strict=True):
            assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
        for scale, want in zip(scales, case.written.scales.values(), strict=False):
            assert same_values(scale, want.flatten())


def rows_of_a_quantised_pool_come_out_times_their_scales(run: Run, dtype: torch.dtype) -> None:
    cases = quantised_rows(dtype)
    table = torch.tensor([[4, 1, 2], [0, 5, -9]], dtype=torch.int32)
    lens = torch.tensor([11, 6], dtype=torch.int32)
    results = run([calls.gather_kv(case.written, table, lens, 2) for case in cases])
    blocks = table.long().clamp(min=0)
    for case, gathered in zip(cases, results, strict=True):
        for rows, cache, name in zip(
            gathered, case.written.caches, ("key_scale", "value_scale"), strict=True
        ):
            scale = case.written.scales.get(name, torch.ones(())).expand(cache.shape[:3])
            want = (cache.float() * scale[..., None])[blocks].flatten(1, 2)
            want = torch.cat([each[:n] for each, n in zip(want, lens.tolist(), strict=True)])
            assert same_values(rows, want)


def states_are_merged_as_by_the_op(run: Run, dtype: torch.dtype) -> None:
    a, b = states(dtype)
    (out, lse), threaded = run([calls.merge_states(a, b, num_threads) for num_threads in (1, 3)])
    assert_merged(a, b, out, lse)
    assert same_bits(out, threaded[0])
    assert same_bits(lse, threaded[1])


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, whatever those of a NaN."""
    return bool(torch.equal(a.isnan(), b.isnan())) and same_bits(
        a.masked_fill(a.isnan(), 0.0), b.masked_fill(b.isnan(), 0.0)
    )


CHECKS: tuple[Check, ...] = (
    attention_is_within_the_bounds_of_the_op,
    bits_depend_on_neither_blocks_nor_threads,
    a_row_has_the_same_bits_alone_and_among_others,
    a_key_that_a_row_does_not_see_does_not_reach_it,
    new_rows_become_the_nearest_elements_of_a_quantised_pool,
    rows_of_a_quantised_pool_come_out_times_their_scales,
    states_are_merged_as_by_the_op,
)
