"""The guards that manager_mutations takes out are there."""

from __future__ import annotations

from tests.blocks.manager_mutations import BROKEN_OFF, FAULTS, ROOT
from tests.support.mutants import problems


def test_every_guard_of_the_books_stands_exactly_once() -> None:
    assert not problems((*FAULTS, *BROKEN_OFF), ROOT / "paged_ops")
