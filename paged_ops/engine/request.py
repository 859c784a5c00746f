"""A request: one prompt, and what has come of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

StopRule = Callable[[Sequence[int]], bool]
"""Told the tokens generated so far, the newest included, says whether the request is finished.

It may be asked twice about the same tokens, if a step is broken off and repeated.
"""


def never(generated: Sequence[int]) -> bool:
    """Stop rule of requests that run until ``max_new_tokens``."""
    return False


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(eq=False)
class Request:
    """One prompt and what has come of it.

    Attributes
    ----------
    index : int
        0 for the first request submitted; older requests keep their blocks when the pool is full.
    prompt : list of int
        The prompt's token ids, at least one.
    max_new_tokens : int
        Tokens to generate at most.
    stop : callable
        See :data:`StopRule`.
    generated : list of int
        Token ids generated so far. A preempted request keeps them: only their keys and values are
        computed anew.
    preemptions : int
        How often the request lost its blocks.
    num_cached : int
        How many of its tokens were in the cache when it joined, for the last time.
    num_computed : int
        How many of its tokens, from the first on, have their keys and values in its blocks.
    error : Exception, optional
        Why it failed.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    stop: StopRule = never
    generated: list[int] = field(default_factory=list)
    state: State = State.WAITING
    preemptions: int = 0
    num_cached: int = 0
    num_computed: int = 0
    error: Exception | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt and everything generated."""
        return self.prompt + self.generated

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in (State.FINISHED, State.CANCELLED, State.FAILED)
