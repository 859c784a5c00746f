"""The blocks of a pool: how many tables hold each, and which are free.

A block whose count has gone back to zero is free: it lies on the stack of free ids or, if its
content can still be found, among the idle blocks of the prefix cache. Blocks that were never handed
out are free too, but neither counted nor listed, so a pool costs as much as the part of it that was
ever in use. Only `take`, `share` and `release` make blocks owned and free.

Nothing here is worth keeping when a change is broken off: all of it follows from who holds what,
see `rebuild`, but for what can be found. That may be forgotten by a change that is taken back, and
is never wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paged_ops.blocks.prefix_cache import PrefixCache


class Stock:
    """The blocks of a pool.

    Attributes
    ----------
    num_blocks : int
        How many there are.
    counts : list of int
        How many tables hold each of the blocks that were handed out so far, which are the first.
    free : list of int
        Those of them that came back and can't be found; the last one goes out next.
    prefix : PrefixCache
        Those that can be found.
    evictions : int
        How many of these were given up so far.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counts: list[int] = []
        self.free: list[int] = []
        self.prefix = PrefixCache()
        self.evictions = 0

    @property
    def num_used(self) -> int:
        """Distinct blocks that are held."""
        return len(self.counts) - len(self.free) - self.prefix.num_idle

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the cached ones included."""
        return self.num_blocks - self.num_used

    def take(self, blocks: int) -> list[int]:
        """Take free blocks, each with one owner from now on; evict cached ones only at need."""
        reused = len(self.free) - min(blocks, len(self.free))
        taken = self.free[reused:]
        taken.reverse()
        del self.free[reused:]
        start = len(self.counts)
        fresh = min(blocks - len(taken), self.num_blocks - start)
        evicted = [self.prefix.evict() for _ in range(blocks - len(taken) - fresh)]
        self.evictions += len(evicted)
        taken += evicted
        for block in taken:
            self.counts[block] = 1
        taken += range(start, start + fresh)
        self.counts += [1] * fresh
        return taken

    def share(self, blocks: list[int]) -> None:
        """Give each block one owner more."""
        for block in blocks:
            if not self.counts[block]:
                self.prefix.revive(block)
            self.counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Take one owner off each block; the last owner's leaving makes the block free."""
        counts, left = self.counts, []
        for block in reversed(blocks):
            count = counts[block] - 1
            counts[block] = count
            if not count:
                left.append(block)
        self.free += self.prefix.retire(left)

    def publish(self, contents: Iterable[tuple[bytes, int]]) -> None:
        """Let held blocks be found; idle ones with their contents become plain free."""
        self.free += self.prefix.publish(contents)

    def forget(self) -> None:
        """Make everything unfindable. Of the free blocks, those that could be found go out last."""
        self.free[:0] = reversed(self.prefix.clear())

    def rebuild(self, owners: Counter[int]) -> None:
        """Make counts and lists anew from who holds what, after a change that was broken off.

        Parameters
        ----------
        owners : Counter of int
            How many tables hold a block.
        """
        num_handed_out = max(len(self.counts), max(owners, default=-1) + 1)
        self.counts = [owners[block] for block in range(num_handed_out)]
        self.prefix.rebuild(self.counts)
        handed_out = dict.fromkeys([*self.free, *range(len(self.counts) - 1, -1, -1)])
        self.free = [
            block
            for block in handed_out
            if not self.counts[block] and self.prefix.digest(block) is None
        ]
