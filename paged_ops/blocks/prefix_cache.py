"""Which blocks can be found by their content, and which of them to give up first.

A published block is listed under the digest of its content. While requests hold it, it only can be
found; when the last one leaves it becomes idle: it counts as free, keeps its content, and waits at
the end of a queue, from whose front blocks are evicted. Requests leave their last block first, so
the end of a chain is always nearer to the front than what it depends on.

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
        self._blocks: dict[bytes, int] = {}  # digest -> block
        self._digests: dict[int, bytes] = {}  # block -> digest: the same pairs
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
        """List every published block as an event."""
        return (Stored(digest, block) for digest, block in self._blocks.items())

    def publish(self, digest: bytes, block: int) -> None:
        """List a block that a request holds. Of blocks with one content the first stays listed."""
        if digest not in self._blocks and block not in self._digests:
            self._blocks[digest] = block
            self._digests[block] = digest
            if self._streams:
                self._tell(Stored(digest, block))

    def unpublish(self, block: int) -> None:
        """Forget the content of a block that is about to change. It must not be idle."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]
            if self._streams:
                self._tell(Removed(digest, block))

    def retire(self, block: int) -> bool:
        """Make a block idle that its last request has left; say whether it is a published one."""
        if block not in self._digests:
            return False
        self._idle[block] = None
        return True

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
        self._idle.clear()
        self._blocks.clear()
        self._digests.clear()
        self._tell(Cleared())
        return idle

    def follow(self, stream: EventStream) -> None:
        """Tell a stream of everything from now on, as long as it lives."""
        self._streams.append(weakref.ref(stream))

    def _tell(self, event: Event) -> None:
        """Tell the streams that still live, and forget the others."""
        streams = [stream for ref in self._streams if (stream := ref()) is not None]
        if len(streams) < len(self._streams):
            self._streams = [weakref.ref(stream) for stream in streams]
        for stream in streams:
            stream.put(event)

    def rebuild(self, counts: Sequence[int]) -> None:
        """Mend all lists after a change that was broken off.

        A content that is not listed from both sides is forgotten; the blocks without owner are
        idle. Who follows starts over.
        """
        pairs = {b: digest for digest, b in self._blocks.items() if self._digests.get(b) == digest}
        idle = [block for block in (*self._idle, *pairs) if block in pairs and not counts[block]]
        self._digests, self._blocks = pairs, {digest: block for block, digest in pairs.items()}
        self._idle = OrderedDict.fromkeys(idle)
        for ref in self._streams:
            if (stream := ref()) is not None:
                stream.start_over()

    def check(self) -> None:
        """Prove that digests and blocks are listed in pairs, and that idle blocks have digests.

        Raises
        ------
        AssertionError
            They are not.
        """
        if {block: digest for digest, block in self._blocks.items()} != self._digests:
            raise AssertionError("the digests of the blocks and the blocks of the digests differ")
        if not self._idle.keys() <= self._digests.keys():
            raise AssertionError("a cached block has no digest")
