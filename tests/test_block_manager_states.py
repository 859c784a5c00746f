"""BlockManager against token lists: in random histories, and in every state of a small pool.

`PagedLists` keeps each request twice: as a plain list of tokens, and in the slots of a pool as the
manager's tables and copies say. The two must read the same after every call.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paged_ops.block_manager import BlockManager, OutOfBlocks, UnknownRequest

Call = tuple[Any, ...]  # the name of a method of BlockManager, then its arguments


class PagedLists:
    """Requests as lists of distinct tokens, beside a manager and the pool it keeps the books of."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.lists: dict[str, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}  # (block, offset) -> token
        self._new_tokens = itertools.count()

    def call(self, call: Call) -> bool:
        """Make a call, which must fail if the lists say so, without a trace; say if it did not."""
        expected, failure = self.expected_error(call), None
        before = self.tables(), self.lengths(), self.manager.stats()
        try:
            self.make(call)
        except (OutOfBlocks, UnknownRequest, ValueError) as error:
            failure = type(error)
        assert failure is expected
        if failure:
            assert (self.tables(), self.lengths(), self.manager.stats()) == before
        return failure is None

    def make(self, call: Call) -> None:
        """Make a call, and do to the lists and to the slots what it means."""
        result = getattr(self.manager, call[0])(*call[1:])
        getattr(self, "after_" + call[0])(*call[1:], result)
        self._forget_free_blocks()

    def expected_error(self, call: Call) -> type[Exception] | None:
        """Foretell the error from the lists and from who holds which block."""
        name, request, argument = (*call, None)[:3]
        if (request in self.lists) == (name == "allocate"):
            return ValueError if name == "allocate" else UnknownRequest
        if name == "fork" and argument in self.lists:
            return ValueError
        if name == "truncate" and argument > len(self.lists[request]):
            return ValueError
        if name in ("allocate", "append") and self._blocks_needed(*call) > self._num_free():
            return OutOfBlocks
        return None

    def after_allocate(self, request: str, count: int, hit_tokens: int) -> None:
        assert hit_tokens == 0
        self.lists[request] = []
        self._write(request, count)

    def after_append(self, request: str, count: int, copies: list[tuple[int, int]]) -> None:
        held = {block for table in self.tables().values() for block in table}
        for source, destination in copies:
            assert {source, destination} <= held
            for offset in range(self.manager.block_size):
                if (source, offset) in self.slots:
                    self.slots[destination, offset] = self.slots[source, offset]
        self._write(request, count)

    def after_fork(self, parent: str, child: str, _: None) -> None:
        self.lists[child] = self.lists[parent].copy()

    def after_truncate(self, request: str, num_tokens: int, _: None) -> None:
        del self.lists[request][num_tokens:]

    def after_free(self, request: str, _: None) -> None:
        del self.lists[request]

    def verify(self) -> None:
        """Read every request back from the pool, and compare all counts with the lists."""
        self.manager.check()
        live = set()
        for request, tokens in self.lists.items():
            slots = self._slots_of(request)
            assert [self.slots[slot] for slot in slots] == tokens
            live.update(slots)
        stats = self.manager.stats()
        assert self.manager.num_free == stats.num_free == self._num_free()
        assert self.manager.num_used == stats.num_used == stats.num_blocks - stats.num_free
        assert stats.num_requests == len(self.lists)
        assert stats.request_tokens == sum(map(len, self.lists.values()))
        assert stats.live_tokens == len(live)
        room = stats.num_free * stats.block_size
        assert self.manager.can_allocate(room)
        assert not self.manager.can_allocate(room + 1)

    def tables(self) -> dict[str, list[int]]:
        return {request: self.manager.block_table(request) for request in self.lists}

    def lengths(self) -> dict[str, int]:
        return {request: self.manager.num_tokens(request) for request in self.lists}

    def _blocks_needed(self, name: str, request: str, count: int) -> int:
        size = self.manager.block_size
        length = len(self.lists.get(request, []))
        blocks = -(-(length + count) // size) - -(-length // size)
        if name == "append" and count and length % size:
            last = self.manager.block_table(request)[-1]
            blocks += sum(last in table for table in self.tables().values()) > 1
        return blocks

    def _num_free(self) -> int:
        held = {block for table in self.tables().values() for block in table}
        return self.manager.num_blocks - len(held)

    def _slots_of(self, request: str) -> list[tuple[int, int]]:
        """Return the slot of each token of a request."""
        table, size = self.manager.block_table(request), self.manager.block_size
        return [(table[i // size], i % size) for i in range(len(self.lists[request]))]

    def _write(self, request: str, count: int) -> None:
        """Append new tokens to the list, and write them where the manager has put them."""
        tokens = list(itertools.islice(self._new_tokens, count))
        self.lists[request] += tokens
        slots = self._slots_of(request)
        self.slots.update(zip(slots[len(slots) - count :], tokens, strict=True))

    def _forget_free_blocks(self) -> None:
        """Anything may be written to a block that nobody holds: nothing there can be read."""
        held = {block for table in self.tables().values() for block in table}
        self.slots = {slot: token for slot, token in self.slots.items() if slot[0] in held}


# ------------------------------------------------------------------ random histories

REQUESTS = st.sampled_from("abcd")
COUNTS = st.integers(0, 9)


class Histories(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.paged = PagedLists(num_blocks, block_size)

    @rule(request=REQUESTS, count=COUNTS)
    def allocate(self, request: str, count: int) -> None:
        self.paged.call(("allocate", request, count))

    @rule(request=REQUESTS, count=COUNTS)
    def append(self, request: str, count: int) -> None:
        self.paged.call(("append", request, count))

    @rule(parent=REQUESTS, child=REQUESTS)
    def fork(self, parent: str, child: str) -> None:
        self.paged.call(("fork", parent, child))

    @rule(request=REQUESTS, num_tokens=COUNTS)
    def truncate(self, request: str, num_tokens: int) -> None:
        self.paged.call(("truncate", request, num_tokens))

    @rule(request=REQUESTS)
    def free(self, request: str) -> None:
        self.paged.call(("free", request))

    @invariant()
    def pool_reads_as_the_lists(self) -> None:
        if hasattr(self, "paged"):
            self.paged.verify()


TestHistories = Histories.TestCase

# ------------------------------------------------------------------ every state of a small pool

Table = tuple[int, ...]
State = tuple[tuple[int, Table], ...]  # length and table of each request


def canonical(requests: Sequence[tuple[int, Table]]) -> State:
    """Return a state in its first form among all names of requests and of blocks.

    The manager treats all names alike: states that differ only in names have the same future.
    """

    def renamed(order: Iterable[tuple[int, Table]]) -> State:
        names: dict[int, int] = {}
        return tuple(
            (length, tuple(names.setdefault(block, len(names)) for block in table))
            for length, table in order
        )

    return min(map(renamed, itertools.permutations(requests)))


def legal_states(num_blocks: int, block_size: int, num_requests: int) -> set[State]:
    """Build every state from its rule: two requests share a prefix of their blocks, or none."""
    states: set[State] = {()}
    for _ in range(num_requests):
        for state in list(states):
            used = 1 + max((block for _, table in state for block in table), default=-1)
            prefixes = {table[:i] for _, table in state for i in range(len(table) + 1)} | {()}
            for prefix, fresh in itertools.product(prefixes, range(num_blocks - used + 1)):
                table = prefix + tuple(range(used, used + fresh))
                most = len(table) * block_size
                for length in range(max(0, most - block_size + 1), most + 1):
                    states.add(canonical([*state, (length, table)]))
    return states


def every_call(requests: str, most_tokens: int) -> list[Call]:
    """List every call that differs in kind, the ones that must fail included."""
    counts = range(most_tokens + 2)
    return [
        *itertools.product(["allocate", "append", "truncate"], requests, counts),
        *itertools.product(["fork"], requests, requests),
        *itertools.product(["free"], requests),
    ]


def replay(history: Iterable[Call], num_blocks: int, block_size: int) -> PagedLists:
    paged = PagedLists(num_blocks, block_size)
    for call in history:
        paged.make(call)
    return paged


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "requests"), [(4, 1, "abc"), (4, 2, "abc"), (3, 3, "ab")]
)
def test_every_call_is_right_in_every_state_of_a_small_pool(
    num_blocks: int, block_size: int, requests: str
) -> None:
    calls = every_call(requests, num_blocks * block_size)
    histories: dict[State, tuple[Call, ...]] = {(): ()}  # to each state, the shortest one
    waiting = deque(histories.values())
    while waiting:
        history = waiting.popleft()
        paged = replay(history, num_blocks, block_size)
        for call in calls:
            if not paged.call(call):
                continue  # and still in the state before
            paged.verify()
            state = canonical(
                [(len(paged.lists[name]), tuple(table)) for name, table in paged.tables().items()]
            )
            if state not in histories:
                histories[state] = (*history, call)
                waiting.append(histories[state])
            paged = replay(history, num_blocks, block_size)
    assert histories.keys() == legal_states(num_blocks, block_size, len(requests))
