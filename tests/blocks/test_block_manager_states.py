"""BlockManager against token lists: in random histories, and in every state of a small pool."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.paged_lists import Call, PagedLists
from tests.support.swapping_lists import SwappingLists

# ------------------------------------------------------------------ random histories

REQUESTS = st.sampled_from("abcd")
COUNTS = st.integers(0, 9)
# Few different ids, so that prompts meet; a count gives ids that nobody else has.
TOKENS = COUNTS | st.lists(st.integers(0, 1), max_size=9)
KEYS = st.sampled_from([(), (), (), (("salt", "x"),), (("adapter", "x"),)])


class Histories(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.integers(1, 4),
        prefix_caching=st.sampled_from([True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        sliding_window=st.none() | st.integers(1, 6),
        host_blocks=st.integers(1, 8),
    )
    def start(self, num_blocks: int, block_size: int, **options: Any) -> None:
        self.paged = SwappingLists(num_blocks, block_size, **options)

    @rule(request=REQUESTS, tokens=TOKENS, keys=KEYS)
    def allocate(self, request: str, tokens: Any, keys: Any) -> None:
        self.paged.call(("allocate", request, tokens, keys))

    @rule(request=REQUESTS, tokens=TOKENS)
    def append(self, request: str, tokens: Any) -> None:
        self.paged.call(("append", request, tokens))

    @rule(request=REQUESTS, num_tokens=COUNTS)
    def commit(self, request: str, num_tokens: int) -> None:
        self.paged.call(("commit", request, num_tokens))

    @rule(request=REQUESTS)
    def commit_all(self, request: str) -> None:
        if request in self.paged.requests:
            self.paged.call(("commit", request, len(self.paged.requests[request].tokens)))

    @rule(parent=REQUESTS, child=REQUESTS)
    def fork(self, parent: str, child: str) -> None:
        self.paged.call(("fork", parent, child))

    @rule(request=REQUESTS, num_tokens=COUNTS)
    def truncate(self, request: str, num_tokens: int) -> None:
        self.paged.call(("truncate", request, num_tokens))

    @rule(request=REQUESTS)
    def free(self, request: str) -> None:
        self.paged.call(("free", request))

    @rule(request=REQUESTS)
    def preempt(self, request: str) -> None:
        self.paged.call(("preempt", request))

    @rule(request=REQUESTS)
    def swap_out(self, request: str) -> None:
        self.paged.call(("swap_out", request))

    @rule(request=REQUESTS)
    def swap_in(self, request: str) -> None:
        self.paged.call(("swap_in", request))

    @rule(request=REQUESTS)
    def free_swapped(self, request: str) -> None:
        self.paged.call(("free_swapped", request))

    @rule(index=st.integers(0, 3))
    def finish(self, index: int) -> None:
        self.paged.call(("finish", index))

    @rule()
    def restore(self) -> None:
        self.paged.call(("restore",))

    @rule()
    def flush(self) -> None:
        self.paged.call(("flush",))

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), keys=KEYS)
    def lookup(self, tokens: list[int], keys: Any) -> None:
        found = self.paged.manager.lookup(tokens, keys)
        assert found == self.paged.expected_hit(tokens, keys) * self.paged.manager.block_size

    @invariant()
    def pool_reads_as_the_lists(self) -> None:
        if hasattr(self, "paged"):
            self.paged.verify()


TestHistories = Histories.TestCase


def random_call(choose: random.Random, paged: SwappingLists) -> Call:
    """Draw a call: mostly one that can succeed."""
    request, other = choose.sample("abcdef", 2)
    if choose.random() < 0.2:
        name = choose.choice(["swap_out", "swap_in", "swap_in", "free_swapped", "finish", "finish"])
        return (name, choose.randrange(3) if name == "finish" else request)
    tokens: Any = [choose.randrange(2) for _ in range(choose.randrange(12))]
    if choose.random() < 0.1:
        tokens = len(tokens)
    listed = paged.requests.get(request)
    length = len(listed.tokens) if listed else 0
    if listed is None and choose.random() < 0.8:
        if choose.random() < 0.3:
            return ("fork", other, request)
        return ("allocate", request, tokens, choose.choice([(), (), (("salt", "x"),)]))
    if choose.random() < 0.005:
        return choose.choice([("flush",), ("restore",)])
    name = choose.choice(["append", "append", "commit", "commit", "truncate", "free", "preempt"])
    if name == "append":
        return (name, request, choose.choice([tokens, [choose.randrange(2)]]))
    if name == "commit":
        return (name, request, choose.choice([length, choose.randint(0, length + 1)]))
    if name == "truncate":
        return (name, request, max(0, length - choose.randrange(4)))
    return (name, request)


def run_random_calls(seed: int, num_calls: int, verify_every: int = 1) -> None:
    """Make so many calls, on a new pool every thousand, and compare everything now and then."""
    choose = random.Random(seed)
    for start in range(0, num_calls, 1000):
        paged = SwappingLists(
            choose.randint(2, 12),
            choose.randint(1, 4),
            choose.randint(2, 12),
            watermark=choose.choice([0.0, 0.0, 0.2]),
            sliding_window=choose.choice([None, None, 1, 2, 5]),
        )
        for number in range(min(1000, num_calls - start)):
            paged.call(random_call(choose, paged))
            if number % verify_every == 0:
                paged.verify()


@pytest.mark.parametrize("seed", range(2))
def test_long_random_histories_keep_every_invariant(seed: int) -> None:
    run_random_calls(seed, 4000)


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
                [
                    (len(paged.requests[name].tokens), tuple(table))
                    for name, table in paged.tables().items()
                ]
            )
            if state not in histories:
                histories[state] = (*history, call)
                waiting.append(histories[state])
            paged = replay(history, num_blocks, block_size)
    assert histories.keys() == legal_states(num_blocks, block_size, len(requests))


def cached_state(paged: PagedLists) -> Any:
    """Return all that the future of a pool with a prefix cache depends on.

    That is the first of its forms among all orders of the requests, whose names don't matter, with
    blocks numbered as they come.
    """

    def form(order: Sequence[str]) -> Any:
        names: dict[int, int] = {}

        def renamed(blocks: Iterable[int]) -> tuple[int, ...]:
            return tuple(names.setdefault(block, len(names)) for block in blocks)

        tables = paged.tables()
        requests = tuple(
            (listed.tokens, listed.known, listed.committed, listed.stale, renamed(tables[name]))
            for name, listed in ((name, paged.requests[name]) for name in order)
        )
        idle = renamed(paged.idle)
        found = sorted(
            (text, *renamed([block, *paged.twins.get(text, [])]))
            for text, block in paged.found.items()
        )
        return requests, idle, found

    return repr(min(map(form, itertools.permutations(paged.requests))))


@pytest.mark.parametrize(("num_blocks", "block_size", "most_tokens"), [(2, 1, 2), (2, 2, 2)])
def test_every_call_is_right_in_every_state_of_a_small_prefix_cache(
    num_blocks: int, block_size: int, most_tokens: int
) -> None:
    lengths = range(most_tokens + 1)
    prompts = [list(ids) for n in lengths for ids in itertools.product([0, 1], repeat=n)]
    calls: list[Call] = [
        *itertools.product(["allocate"], "ab", prompts),
        *itertools.product(["append"], "ab", [[0], [1]]),
        *itertools.product(["commit", "truncate"], "ab", lengths),
        *itertools.product(["fork"], "ab", "ab"),
        *itertools.product(["free"], "ab"),
        ("flush",),
    ]
    histories: dict[Any, tuple[Call, ...]] = {cached_state(PagedLists(num_blocks, block_size)): ()}
    waiting = deque(histories.values())
    while waiting:
        history = waiting.popleft()
        paged = replay(history, num_blocks, block_size)
        for call in calls:
            if not paged.call(call):
                continue
            paged.verify()
            state = cached_state(paged)
            if state not in histories:
                histories[state] = (*history, call)
                waiting.append(histories[state])
            paged = replay(history, num_blocks, block_size)
