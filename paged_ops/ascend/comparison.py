"""What is wrong with a result: where, how much, and what makes such a difference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops.ascend.finding import Finding

CLOSE = 8
"""So many times its bound is still a matter of rounding, not of wrong elements."""


def compare(got: Tensor, want: Tensor, before: Tensor, bound: float) -> Finding:
    """Compare what a kernel left in a tensor with what belongs there.

    Parameters
    ----------
    got, want, before
        What is there, should be there, and was there before the launch: one shape, rows first.
        NaN in `before` stands for what no kernel writes.
    bound
        The largest difference that is right, relative to the largest element of `want`; 0: none.

    Returns
    -------
    Finding
        Passed, or wrong with an explanation.
    """
    shape = want.shape
    got, want, before = (tensor.double().reshape(shape[0], -1) for tensor in (got, want, before))
    scale = float(want.abs().nan_to_num().max()) or 1.0
    difference = (got - want).abs() / scale
    wrong = ~(difference <= bound) & (got != want)
    unchanged = (got == before) | (got.isnan() & before.isnan())
    due = (want != before) & ~(want.isnan() & before.isnan())
    numbers = difference[~difference.isnan()]
    largest = float(numbers.max()) if numbers.numel() else float("nan")
    said = f"largest difference {largest:.1e} of the largest element, at most {bound:.1e} expected"
    if not bool(wrong.any()):
        return Finding("passed", said)
    rows = wrong.any(1).nonzero().flatten().tolist()
    said = (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, in rows {_ranges(rows)} of "
        f"{shape[0]}; {said}"
    )
    where = _Where(wrong, untouched=wrong & unchanged, stray=wrong.any(1) & ~due.any(1), due=due)
    return Finding("wrong", said, _explain(got, where, largest, bound))


class _Where(NamedTuple):
    """What is wrong; of that, what is as before, and rows that had to stay so; what was due."""

    wrong: Tensor
    untouched: Tensor
    stray: Tensor
    due: Tensor


def _explain(got: Tensor, where: _Where, largest: float, bound: float) -> str:
    """Say what makes such a difference."""
    wrong, untouched, stray, due = where
    if torch.equal(untouched, wrong):
        if torch.equal(untouched, due):
            return (
                "The launch ended without an error and nothing was written where the result "
                "belongs: the kernel didn't run, or wrote somewhere else."
            )
        rows = wrong.any(1).nonzero().flatten().tolist()
        return (
            f"Rows {_ranges(rows)} were never written, the others are right: the cores whose turn "
            "they were didn't run, or stopped. See how many cores wrote back their arguments."
        )
    if bool(stray.any()):
        rows = stray.nonzero().flatten().tolist()
        return (
            f"Rows {_ranges(rows)} were changed, which the kernel shouldn't touch: an address or a "
            "stride is off."
        )
    if bool(got[wrong].isnan().any()):
        return (
            "There is NaN where numbers belong: memory was read before it was written, so a flag "
            "between two pipes or cores is missing, or an instruction's mask or stride is another "
            "than the simulated device takes it to be."
        )
    if bound > 0 and largest <= CLOSE * bound:
        return (
            "All is in its place and nearly right: Exp, Ln and Div of this chip round in their own "
            "way, and the bound may be too tight for them."
        )
    return (
        "Everything was written, with wrong values: an instruction computes something else than "
        "the simulated device does, or reads data that isn't there yet."
    )


def _ranges(rows: list[int]) -> str:
    """Write numbers in order as ranges: 0 to 3, 7."""
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row for row in rows if row + 1 not in rows]
    parts = [
        f"{start}" if start == end else f"{start} to {end}"
        for start, end in zip(starts, ends, strict=True)
    ]
    return ", ".join(parts[:6]) + (", ..." if len(parts) > 6 else "")
