"""PagedLists with a second pool: what is swapped out, and what is on its way."""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

from paged_ops.blocks.errors import InFlight, OutOfBlocks, UnknownRequest
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.swap import SwapSpace, Transfer
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.snapshot import restore_snapshot, save_snapshot
from tests.support.paged_lists import REFUSALS, Call, Listed, PagedLists, Text

SPACE_CALLS = ("swap_out", "swap_in", "free_swapped", "finish", "restore")


class Flight(NamedTuple):
    """A transfer of one request that is not finished."""

    transfer: Transfer
    request: str
    listed: Listed
    inwards: bool
    host_blocks: int


class SwappingLists(PagedLists):
    """The twin of a manager and of its swap space.

    Bytes are copied when a transfer is finished, which is as late as can be: had a block of it
    been handed out in the meantime, a wrong text would arrive.
    """

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.space = SwapSpace(self.manager, host_blocks)
        self.host_blocks = host_blocks
        self.options = options
        self.host: dict[str, Listed] = {}
        self.host_slots: dict[tuple[int, int], Text] = {}
        self.flights: list[Flight] = []

    def call(self, call: Call) -> bool:
        if call[0] not in SPACE_CALLS:
            return super().call(call)
        expected, failure = self.expected_space_error(*call), None
        before = self.books(), self.space.stats()
        self._before = self.tables()
        try:
            getattr(self, call[0])(*call[1:])
        except REFUSALS as error:
            failure = type(error)
        assert failure is expected, (call, failure, expected)
        if failure:
            assert (self.books(), self.space.stats()) == before
        return failure is None

    def expected_space_error(self, name: str, request: Any = None) -> type[Exception] | None:
        on_its_way_out = any(
            f.listed is self.host.get(request) and not f.inwards for f in self.flights
        )
        if name in ("finish", "restore"):
            return None
        if name == "free_swapped":
            return None if request in self.host else UnknownRequest
        if name == "swap_out":
            if request in self.arriving():
                return InFlight
            if request not in self.requests:
                return UnknownRequest
            if request in self.host:
                return ValueError
            blocks = self._host_blocks_of(request, self.requests[request])
            return OutOfBlocks if blocks > self.space.num_free else None
        if request not in self.host:
            return UnknownRequest
        if on_its_way_out:
            return InFlight
        if request in self.requests or request in self.arriving():
            return ValueError
        listed = self.host[request]
        hits = self._hits(listed)
        idle = len({block for block in hits.values() if block in self.idle})
        missing = self._host_blocks_of(request, listed) - len(hits)
        return OutOfBlocks if self._refused(missing, idle + self._reserved()) else None

    def swap_out(self, request: str) -> None:
        listed = self.requests.get(request)
        transfer = self.space.swap_out([request])
        assert listed is not None
        blocks = self._host_blocks_of(request, listed)
        assert len(transfer.copies) == blocks
        self.extra["out", id(transfer)] = listed, self._before[request]
        self.host[request] = self.requests.pop(request)
        self.flights.append(Flight(transfer, request, listed, False, blocks))

    def swap_in(self, request: str) -> None:
        listed = self.host.get(request)
        hits = self._hits(listed) if listed else {}
        transfer = self.space.swap_in([request])
        assert listed is not None
        blocks = self._host_blocks_of(request, listed)
        assert len(transfer.copies) == blocks - len(hits)
        self.idle = [block for block in self.idle if block not in hits.values()]
        self._evict(len(transfer.copies), list(hits.values()))
        table = list(self.manager.ledger.arriving[request].table)
        assert all(table[index] == block for index, block in hits.items())
        del self.host[request]
        listed.committed = 0
        self.extra["arriving", request] = listed, table
        self.extra["in", id(transfer)] = listed, table
        self.flights.append(Flight(transfer, request, listed, True, blocks))

    def free_swapped(self, request: str) -> None:
        self.space.free(request)
        del self.host[request]

    def finish(self, index: int) -> None:
        """Finish one of the transfers under way, if there is one."""
        if not self.flights:
            return
        flight = self.flights.pop(index % len(self.flights))
        here, there = self.slots, self.host_slots
        source, destination = (there, here) if flight.inwards else (here, there)
        for block, copy in flight.transfer.copies:
            for offset in range(self.manager.block_size):
                destination[copy, offset] = source.get((block, offset), ("nothing",))
        flight.transfer.finish()
        kind = "in" if flight.inwards else "out"
        listed, table = self.extra.pop((kind, id(flight.transfer)))
        arrived = self.extra.get(("arriving", flight.request), (None, []))[0]
        if flight.inwards and arrived is listed:
            self.requests[flight.request], _ = self.extra.pop(("arriving", flight.request))
        self._leave(table[listed.released :])

    def restore(self) -> None:
        """Go on with new books and a new pool, restored from a snapshot of the present ones.

        The pool of the snapshot holds, in the place of keys, numbers of texts.
        """
        if self.flights or self.host:
            return
        size, texts = self.manager.block_size, list(dict.fromkeys(self.slots.values()))
        numbers = {text: number for number, text in enumerate(texts)}
        old, new = (PagedKVCache(1, self.manager.num_blocks, size, 1, 1) for _ in range(2))
        for (block, offset), text in self.slots.items():
            old.kv_blocks(0)[block, 0, offset] = numbers[text]
        manager = BlockManager(self.manager.num_blocks, size, **self.options)
        with tempfile.TemporaryDirectory() as folder:
            save_snapshot(folder, self.manager, old)
            restored = restore_snapshot(folder, manager, new)
        assert set(restored) == set(self.requests)
        keys = new.kv_blocks(0)[:, 0, :, 0, 0].tolist()
        idle_texts = [
            text for block in self.idle for text in self.found if self.found[text] == block
        ]
        self.slots = {
            (block, offset): texts[int(number)]
            for block, row in enumerate(keys)
            for offset, number in enumerate(row)
            if texts
        }
        counts = {text: len(twins) for text, twins in self.twins.items()}
        texts_before = self.found.keys()
        self.manager = manager
        self.read_what_is_listed()
        assert self.found.keys() == texts_before
        assert {text: len(twins) for text, twins in self.twins.items()} == counts
        assert self.idle == [self.found[text] for text in idle_texts]
        for listed in self.requests.values():
            listed.known = 0 if listed.stale else listed.known
            listed.committed, listed.stale = 0, False
        self.space = SwapSpace(manager, self.host_blocks)
        self.stream = manager.subscribe()

    def everywhere(self) -> list[Listed]:
        return [*super().everywhere(), *self.host.values()]

    def verify(self) -> None:
        super().verify()
        self.space.check()
        held = {r: self._host_blocks_of(r, listed) for r, listed in self.host.items()}
        in_flight = [
            f.host_blocks
            for f in self.flights
            if f.inwards or self.host.get(f.request) is not f.listed
        ]
        assert self.space.num_free == self.host_blocks - sum(held.values()) - sum(in_flight)

    def _host_blocks_of(self, request: str, listed: Listed) -> int:
        return -(-len(listed.tokens) // self.manager.block_size) - listed.released

    def _hits(self, listed: Listed) -> dict[int, int]:
        """Foretell which blocks of a request are cached here, and where."""
        size = self.manager.block_size
        if listed.stale or not self.caching:
            return {}
        texts = {
            i: listed.text((i + 1) * size) for i in range(listed.released, listed.known // size)
        }
        return {i: self.found[text] for i, text in texts.items() if text in self.found}
