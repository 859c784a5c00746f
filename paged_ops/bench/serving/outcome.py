"""What came of serving a queue in one way."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Times and numbers of one run; every request waits from the start.

    Attributes
    ----------
    num_slots : int
        Token slots of the memory that the cache may take.
    tokens : int
        Tokens of all answers.
    seconds : float
        From the start to the last token.
    first_token_seconds : list of float
        For each request, from the start to its first token.
    most_running : int
        Requests that ran at once, at most.
    live : list of int
        For each step the slots that held a token of an unfinished request.
    """

    num_slots: int
    tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    most_running: int = 0
    live: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second."""
        return self.tokens / self.seconds

    @property
    def utilisation(self) -> float:
        """Share of the memory that held a token of an unfinished request, mean of all steps."""
        return statistics.fmean(self.live) / self.num_slots

    @property
    def median_first_token(self) -> float:
        """Median of the seconds to the first token."""
        return statistics.median(self.first_token_seconds)
