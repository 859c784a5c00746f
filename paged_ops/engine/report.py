"""What a step did, and who owned which block in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Who owns which block at one moment.

    Attributes
    ----------
    step : int
        The step it was taken in; 0 before the first.
    owners : list of int
        For each block the index of the request that holds it, or -1.
    filled : list of int
        For each block how many of its slots hold a token.
    block_size : int
        Slots per block.
    """

    step: int
    owners: list[int]
    filled: list[int]
    block_size: int

    @property
    def used(self) -> int:
        """Blocks that a request holds."""
        return sum(owner >= 0 for owner in self.owners)

    @property
    def live_tokens(self) -> int:
        """Slots that hold a token."""
        return sum(self.filled)

    @property
    def waste(self) -> int:
        """Slots of owned blocks that hold no token: the ends of the requests' last blocks."""
        return self.used * self.block_size - self.live_tokens

    @property
    def utilisation(self) -> float:
        """Share of all slots that hold a token, 0 to 1."""
        return self.live_tokens / (len(self.owners) * self.block_size)


@dataclass(frozen=True)
class StepReport:
    """What one step did; requests are named by their index.

    ``occupancy`` shows the pool as the step's forward pass saw it, before ``finished`` and
    ``failed`` left. A step that was broken off and repeated is reported once, as one.
    """

    step: int
    tokens: dict[int, int]
    joined: list[int]
    preempted: list[int]
    finished: list[int]
    failed: list[int]
    num_computed: int
    occupancy: Occupancy
