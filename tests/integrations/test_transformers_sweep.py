"""Every causal model type that transformers has gives the right tokens, or is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.causal_models import TYPES
from tests.integrations.sweep import outcome, table

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.fixture(autouse=True, scope="module")
def _quiet_on_one_thread() -> Iterator[None]:
    num_threads, logger = torch.get_num_threads(), logging.getLogger("transformers")
    level = logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    yield
    torch.set_num_threads(num_threads)
    logger.setLevel(level)


@pytest.mark.parametrize("kind", TYPES)
def test_a_model_type_gives_the_right_tokens_or_is_refused_by_name(kind: str) -> None:
    if outcome(kind) is None:
        pytest.skip("transformers makes no such tiny model")


def test_the_documentation_prints_what_came_of_every_type() -> None:
    """``python -m tests.integrations.sweep`` prints it."""
    assert table() in PAGE.read_text()
