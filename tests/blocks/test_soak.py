"""The soak of the books, for a moment; ``make nightly`` runs it for long."""

from __future__ import annotations

from collections import Counter

from tests.blocks.soak import soak


def test_nothing_is_lost_in_histories_whose_calls_are_broken_off() -> None:
    # A call is seldom broken off when all of it is done: one history may have no such case.
    outcomes: Counter[str] = Counter()
    for seed in range(4):
        outcomes.update(soak(4000, seed, broken_off=0.3))
    assert outcomes["broken off, not done"] > 1200
    assert outcomes["broken off, done"]
