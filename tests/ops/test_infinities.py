"""What infinities and NaN in any argument make of a row: docs/semantics.md has the table."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops import reference
from tests.driver.build import ROOT
from tests.support.sequences import DTYPES, Placement, make_sequences, place

INF, NAN = math.inf, math.nan
EXTREMES = (INF, -INF, NAN, 3.4e38, -3.4e38, 0.5)
LENGTHS = [0, 5, 300]  # the rows of the first one see no key


def same(got: Tensor, want: Tensor, bound: float = 0.05) -> None:
    torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)


def both(arguments: tuple[Tensor | None, ...], **options: Tensor) -> tuple[Tensor, Tensor]:
    """Return the op's results, which have to be those of the reference."""
    got = paged_ops.attention_with_lse(*arguments, **options)
    for result, want in zip(got, reference.attention_with_lse(*arguments, **options), strict=True):
        same(result, want)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink", EXTREMES)
def test_a_row_without_keys_is_zero_and_its_lse_the_sink(sink: float, dtype: torch.dtype) -> None:
    case = place(make_sequences(LENGTHS, [2, 2, 2], dtype=dtype), Placement())
    sinks = torch.tensor([sink, 0.0])
    output, lse = both(case.tensors, sinks=sinks)
    assert (output[:2] == 0).all()
    same(lse[:2], sinks.expand(2, 2), 0.0)
    assert not output[:, 1].isnan().any(), "a sink is that of its head"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_sink_takes_all_the_weight_of_a_row(dtype: torch.dtype) -> None:
    case = place(make_sequences(LENGTHS, [2, 2, 2], dtype=dtype), Placement())
    output, lse = both(case.tensors, sinks=torch.tensor([INF, -INF]))
    assert (output[:, 0] == 0).all()
    assert (lse[:, 0] == INF).all()
    without, lse_without = both(case.tensors)
    same(output[:, 1], without[:, 1], 0.0)
    same(lse[:, 1], lse_without[:, 1], 0.0)


def test_a_sink_that_is_no_number_shows_wherever_a_key_is_seen() -> None:
    case = place(make_sequences(LENGTHS, [2, 2, 2]), Placement())
    output, lse = both(case.tensors, sinks=torch.tensor([NAN, 0.0]))
    assert output[2:, 0].isnan().all()
    assert lse[:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink", [None, INF, -INF, NAN, 0.5])
def test_keys_of_an_infinitely_low_score_weigh_nothing(
    sink: float | None, dtype: torch.dtype
) -> None:
    """If all are, the row is as one that sees none."""
    case = place(make_sequences([1, 6, 40], [1, 1, 1], dtype=dtype), Placement())
    case.query.fill_(-1.0)
    case.key_cache[..., 0] = INF
    options = {} if sink is None else {"sinks": torch.tensor([sink, 0.0])}
    output, lse = both(case.tensors, **options)
    assert (output == 0).all()
    same(lse[:, 0], torch.full((3,), -INF if sink is None else sink), 0.0)


@pytest.mark.parametrize("score", [INF, NAN])
def test_a_score_of_infinity_or_nan_makes_nan_of_its_row_alone(score: float) -> None:
    case = place(make_sequences([6, 7], [2, 1]), Placement())
    case.query.fill_(1.0)
    case.key_cache[case.block_tables[0, 0], 5 % case.key_cache.shape[1], 0, 0] = score
    output, lse = both(case.tensors)
    assert output[1].isnan().all()
    assert lse[1].isnan().all()
    assert not output[[0, 2]].isnan().any()


@pytest.mark.parametrize("slope", [INF, -INF, NAN])
def test_slopes_that_are_not_finite_do_what_arithmetic_does(slope: float) -> None:
    case = place(make_sequences([0, 6], [1, 2]), Placement())
    output, _ = both(case.tensors, alibi_slopes=torch.tensor([slope, 0.1]))
    assert (output[0] == 0).all()
    assert output[1:, 0].isnan().all()
    assert not output[:, 1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_any_lse_merge_as_the_reference_says(dtype: torch.dtype) -> None:
    pairs = torch.tensor(list(product(EXTREMES, repeat=2)))
    lse_a, lse_b = pairs.unbind(1)
    states = torch.ones(2, len(pairs), 1, 16, dtype=dtype) * torch.tensor([1, 3]).view(2, 1, 1, 1)
    states = states.to(dtype)
    arguments = states[0], lse_a[:, None].contiguous(), states[1], lse_b[:, None].contiguous()
    output, lse = paged_ops.merge_states(*arguments)
    want, want_lse = reference.merge_states(*arguments)
    same(output, want)
    same(lse, want_lse)
    is_nan = lse_a.isnan() | lse_b.isnan()
    assert torch.equal(lse.isnan().flatten(), is_nan)
    assert torch.equal(output[..., 0].isnan().flatten(), is_nan)


def test_beside_an_infinite_lse_a_finite_state_adds_nothing_whatever_it_holds() -> None:
    out, nans = torch.full((1, 1, 16), 2.0), torch.full((1, 1, 16), NAN)
    high, low = torch.full((1, 1), INF), torch.zeros(1, 1)
    for merged, lse in (
        paged_ops.merge_states(out, high, nans, low),
        paged_ops.merge_states(nans, low, out, high),
        reference.merge_states(nans, low, out, high),
    ):
        assert torch.equal(merged, out)
        assert lse.item() == INF


def test_a_call_with_an_infinite_sink_merges_like_one_call() -> None:
    case = place(make_sequences([5], [2]), Placement())
    with_sink = paged_ops.attention_with_lse(*case.tensors, sinks=torch.tensor([INF, 0.0]))
    merged, lse = paged_ops.merge_states(*with_sink, *case.run())
    assert (merged[:, 0] == 0).all()
    assert (lse[:, 0] == INF).all()


@pytest.mark.parametrize("isa", paged_ops.backend_info().cpu_isas)
def test_every_variant_agrees(isa: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "not variant", __file__],
        cwd=ROOT,
        env={**os.environ, "PAGED_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
