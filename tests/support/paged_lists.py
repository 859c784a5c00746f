"""A slow twin of BlockManager: requests as plain lists of tokens, and what lies in every slot.

The twin keeps each request twice: as a list, and in the slots of a pool as the manager's tables and
copies say. What is written to a slot is the whole text up to its token, because keys and values
depend on all of it. The two must read the same after every call, so a block that is found by a
wrong prompt, evicted too early or handed out twice shows as a wrong text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from paged_ops.blocks.digest import chain_digests
from paged_ops.blocks.errors import InFlight, OutOfBlocks, UnknownRequest
from paged_ops.blocks.events import Cleared, Stored
from paged_ops.blocks.holding import NO_BLOCK
from paged_ops.blocks.manager import BlockManager

Call = tuple[Any, ...]  # the name of a method of BlockManager, then its arguments
Text = tuple[Any, ...]  # the extra keys, then the tokens up to and with one

REFUSALS = (InFlight, OutOfBlocks, UnknownRequest, ValueError)


class Listed:
    """One request: its tokens, and what the manager must remember of it."""

    def __init__(self, keys: Sequence[tuple[str, object]] = ()) -> None:
        self.keys = tuple(keys)
        self.tokens: list[int] = []
        self.known = 0  # tokens, from the first on, whose ids were given
        self.committed = 0  # tokens that commit has dealt with
        self.released = 0  # blocks that the window has left
        self.stale = False  # began before the last flush

    def text(self, length: int) -> Text:
        return (self.keys, *self.tokens[:length])

    def fork(self) -> Listed:
        child = Listed(self.keys)
        child.__dict__.update(self.__dict__, tokens=self.tokens.copy())
        return child


class PagedLists:
    """The twin, beside a manager and the pool that it keeps the books of."""

    def __init__(self, num_blocks: int, block_size: int, **options: Any) -> None:
        self.manager = BlockManager(num_blocks, block_size, **options)
        self.window: int | None = options.get("sliding_window")
        self.caching: bool = options.get("prefix_caching", True)
        self.watermark = int(options.get("watermark", 0.0) * num_blocks)
        self.requests: dict[str, Listed] = {}
        self.slots: dict[tuple[int, int], Text] = {}
        self.found: dict[Text, int] = {}  # text up to the end of a block -> the block
        self.twins: dict[Text, list[int]] = {}  # others with the same text, in their order
        self.idle: list[int] = []  # published blocks that nobody holds, longest idle first
        # What else holds blocks of the pool: requests that arrive, and copies in flight.
        self.extra: dict[Any, tuple[Listed, list[int]]] = {}
        self.stream = self.manager.subscribe(max_events=20)
        self.router: dict[bytes, int] = {}  # what a follower of the events takes to be findable
        self._before: dict[str, list[int]] = {}
        self._unknown = itertools.count(-1, -1)  # ids of tokens that are only counted

    # ------------------------------------------------------------------ calls

    def call(self, call: Call) -> bool:
        """Make a call, which must fail if the lists say so, without a trace; say if it did not."""
        expected, failure = self.expected_error(call), None
        before = self.books()
        try:
            self.make(call)
        except REFUSALS as error:
            failure = type(error)
        assert failure is expected, (call, failure, expected)
        if failure:
            assert self.books() == before
        return failure is None

    def make(self, call: Call) -> None:
        """Make a call, and do to the lists and to the slots what it means."""
        self._before = self.tables()
        hit = self.expected_hit(*call[2:]) if call[0] == "allocate" else 0
        result = getattr(self.manager, call[0])(*call[1:])
        if call[0] == "allocate":
            assert result == hit * self.manager.block_size
        getattr(self, "after_" + call[0])(*call[1:], result)

    def books(self) -> Any:
        lengths = {name: self.manager.num_tokens(name) for name in self.requests}
        return self.tables(), lengths, self.manager.stats()

    def expected_error(self, call: Call) -> type[Exception] | None:
        """Foretell the error from the lists and from who holds which block."""
        name, request, argument = (*call, None, None)[:3]
        if name == "flush":
            return None
        arriving = self.arriving()
        if request in arriving:
            allowed = {"allocate": ValueError, "free": None, "preempt": None}
            return allowed.get(name, InFlight)
        if (request in self.requests) == (name == "allocate"):
            return ValueError if name == "allocate" else UnknownRequest
        if name == "fork" and (argument in self.requests or argument in arriving):
            return ValueError
        if name == "truncate":
            length = len(self.requests[request].tokens)
            if not self._least_kept(request) <= argument <= length:
                return ValueError
        if name == "commit" and argument > len(self.requests[request].tokens):
            return ValueError
        if name == "allocate" and self._refused(*self._admission(*call[2:])):
            return OutOfBlocks
        if name == "append" and self._refused(self._blocks_to_append(request, _count(argument))):
            return OutOfBlocks
        return None

    def after_allocate(self, request: str, tokens: Any, *rest: Any) -> None:
        keys = rest[0] if len(rest) > 1 else ()
        listed = self.requests[request] = Listed(keys)
        hit_tokens = rest[-1]
        table, size = self.manager.block_table(request), self.manager.block_size
        listed.released = self._first_seen(hit_tokens)
        hits = table[listed.released : hit_tokens // size]
        self.idle = [block for block in self.idle if block not in hits]
        self._evict(len(table) - hit_tokens // size, hits)
        self._extend(listed, tokens)
        listed.committed = hit_tokens
        self._write(request, hit_tokens)

    def after_append(self, request: str, tokens: Any, copies: list[tuple[int, int]]) -> None:
        listed, size = self.requests[request], self.manager.block_size
        start, before = len(listed.tokens), self._before[request]
        table = self.manager.block_table(request)
        held = self._held()
        for source, destination in copies:
            assert {source, destination} <= held
            for offset in range(size):
                text = self.slots.get((source, offset))
                self.slots[destination, offset] = text if text else ("nothing",)
        self._evict(len(set(table) - set(before)))
        if _count(tokens) and start % size and not copies:
            self._unpublish(table[start // size])
        self._extend(listed, tokens)
        self._write(request, start)

    def after_commit(self, request: str, written: int, _: None) -> None:
        listed, size = self.requests[request], self.manager.block_size
        table = self._before[request]
        full = min(written, listed.known) // size if self.caching and not listed.stale else 0
        for block in range(max(listed.committed // size, listed.released), full):
            self._publish(listed.text((block + 1) * size), table[block])
        listed.committed = max(listed.committed, full * size)
        released = max(listed.released, self._first_seen(written))
        self._leave(table[listed.released : released])
        listed.released = released

    def after_fork(self, parent: str, child: str, _: None) -> None:
        self.requests[child] = self.requests[parent].fork()

    def after_truncate(self, request: str, keep: int, _: None) -> None:
        listed, size = self.requests[request], self.manager.block_size
        table = self._before[request]
        for block in table[max(listed.released, keep // size) :]:
            others = [t for name, t in self._before.items() if name != request]
            if not any(block in other for other in others):
                self._unpublish(block)
        self._leave(table[max(listed.released, -(-keep // size)) :])
        del listed.tokens[keep:]
        listed.known = min(listed.known, keep)
        listed.committed = min(listed.committed, keep // size * size)

    def after_free(self, request: str, _: None) -> None:
        if request in self.requests:
            listed, table = self.requests.pop(request), self._before[request]
        else:
            listed, table = self.extra.pop(("arriving", request))
        self._leave(table[listed.released :])

    after_preempt = after_free

    def after_flush(self, live_blocks: int) -> None:
        assert live_blocks == len(self._held())
        self.found.clear()
        self.twins.clear()
        self.idle.clear()
        for listed in self.everywhere():
            listed.stale = True

    # ------------------------------------------------------------------ comparing

    def verify(self) -> None:
        """Read every request back from the pool, and compare all counts with the lists."""
        self.manager.check()
        size, live = self.manager.block_size, set()
        for request, listed in self.requests.items():
            table = self.manager.block_table(request)
            assert len(table) == -(-len(listed.tokens) // size)
            assert [block == NO_BLOCK for block in table] == [
                index < listed.released for index in range(len(table))
            ]
            for position in range(listed.released * size, len(listed.tokens)):
                slot = table[position // size], position % size
                assert self.slots[slot] == listed.text(position + 1), (request, position)
                live.add(slot)
        for listed, table in self.extra.values():
            positions = range(listed.released * size, len(listed.tokens))
            live.update((table[position // size], position % size) for position in positions)
        for text, found in self.found.items():
            for block in (found, *self.twins.get(text, [])):
                assert self.slots[block, size - 1] == text
        listed = [*self.found.values(), *itertools.chain(*self.twins.values())]
        assert sorted(listed) == sorted(self.manager.ledger.stock.prefix._digests)
        self._follow_events()
        assert sorted(self.router.values()) == sorted(self.found.values())
        self._verify_counts(len(live))

    def _follow_events(self) -> None:
        for event in self.stream.read():
            if isinstance(event, Cleared):
                self.router.clear()
            elif isinstance(event, Stored):
                assert self.router.setdefault(event.digest, event.block) == event.block
            else:
                assert self.router.pop(event.digest) == event.block

    def _verify_counts(self, live_tokens: int) -> None:
        manager, stats = self.manager, self.manager.stats()
        free = manager.num_blocks - len(self._held())
        assert manager.num_free == stats.num_free == free
        assert manager.num_used == stats.num_used == manager.num_blocks - free
        assert manager.num_cached == stats.num_cached == len(self.idle)
        requests = [*self.requests.values(), *(r for r, _ in self.arriving().values())]
        assert stats.num_requests == len(requests)
        assert stats.request_tokens == sum(len(request.tokens) for request in requests)
        assert stats.live_tokens == live_tokens
        room = max(0, free - self._reserved()) * manager.block_size
        assert manager.can_allocate(room)
        assert not manager.can_allocate(room + 1)

    def expected_hit(self, tokens: Any, keys: Sequence[tuple[str, object]] = ()) -> int:
        """Foretell how many blocks of a prompt are found."""
        if isinstance(tokens, int) or not self.caching:
            return 0
        size = self.manager.block_size
        for hit in range(max(0, len(tokens) - 1) // size, 0, -1):
            needed = range(min(self._first_seen(hit * size), hit - 1), hit)
            texts = [(tuple(keys), *tokens[: (block + 1) * size]) for block in needed]
            if all(text in self.found for text in texts):
                return hit
        return 0

    def read_what_is_listed(self) -> None:
        """Take over what the manager lists, which must be what lies in its blocks."""
        size, prefix = self.manager.block_size, self.manager.ledger.stock.prefix
        self.found = {self.slots[e.block, size - 1]: e.block for e in prefix.stored()}
        self.idle, self.twins = list(prefix.idle_blocks()), {}
        for block, digest in prefix._digests.items():
            keys, *tokens = text = self.slots[block, size - 1]
            assert chain_digests(tokens, size, keys)[-1] == digest
            if self.found[text] != block:
                self.twins.setdefault(text, []).append(block)

    def tables(self) -> dict[str, list[int]]:
        tables = {request: self.manager.block_table(request) for request in self.requests}
        return tables | {name: table for name, (_, table) in self.extra.items()}

    def arriving(self) -> dict[str, tuple[Listed, list[int]]]:
        """Return the requests that wait for a copy into the pool."""
        return {name[1]: held for name, held in self.extra.items() if name[0] == "arriving"}

    def everywhere(self) -> list[Listed]:
        """Return all requests, wherever they are."""
        return [*self.requests.values(), *(listed for listed, _ in self.extra.values())]

    # ------------------------------------------------------------------ inside

    def _held(self) -> set[int]:
        return {block for table in self.tables().values() for block in table} - {NO_BLOCK}

    def _first_seen(self, position: int) -> int:
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.manager.block_size

    def _least_kept(self, request: str) -> int:
        lengths = range(len(self.requests[request].tokens) + 1)
        return next(n for n in lengths if self._first_seen(n) >= self.requests[request].released)

    def _reserved(self) -> int:
        return self.watermark if self._held() else 0

    def _admission(self, tokens: Any, keys: Any = ()) -> tuple[int, int]:
        """Return the blocks that a new request takes, and those that it may not take."""
        size, hit = self.manager.block_size, self.expected_hit(tokens, keys)
        texts = [
            (tuple(keys), *tokens[: (block + 1) * size])
            for block in range(self._first_seen(hit * size), hit)
        ]
        shared_idle = sum(self.found[text] in self.idle for text in texts)
        return -(-_count(tokens) // size) - hit, shared_idle + self._reserved()

    def _blocks_to_append(self, request: str, count: int) -> int:
        size = self.manager.block_size
        length = len(self.requests[request].tokens)
        blocks = -(-(length + count) // size) - -(-length // size)
        if count and length % size:
            last = self.manager.block_table(request)[-1]
            blocks += sum(last in table for table in self.tables().values()) > 1
        return blocks

    def _refused(self, blocks: int, kept_back: int = 0) -> bool:
        free = self.manager.num_blocks - len(self._held())
        return bool(blocks) and blocks + kept_back > free

    def _evict(self, taken: int, hits: Sequence[int] = ()) -> None:
        """Forget the blocks that had to be evicted so that `taken` could be handed out."""
        held = {block for table in self._before.values() for block in table} - {NO_BLOCK}
        plain = self.manager.num_blocks - len(held | set(hits)) - len(self.idle)
        evicted = max(0, taken - plain)
        for block in self.idle[:evicted]:
            self._unpublish(block)
        del self.idle[:evicted]

    def _text_of(self, block: int) -> Text | None:
        """Return the text that a block is listed under."""
        for text, found in self.found.items():
            if block in (found, *self.twins.get(text, [])):
                return text
        return None

    def _publish(self, text: Text, block: int) -> None:
        if self._text_of(block) is not None:
            return
        found = self.found.setdefault(text, block)
        if found in self.idle:  # nobody needs it any longer
            self.idle.remove(found)
            self.found[text] = block
        elif found != block:
            self.twins.setdefault(text, []).append(block)

    def _unpublish(self, block: int) -> None:
        text = self._text_of(block)
        if text is None:
            return
        others = [
            each for each in (self.found.pop(text), *self.twins.pop(text, [])) if each != block
        ]
        if others:
            self.found[text] = others[0]
        if others[1:]:
            self.twins[text] = others[1:]

    def _leave(self, blocks: list[int]) -> None:
        """Blocks that one request has left, its last one first, become idle if nobody has them."""
        held = self._held()
        for block in reversed(blocks):
            if block in held or (text := self._text_of(block)) is None:
                continue
            if text in self.twins:
                self._unpublish(block)
            else:
                self.idle.append(block)

    def _extend(self, listed: Listed, tokens: Any) -> None:
        counted = isinstance(tokens, int)
        if not counted and listed.known == len(listed.tokens):
            listed.known += len(tokens)
        listed.tokens += [next(self._unknown) for _ in range(tokens)] if counted else tokens

    def _write(self, request: str, start: int) -> None:
        """Write the tokens from `start` on where the manager has put them."""
        listed, size = self.requests[request], self.manager.block_size
        table = self.manager.block_table(request)
        for position in range(start, len(listed.tokens)):
            slot = table[position // size], position % size
            self.slots[slot] = listed.text(position + 1)


def _count(tokens: Any) -> int:
    return tokens if isinstance(tokens, int) else len(tokens)
