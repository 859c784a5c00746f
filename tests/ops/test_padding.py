"""Rows and sequences that fill up a graph of a fixed size: nobody's rows see no key."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from paged_ops import reference
from tests.support.checks import same_bits
from tests.support.sequences import DTYPES, PagedCase, Placement, Sequences, make_sequences, place
from tests.support.strategies import placements, sequences


def padded(case: PagedCase, rows: int, batch: int) -> PagedCase:
    """Add rows of NaN past the last start, and empty sequences whose tables hold anything."""
    assert case.query_start_loc is not None
    garbage = torch.full((rows, *case.query.shape[1:]), math.nan, dtype=case.query.dtype)
    tables = torch.full((batch, case.block_tables.shape[1]), 2**31 - 1, dtype=torch.int32)
    last = case.query_start_loc[-1:]
    return replace(
        case,
        query=torch.cat([case.query, garbage]),
        block_tables=torch.cat([case.block_tables, tables]),
        seq_lens=torch.cat([case.seq_lens, torch.zeros(batch, dtype=torch.int32)]),
        query_start_loc=torch.cat([case.query_start_loc, last.expand(batch)]),
    )


def assert_nobodys(case: PagedCase, output: Tensor, lse: Tensor) -> None:
    assert case.query_start_loc is not None
    rows = slice(int(case.query_start_loc[-1]), None)
    assert not output[rows].any()
    sinks = case.options.get("sinks")
    expected = torch.full(lse.shape[1:], -math.inf) if sinks is None else sinks.float()
    assert torch.equal(lse[rows], expected.expand_as(lse[rows]))


@given(sequences(), placements(), st.sampled_from([1, 3, 17, 130]), st.integers(0, 3))
def test_padding_changes_no_bit_and_its_rows_are_zero(
    made: Sequences, placement: Placement, rows: int, batch: int
) -> None:
    case = place(made, placement)
    output, lse = case.run()
    more = padded(case, rows, batch)
    for got, got_lse in (more.run(), reference.attention_with_lse(*more.tensors, **more.options)):
        assert got.shape[0] == len(case.query) + rows
        assert_nobodys(more, got, got_lse)
    got, got_lse = more.run()
    assert same_bits(got[: len(output)], output)
    assert same_bits(got_lse[: len(lse)], lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1], [3, 20], [0, 0], []], ids=str)
def test_out_is_written_in_every_row(query_lens: list[int], dtype: torch.dtype) -> None:
    made = make_sequences([40, 40][: len(query_lens)], query_lens, dtype=dtype)
    case = padded(place(made, Placement()), 9, 2)
    out = torch.full(case.query.shape, math.nan, dtype=dtype)
    torch.ops.paged.attention.out(*case.tensors, out=out)
    assert same_bits(out, torch.ops.paged.attention(*case.tensors))
    assert not out[sum(query_lens) :].any()


def test_rows_of_a_tree_mask_past_the_last_start_hold_anything() -> None:
    case = padded(place(make_sequences([9], [4]), Placement()), 2, 1)
    mask = torch.ones(6, 4, dtype=torch.bool).tril()
    output, _ = case.run(tree_mask=mask)
    assert same_bits(output, case.run()[0])


def test_a_start_past_the_rows_is_refused() -> None:
    case = place(make_sequences([9, 9], [2, 3]), Placement())
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    message = r"query_start_loc\[2\] is 6, expected at most 5: the number of query tokens"
    with pytest.raises(RuntimeError, match=message):
        paged_ops.attention(*case.tensors[:5], starts)


def test_a_compiled_step_serves_any_number_of_rows_that_count() -> None:
    def step(*tensors: Tensor) -> Tensor:
        return paged_ops.attention(*tensors)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for query_lens in ([3, 1], [1, 1], [0, 2]):
        case = place(make_sequences([8, 8], query_lens), Placement())
        case = padded(case, 8 - sum(query_lens), 1)
        assert same_bits(compiled(*case.tensors), step(*case.tensors))
