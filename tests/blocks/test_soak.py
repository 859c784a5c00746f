"""The soak of the books, for a moment; ``make nightly`` runs it for long."""

from __future__ import annotations

import pytest

from tests.blocks.soak import soak


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_in_histories_whose_calls_are_broken_off(seed: int) -> None:
    outcomes = soak(4000, seed, broken_off=0.3)
    assert outcomes["broken off, not done"] > 300
    assert outcomes["broken off, done"]
