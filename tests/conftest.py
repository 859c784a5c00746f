"""Hypothesis profiles and fixtures for all tests.

``HYPOTHESIS_PROFILE=nightly`` runs 10,000 random examples of each property, different ones each
time. The default, ``ci``, runs fewer and always the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile(
    "ci",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "nightly",
    max_examples=10_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _torch_state_is_restored() -> Iterator[None]:
    """Give every test the same seed, and undo its changes to the number of threads."""
    num_threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)
