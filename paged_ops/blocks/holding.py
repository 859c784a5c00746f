"""What one request holds, what one that is to come brings along, and what copies hold meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from paged_ops.blocks.digest import PlacedKey

NO_BLOCK = -1
"""Stands in a table where there is no block: no block has this id, so it can't name a live one."""


@dataclass(slots=True, eq=False)
class Holding:
    """What one request holds.

    Invariants: len(table) == ceil(num_tokens / block_size); the first `num_released` entries of
    the table, and no others, are NO_BLOCK; `tokens` are the ids of the first tokens, all of them
    where a prefix cache could use them; `digests` belong to the first full blocks of `tokens`.
    """

    table: list[int]
    num_tokens: int
    tokens: array[int] = field(default_factory=lambda: array("q"))
    keys: tuple[PlacedKey, ...] = ()
    digests: list[bytes] = field(default_factory=list)
    num_committed: int = 0  # blocks, from the first on, that commit has dealt with
    num_released: int = 0  # blocks, from the first on, that no later query can see
    generation: int = 0  # of the model's weights that the first token was computed with
    version: int = 0  # changes when the table does
    rewrites: int = 0  # changes when an entry of the table does; not when entries are added

    def fork(self) -> Holding:
        """Return a copy that shares nothing with this one but the blocks."""
        return Holding(
            self.table.copy(),
            self.num_tokens,
            self.tokens[:],
            self.keys,
            self.digests.copy(),
            self.num_committed,
            self.num_released,
            self.generation,
        )

    @property
    def blocks(self) -> list[int]:
        """The blocks that are held."""
        return self.table[self.num_released :]

    # What takes a change back: each says what was, so it does no harm twice, or for no change.

    def shrink(
        self, num_tokens: int, full: int, num_ids: int, entries: int, last: list[int]
    ) -> None:
        """Take a growth back: what the last entry was, if there was one, and how many of each."""
        self.table[entries - len(last) :] = last
        del self.tokens[num_ids:], self.digests[full:]
        self.num_tokens = num_tokens
        self.num_committed = min(self.num_committed, full)
        self.rewrite()

    def regrow(
        self,
        num_tokens: int,
        num_committed: int,
        blocks: tuple[int, list[int]],
        ids: tuple[int, array[int]],
        digests: tuple[int, list[bytes]],
    ) -> None:
        """Take a cut back: where each list was cut, and what followed there."""
        self.table[blocks[0] :] = blocks[1]
        self.tokens[ids[0] :] = ids[1]
        self.digests[digests[0] :] = digests[1]
        self.num_tokens, self.num_committed = num_tokens, num_committed
        self.rewrite()

    def reclaim(self, start: int, blocks: list[int]) -> None:
        """Take the release of blocks back that were entries of the table from `start` on."""
        self.table[start : start + len(blocks)] = blocks
        self.num_released = start
        self.rewrite()

    def rewrite(self) -> None:
        """Let it be known that entries of the table have changed."""
        self.version += 1
        self.rewrites += 1


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens of a request to be, with the digests of its full blocks if they are known."""

    num_tokens: int
    tokens: array[int] | None
    keys: tuple[PlacedKey, ...]
    digests: list[bytes]


@dataclass(frozen=True, eq=False)
class Flight:
    """What copies in flight hold, besides the requests themselves.

    Attributes
    ----------
    held : list of Holding
        The blocks that are read or written, whatever becomes of the requests.
    arriving : dict of Hashable to Holding
        Requests that are here when the copies are made.
    """

    held: list[Holding]
    arriving: dict[Hashable, Holding]

    def under_way(self, arriving: Mapping[Hashable, Holding]) -> list[tuple[Hashable, Holding]]:
        """Return what is still arriving: neither freed nor made anew since the flight began."""
        return [each for each in self.arriving.items() if arriving.get(each[0]) is each[1]]
