"""Which blocks can be found by their content, and which of them to give up first.

A published block is listed under the digest of its content. While requests hold it, it only can be
found; when the last one leaves it becomes idle: it counts as free, keeps its content, and waits at
the end of a queue, from whose front blocks are evicted. Requests leave their last block first, so
the end of a chain is always nearer to the front than what it depends on.

Requests that compute one content at once publish it twice. All of these twins are listed, and one
of them is found; when that one goes, the next takes its place. No table ever changes for it, so
whatever was built from a table stays right. A block that nobody holds is worth nothing beside a
twin, so idle blocks have none.

`Stock` owns the one instance. Every method that concerns one block is O(1).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from paged_ops.blocks.events import Cleared, Event, EventStream, Removed, Stored


class PrefixCache:
    """The published blocks of a pool."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}  # what is listed: block -> digest
        self._blocks: dict[bytes, int] = {}  # digest -> the block that is found
        self._twins: dict[bytes, dict[int, None]] = {}  # digest -> the others, where there are any
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is evicted next
        self._streams: list[weakref.ref[EventStream]] = []

    @property
    def num_idle(self) -> int:
        """Blocks that can be found and that no request holds."""
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        """Return the block with this content. Nothing changes."""
        return self._blocks.get(digest)

    def blocks(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks with these contents, all of which are published."""
        return [self._blocks[digest] for digest in digests]

    def digest(self, block: int) -> bytes | None:
        """Return the digest that a block is listed under."""
        return self._digests.get(block)

    def idle_blocks(self) -> Iterator[int]:
        """List the idle blocks, the next to be evicted first."""
        return iter(self._idle)

    def stored(self) -> Iterator[Stored]:
        """List every content that is found as an event."""
        return (Stored(digest, block) for digest, block in self._blocks.items())

    def publish(self, contents: Iterable[tuple[bytes, int]]) -> list[int]:
        """List blocks that a request holds; return the idle blocks that it makes worthless."""
        blocks, digests, worthless = self._blocks, self._digests, []
        list_block, followed = blocks.setdefault, bool(self._streams)
        for digest, block in contents:
            if block in digests:
                continue
            found = list_block(digest, block)
            if found != block:
                worthless += self._publish_twin(digest, block, found)
                continue
            digests[block] = digest
            if followed:
                self._tell(Stored(digest, block))
        return worthless

    def _publish_twin(self, digest: bytes, block: int, found: int) -> list[int]:
        """List a block beside the one that is found, or in its place if that is idle."""
        self._twins.setdefault(digest, {})[block] = None
        self._digests[block] = digest
        if found not in self._idle:
            return []
        del self._idle[found]
        self.unpublish(found)
        return [found]

    def unpublish(self, block: int) -> None:
        """Forget the content of a block that is about to change. It must not be idle."""
        digest = self._digests.pop(block, None)
        if digest is None:
            return
        twins = self._twins.get(digest, {})
        if self._blocks[digest] != block:
            del twins[block]
        else:
            del self._blocks[digest]
            self._tell(Removed(digest, block))
            if twins:
                heir = next(iter(twins))
                del twins[heir]
                self._blocks[digest] = heir
                self._tell(Stored(digest, heir))
        if not twins:
            self._twins.pop(digest, None)

    def retire(self, blocks: Iterable[int]) -> list[int]:
        """Make blocks idle that their last request has left; return those not worth keeping."""
        digests, twins, idle, worthless = self._digests, self._twins, self._idle, []
        for block in blocks:
            if block not in digests:
                worthless.append(block)
            elif twins and digests[block] in twins:  # digests lie far apart: seldom fetch one
                self.unpublish(block)
                worthless.append(block)
            else:
                idle[block] = None
        return worthless

    def revive(self, block: int) -> None:
        """Take an idle block out of the queue for a request that found it."""
        del self._idle[block]

    def evict(self) -> int:
        """Give up the block that has been idle longest."""
        block, _ = self._idle.popitem(last=False)
        self.unpublish(block)
        return block

    def clear(self) -> list[int]:
        """Forget every content and return the blocks that were idle, the longest idle first."""
        idle = list(self._idle)
        self._digests.clear()
        self._idle.clear()
        self._blocks.clear()
        self._twins.clear()
        self._tell(Cleared())
        return idle

    def follow(self, stream: EventStream) -> None:
        """Tell a stream of everything from now on, as long as it lives."""
        self._streams.append(weakref.ref(stream))

    def _tell(self, event: Event) -> None:
        """Tell the streams that still live, and forget the others."""
        if not self._streams:
            return
        streams = [stream for ref in self._streams if (stream := ref()) is not None]
        if len(streams) < len(self._streams):
            self._streams = [weakref.ref(stream) for stream in streams]
        for stream in streams:
            stream.put(event)

    def rebuild(self, counts: Sequence[int]) -> None:
        """Mend all lists after a change that was broken off.

        What is listed counts: a block is struck off before anything else, and entered after it. The
        blocks without owner are idle. Who follows starts over.
        """
        idle = [block for block in (*self._idle, *self._digests) if block in self._digests]
        idle = [block for block in dict.fromkeys(idle) if not counts[block]]
        blocks: dict[bytes, int] = {}
        twins: dict[bytes, dict[int, None]] = {}
        held = [block for block in self._digests if counts[block]]
        for block in (*held, *idle):  # an idle block is listed if there is no other
            found = blocks.setdefault(self._digests[block], block)
            if found != block and counts[block]:
                twins.setdefault(self._digests[block], {})[block] = None
        listed = {*blocks.values(), *(block for others in twins.values() for block in others)}
        self._digests = {b: digest for b, digest in self._digests.items() if b in listed}
        self._blocks, self._twins = blocks, twins
        self._idle = OrderedDict((block, None) for block in idle if block in listed)
        for ref in self._streams:
            if (stream := ref()) is not None:
                stream.start_over()

    def check(self) -> None:
        """Prove that blocks and digests are listed from both sides, and that idle blocks have one.

        Raises
        ------
        AssertionError
            They are not.
        """
        listed = {block: digest for digest, block in self._blocks.items()}
        for digest, twins in self._twins.items():
            if digest not in self._blocks or not twins:
                raise AssertionError("a content has twins, but no block is found by it")
            listed |= dict.fromkeys(twins, digest)
        num_listed = len(self._blocks) + sum(map(len, self._twins.values()))
        if listed != self._digests or num_listed != len(self._digests):
            raise AssertionError("the digests of the blocks and the blocks of the digests differ")
        if not self._idle.keys() <= self._digests.keys():
            raise AssertionError("a cached block has no digest")
        if any(self._digests[block] in self._twins for block in self._idle):
            raise AssertionError("a cached block has a twin, so it is worth nothing")
