"""What a step found out."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The outcome of a step.

    Attributes
    ----------
    outcome : str
        "passed"; "wrong" if the values are; "error" if a call failed; "hung" if the time ran out;
        "died" if the process did; "not run".
    said : str
        What was measured, or the error's own text.
    explanation : str
        What it means and where to look; empty for a step that passed.
    """

    outcome: str
    said: str
    explanation: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is nothing to explain."""
        return self.outcome == "passed"
