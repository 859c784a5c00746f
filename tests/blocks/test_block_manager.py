"""BlockManager: one behaviour per test. See test_block_manager_states for all of them together."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch

from paged_ops.blocks.errors import OutOfBlocks, UnknownRequest
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.stats import BlockStats

# ------------------------------------------------------------------ who owns what


def test_a_new_manager_has_only_free_blocks() -> None:
    manager = BlockManager(8, 4)
    assert (manager.num_blocks, manager.block_size) == (8, 4)
    assert (manager.num_free, manager.num_used) == (8, 0)
    manager.check()


def test_allocate_takes_as_many_blocks_as_the_tokens_need_and_hits_nothing() -> None:
    manager = BlockManager(8, 4)
    for request, tokens, blocks in [("a", 0, 0), ("b", 1, 1), ("c", 4, 1), ("d", 5, 2)]:
        assert manager.allocate(request, tokens) == 0
        assert len(manager.block_table(request)) == blocks
        assert manager.num_tokens(request) == tokens
    assert manager.num_used == 4
    manager.check()


@pytest.mark.parametrize(
    "tokens",
    [5, [7, 8, 9, 7, 8], (7, 8, 9, 7, 8), range(5), array("q", [7] * 5), torch.arange(5)],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_may_be_a_count_or_a_sequence_of_ids(tokens: Any) -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", tokens)
    manager.append("a", tokens)
    assert manager.num_tokens("a") == 10


def test_a_tensor_of_one_id_is_one_token_and_a_scalar_is_a_count() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", torch.tensor([7]))
    manager.allocate("b", torch.tensor(7))
    assert (manager.num_tokens("a"), manager.num_tokens("b")) == (1, 7)


def test_a_request_may_be_anything_hashable() -> None:
    manager = BlockManager(8, 4)
    for request in ["a", 1, ("a", 1), None, frozenset()]:
        manager.allocate(request, 1)
    assert manager.num_used == 5


def test_requests_own_different_blocks() -> None:
    manager = BlockManager(8, 4)
    for request in "abcd":
        manager.allocate(request, 8)
    owned = [block for request in "abcd" for block in manager.block_table(request)]
    assert sorted(owned) == list(range(8))


def test_a_pool_that_fits_to_the_last_block_is_given_out_whole() -> None:
    manager = BlockManager(3, 4)
    manager.allocate("a", 12)
    assert manager.num_free == 0
    manager.check()


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 8])
def test_append_takes_a_block_exactly_when_the_last_one_is_full(prompt: int) -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", prompt)
    for length in range(prompt + 1, 33):
        before = manager.block_table("a")
        assert manager.append("a", 1) == []
        grew = len(manager.block_table("a")) - len(before)
        assert grew == (1 if length % 4 == 1 else 0)
        assert manager.block_table("a")[: len(before)] == before
    manager.check()


def test_append_of_many_tokens_takes_all_their_blocks_at_once() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 3)
    assert manager.append("a", 9) == []
    assert (manager.num_tokens("a"), len(manager.block_table("a"))) == (12, 3)


def test_append_of_no_tokens_changes_nothing_even_in_a_shared_partial_block() -> None:
    manager = BlockManager(2, 4)
    manager.allocate("a", 6)
    manager.fork("a", "b")
    assert manager.append("b", 0) == []
    assert manager.append("b", []) == []
    assert manager.block_table("b") == manager.block_table("a")


def test_freed_blocks_are_handed_out_next_and_in_their_old_order() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 12)
    table = manager.block_table("a")
    manager.free("a")
    manager.allocate("b", 12)
    assert manager.block_table("b") == table


def test_block_table_is_a_copy() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 8)
    manager.block_table("a").clear()
    assert len(manager.block_table("a")) == 2
    manager.check()


# ------------------------------------------------------------------ sharing


def test_fork_shares_every_block_and_takes_none() -> None:
    manager = BlockManager(2, 4)
    manager.allocate("a", 7)
    manager.fork("a", "b")
    assert manager.block_table("b") == manager.block_table("a")
    assert manager.num_tokens("b") == 7
    assert manager.num_free == 0
    manager.check()


def test_append_into_a_shared_partial_block_copies_it_for_the_first_who_appends() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 6)
    manager.fork("a", "b")
    first, shared = manager.block_table("a")
    ((source, destination),) = manager.append("b", 1)
    assert source == shared
    assert manager.block_table("b") == [first, destination]
    assert destination not in manager.block_table("a")
    assert manager.append("a", 1) == []  # alone in the block by now
    assert manager.block_table("a") == [first, shared]
    manager.check()


def test_append_behind_a_shared_full_block_copies_nothing() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 8)
    manager.fork("a", "b")
    assert manager.append("b", 1) == []
    assert manager.block_table("b")[:2] == manager.block_table("a")
    manager.check()


def test_append_that_copies_and_overflows_takes_both_blocks() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 6)
    manager.fork("a", "b")
    copies = manager.append("b", 7)
    assert len(copies) == 1
    assert len(manager.block_table("b")) == 4
    assert manager.num_used == 5


def test_of_three_owners_all_but_the_last_get_a_copy() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 2)
    manager.fork("a", "b")
    manager.fork("b", "c")
    assert [len(manager.append(request, 1)) for request in "abc"] == [1, 1, 0]
    manager.check()


def test_freeing_one_owner_keeps_the_blocks_of_the_other() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 6)
    table = manager.block_table("a")
    manager.fork("a", "b")
    manager.free("a")
    assert manager.block_table("b") == table
    assert manager.num_used == 2
    assert manager.append("b", 1) == []
    manager.free("b")
    assert manager.num_used == 0
    manager.check()


def test_truncate_into_a_shared_full_block_keeps_it_shared_until_the_next_append() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 8)
    manager.fork("a", "b")
    first, second = manager.block_table("a")
    manager.truncate("b", 3)
    assert manager.block_table("b") == [first]
    ((source, _),) = manager.append("b", 1)
    assert source == first
    assert manager.block_table("a") == [first, second]
    manager.check()


@pytest.mark.parametrize(("keep", "blocks"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_truncate_gives_back_whole_blocks_from_the_end(keep: int, blocks: int) -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 9)
    table = manager.block_table("a")
    manager.truncate("a", keep)
    assert manager.block_table("a") == table[:blocks]
    assert manager.num_tokens("a") == keep
    assert manager.num_free == 8 - blocks
    manager.check()


# ------------------------------------------------------------------ refusals change nothing


def state_of(manager: BlockManager, requests: str = "abc") -> Any:
    manager.check()
    known = []
    for request in requests:
        try:
            known.append((request, manager.block_table(request), manager.num_tokens(request)))
        except UnknownRequest:
            continue
    return known, manager.stats()


def half_full() -> BlockManager:
    """Five of 6 blocks of 4 in use: a and b share one full and one partial block.

    The sixth was in use and came back.
    """
    manager = BlockManager(6, 4)
    manager.allocate("earlier", 24)
    manager.free("earlier")
    manager.allocate("a", 7)
    manager.fork("a", "b")
    manager.allocate("c", 12)
    return manager


REFUSALS: list[tuple[str, Callable[[BlockManager], Any], type[Exception], str]] = [
    ("allocate too much", lambda m: m.allocate("d", 8), OutOfBlocks, "2 blocks asked for, 1 free"),
    ("allocate 2**60", lambda m: m.allocate("d", 2**60), OutOfBlocks, f"{2**58} blocks"),
    ("allocate again", lambda m: m.allocate("a", 1), ValueError, "request is 'a', which exists"),
    ("allocate -1", lambda m: m.allocate("d", -1), ValueError, "tokens is -1, expected 0 or more"),
    ("allocate True", lambda m: m.allocate("d", True), TypeError, "tokens is True"),
    ("allocate 1.5", lambda m: m.allocate("d", 1.5), TypeError, "tokens is 1.5"),
    ("allocate None", lambda m: m.allocate("d", None), TypeError, "tokens is None"),
    ("allocate text", lambda m: m.allocate("d", "abc"), TypeError, "tokens is 'abc'"),
    (
        "allocate a batch of ids",
        lambda m: m.allocate("d", torch.zeros(1, 5, dtype=torch.int64)),
        TypeError,
        "tokens has 2 dimensions, expected 1",
    ),
    ("allocate a list", lambda m: m.allocate(["d"], 1), TypeError, r"request is \['d'\]"),
    ("append too much", lambda m: m.append("c", 8), OutOfBlocks, "2 blocks asked for, 1 free"),
    ("append and copy", lambda m: m.append("a", 2), OutOfBlocks, "2 blocks asked for, 1 free"),
    ("append -1", lambda m: m.append("a", -1), ValueError, "tokens is -1, expected 0 or more"),
    ("append False", lambda m: m.append("a", False), TypeError, "tokens is False"),
    ("append unknown", lambda m: m.append("d", 1), UnknownRequest, "request 'd' is unknown"),
    ("append a list", lambda m: m.append(["a"], 1), TypeError, r"request is \['a'\]"),
    ("fork unknown", lambda m: m.fork("d", "e"), UnknownRequest, "request 'd' is unknown"),
    ("fork onto another", lambda m: m.fork("a", "c"), ValueError, "child is 'c', which exists"),
    ("fork onto itself", lambda m: m.fork("a", "a"), ValueError, "child is 'a', which exists"),
    ("fork to a list", lambda m: m.fork("a", ["d"]), TypeError, r"child is \['d'\]"),
    ("truncate longer", lambda m: m.truncate("a", 8), ValueError, "num_tokens is 8, expected 0 to"),
    ("truncate -1", lambda m: m.truncate("a", -1), ValueError, "num_tokens is -1, expected 0 to 7"),
    ("truncate None", lambda m: m.truncate("a", None), TypeError, "num_tokens is None"),
    ("truncate unknown", lambda m: m.truncate("d", 0), UnknownRequest, "request 'd' is unknown"),
    ("free unknown", lambda m: m.free("d"), UnknownRequest, "request 'd' is unknown"),
    ("table of unknown", lambda m: m.block_table("d"), UnknownRequest, "request 'd' is unknown"),
    ("length of unknown", lambda m: m.num_tokens("d"), UnknownRequest, "request 'd' is unknown"),
    ("can_allocate -1", lambda m: m.can_allocate(-1), ValueError, "num_tokens is -1"),
    ("can_allocate list", lambda m: m.can_allocate([1]), TypeError, r"num_tokens is \[1\]"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [refusal[1:] for refusal in REFUSALS],
    ids=[refusal[0] for refusal in REFUSALS],
)
def test_a_refused_call_says_why_and_changes_nothing(
    call: Callable[[BlockManager], Any], error: type[Exception], message: str
) -> None:
    manager = half_full()
    before = state_of(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert state_of(manager) == before


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2**31, ValueError),
        (2**60, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_sizes_out_of_range_are_refused_by_name_and_value(
    name: str, value: Any, error: type[Exception]
) -> None:
    sizes = {"num_blocks": 4, "block_size": 4, name: value}
    with pytest.raises(error, match=f"{name} is {value!r}, expected"):
        BlockManager(**sizes)


def test_out_of_blocks_carries_its_numbers_through_pickling() -> None:
    with pytest.raises(OutOfBlocks) as caught:
        BlockManager(2, 4).allocate("a", 9)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.asked, again.free) == (caught.value.asked, caught.value.free) == (3, 2)
    assert (again.evictable, again.reserved) == (0, 0)
    assert str(again) == "3 blocks asked for, 2 free"


def test_unknown_request_is_a_key_error_that_carries_the_request_through_pickling() -> None:
    with pytest.raises(KeyError) as caught:
        BlockManager(2, 4).free(("a", 1))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, UnknownRequest)
    assert again.request == ("a", 1)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_cannot_be_copied_because_both_would_hand_out_the_same_blocks(
    copier: Callable[[object], object],
) -> None:
    with pytest.raises(TypeError, match="two managers would hand out the same blocks"):
        copier(BlockManager(2, 4))


# ------------------------------------------------------------------ nothing leaks, nothing aliases


def test_a_second_free_is_refused_and_later_requests_share_nothing() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("a", 8)
    manager.free("a")
    with pytest.raises(UnknownRequest):
        manager.free("a")
    manager.allocate("b", 8)
    manager.allocate("c", 8)
    assert not set(manager.block_table("b")) & set(manager.block_table("c"))
    manager.check()


def test_failed_calls_leak_no_block_however_often_they_are_made() -> None:
    manager = half_full()
    for _ in range(1000):
        with pytest.raises(OutOfBlocks):
            manager.allocate("d", 8)
        with pytest.raises(OutOfBlocks):
            manager.append("a", 2)
    assert manager.num_free == 1
    for request in "abc":
        manager.free(request)
    assert manager.num_free == 6
    manager.check()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_partial_blocks_come_back_after_a_thousand_appends_and_truncations(
    block_size: int,
) -> None:
    manager = BlockManager(64, block_size)
    for round_ in range(1000):
        manager.allocate(round_, 3)
        manager.truncate(round_, 2)
        manager.append(round_, 20)
        manager.free(round_)
    assert manager.num_free == 64
    manager.check()


def test_can_allocate_takes_nothing_and_agrees_with_allocate() -> None:
    manager = BlockManager(3, 4)
    for _ in range(1000):
        assert manager.can_allocate(12)
        assert not manager.can_allocate(13)
        assert not manager.can_allocate(2**60)
    manager.allocate("a", 12)
    assert manager.can_allocate(0)
    assert not manager.can_allocate(1)


# ------------------------------------------------------------------ growing several requests


def test_growing_several_requests_counts_a_copy_for_all_but_the_last_owner() -> None:
    manager = BlockManager(3, 4)
    manager.allocate("a", 2)
    manager.fork("a", "b")
    manager.fork("a", "c")
    copies = manager.append_all([("a", 1), ("b", 1), ("c", 1)])
    assert [source for source, _ in copies] == [0, 0]
    assert manager.num_free == 0
    manager.check()


def test_several_requests_grow_all_or_none() -> None:
    manager = BlockManager(3, 4)
    manager.allocate("a", 2)
    manager.fork("a", "b")
    manager.allocate("c", 4)
    before = state_of(manager)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 free"):
        manager.append_all([("a", 1), ("b", 1), ("c", 1)])
    assert state_of(manager) == before
    with pytest.raises(UnknownRequest):
        manager.append_all([("a", 1), ("d", 1)])
    assert state_of(manager) == before


def test_several_requests_are_cut_all_or_none() -> None:
    manager = half_full()
    before = state_of(manager)
    with pytest.raises(ValueError, match="num_tokens is 13, expected 0 to 12"):
        manager.truncate_all([("a", 3), ("c", 13)])
    with pytest.raises(UnknownRequest):
        manager.truncate_all([("a", 3), ("d", 0)])
    assert state_of(manager) == before
    manager.truncate_all([("a", 3), ("c", 8)])
    assert [manager.num_tokens(request) for request in "abc"] == [3, 7, 8]
    assert manager.num_free == 2
    manager.check()


@pytest.mark.parametrize("call", [BlockManager.append_all, BlockManager.truncate_all])
def test_a_call_on_several_requests_names_each_once_or_none(call: Any) -> None:
    manager = half_full()
    before = state_of(manager)
    with pytest.raises(ValueError, match=r"requests is \['a', 'a'\], expected each request once"):
        call(manager, [("a", 1), ("a", 1)])
    assert not call(manager, [])
    assert state_of(manager) == before


# ------------------------------------------------------------------ statistics


def test_stats_count_blocks_slots_and_tokens() -> None:
    stats = half_full().stats()
    assert stats == BlockStats(
        block_size=4,
        num_blocks=6,
        num_free=1,
        num_used=5,
        num_requests=3,
        request_tokens=26,
        live_tokens=19,
    )
    assert (stats.num_slots, stats.allocated_slots, stats.internal_waste) == (24, 20, 1)
    assert stats.pool_utilisation == 19 / 24
    assert stats.allocation_utilisation == 19 / 20
    assert stats.effective_utilisation == 26 / 24


def test_an_empty_pool_wastes_nothing() -> None:
    stats = BlockManager(4, 4).stats()
    assert (stats.live_tokens, stats.internal_waste) == (0, 0)
    assert (stats.pool_utilisation, stats.allocation_utilisation) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("parent", "child", "live"),
    [(3, 1, 3), (1, 3, 3), (2, 2, 2), (0, 1, 1)],
)
def test_the_fullest_owner_of_a_shared_partial_block_counts(
    parent: int, child: int, live: int
) -> None:
    manager = BlockManager(4, 4)
    manager.allocate("a", 4)
    manager.fork("a", "b")
    manager.truncate("a", parent)
    manager.truncate("b", child)
    assert manager.stats().live_tokens == live


def test_a_block_that_one_owner_fills_is_full_though_others_end_inside_it() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("a", 6)
    manager.fork("a", "b")
    manager.truncate("b", 3)
    assert manager.stats().live_tokens == 6


def test_num_exclusive_counts_the_blocks_that_ending_a_request_would_free() -> None:
    manager = half_full()
    assert [manager.num_exclusive(request) for request in "abc"] == [0, 0, 3]
    manager.free("a")
    assert manager.num_exclusive("b") == 2


def test_preempt_is_free_and_is_counted() -> None:
    manager = half_full()
    manager.preempt("c")
    assert manager.num_free == 4
    assert manager.stats().preemptions == 1
    with pytest.raises(UnknownRequest):
        manager.preempt("c")
    assert manager.stats().preemptions == 1


# ------------------------------------------------------------------ the watermark


def test_new_requests_leave_the_watermark_to_those_that_run() -> None:
    manager = BlockManager(10, 4, watermark=0.25)  # 2 blocks
    manager.allocate("a", 28)
    assert manager.num_free == 3
    assert manager.can_allocate(4)
    assert not manager.can_allocate(5)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 3 free, of which the watermark"):
        manager.allocate("b", 5)
    manager.allocate("b", 4)
    manager.append("a", 8)
    assert manager.num_free == 0
    manager.allocate("c", 0)


def test_the_watermark_does_not_bind_where_nothing_runs() -> None:
    manager = BlockManager(10, 4, watermark=0.25)
    assert manager.can_allocate(40)
    manager.allocate("a", 40)
    assert manager.num_free == 0


@pytest.mark.parametrize("watermark", [-0.1, 1.0, 2, float("nan")])
def test_a_watermark_that_is_no_share_is_refused(watermark: float) -> None:
    with pytest.raises(ValueError, match=r"watermark is .*, expected 0 or more and below 1"):
        BlockManager(8, 4, watermark=watermark)


# ------------------------------------------------------------------ threads


@pytest.fixture
def eager_thread_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class SwitchingList(list[int]):
    """A list that lets another thread run between reading a part of it and what follows."""

    def __getitem__(self, index: Any) -> Any:
        element = super().__getitem__(index)
        time.sleep(0)
        return element


def switching_manager(num_blocks: int, block_size: int) -> BlockManager:
    """Return a manager whose calls are interrupted where that does most harm."""
    manager = BlockManager(num_blocks, block_size)
    stock = manager.ledger.stock
    stock.free, stock.counts = SwitchingList(), SwitchingList()
    manager.allocate("all", num_blocks * block_size)
    manager.free("all")
    return manager


def run_in_threads(*calls: Callable[[], None]) -> None:
    """Run the calls at once, and raise what any of them raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("eager_thread_switches")
def test_threads_that_allocate_and_free_leave_the_books_in_order() -> None:
    manager = BlockManager(16, 4)

    def work(name: str) -> None:
        for round_ in range(10_000):
            manager.allocate((name, round_), 9)
            manager.free((name, round_))

    run_in_threads(lambda: work("a"), lambda: work("b"))
    assert manager.num_free == 16
    manager.check()


def test_threads_that_share_blocks_leave_the_books_in_order() -> None:
    manager = switching_manager(16, 4)
    manager.allocate("parent", 9)

    def work(name: str) -> None:
        for _ in range(300):
            manager.fork("parent", name)
            manager.append(name, 1)
            manager.free(name)

    run_in_threads(lambda: work("a"), lambda: work("b"))
    assert manager.num_used == 3
    manager.check()


def test_requests_freed_by_another_thread_than_made_them_come_back_whole() -> None:
    manager = switching_manager(32, 4)
    made: Queue[int] = Queue(maxsize=4)

    def make() -> None:
        for request in range(300):
            manager.allocate(request, 9)
            made.put(request)

    def end() -> None:
        for _ in range(300):
            manager.free(made.get())

    run_in_threads(make, end)
    assert manager.num_free == 32
    manager.check()


def test_threads_that_want_the_last_blocks_get_them_or_out_of_blocks() -> None:
    manager = switching_manager(4, 4)
    outcomes = []

    def work(name: str) -> None:
        for _ in range(300):
            if manager.can_allocate(12):  # true for both threads, though only one can have them
                try:
                    manager.allocate(name, 12)
                except OutOfBlocks:
                    outcomes.append("out of blocks")
                else:
                    outcomes.append("allocated")
                    manager.free(name)

    run_in_threads(lambda: work("a"), lambda: work("b"))
    assert "allocated" in outcomes
    assert manager.num_free == 4
    manager.check()


# ------------------------------------------------------------------ the cost of a call


class EndOnly(list[int]):
    """A list that refuses everything that costs more than what it gives or takes at its end."""

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("the free list was searched")

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, slice)
        assert index.stop is None
        return super().__getitem__(index)

    def __delitem__(self, index: Any) -> None:
        assert isinstance(index, slice)
        assert index.stop is None
        super().__delitem__(index)

    __contains__ = __iter__ = __reversed__ = __setitem__ = _refuse
    index = remove = insert = copy = count = reverse = sort = _refuse


def everything_once(manager: BlockManager) -> None:
    manager.allocate("a", range(70))
    manager.commit("a")
    manager.fork("a", "b")
    manager.append("b", range(30))
    manager.can_allocate(100)
    manager.lookup(range(70))
    manager.truncate("a", 20)
    manager.stats()
    manager.free("a")
    manager.free("b")


def test_no_call_searches_the_free_list() -> None:
    manager = BlockManager(64, 4)
    manager.ledger.stock.free = EndOnly()
    for _ in range(2):  # with new blocks, then with freed ones
        everything_once(manager)
    assert manager.num_free == 64


def test_the_work_of_a_call_does_not_grow_with_the_pool() -> None:
    def lines_run(num_blocks: int) -> int:
        manager = BlockManager(num_blocks, 4)
        lines = 0

        def count(frame: object, event: str, arg: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        tracer = sys.gettrace()
        sys.settrace(count)
        try:
            everything_once(manager)
        finally:
            sys.settrace(tracer)
        return lines

    assert lines_run(64) == lines_run(100_000)


def test_the_largest_manager_costs_nothing_until_its_blocks_are_used() -> None:
    manager = BlockManager(2**31 - 1, 1)
    manager.allocate("a", 10)
    assert manager.num_free == 2**31 - 11
    assert manager.can_allocate(2**31 - 11)
    manager.check()


def test_freed_blocks_are_used_again_before_new_ones() -> None:
    manager = BlockManager(64, 4)
    for request in range(1000):
        manager.allocate(request, 8)
        assert max(manager.block_table(request)) < 2
        manager.free(request)


def test_a_manager_of_a_million_blocks_gives_them_all_out_and_takes_them_back() -> None:
    manager = BlockManager(1_000_000, 16)
    manager.allocate("a", 16_000_000)
    assert manager.num_free == 0
    manager.free("a")
    assert manager.num_free == 1_000_000
    manager.check()


def test_the_public_names_of_a_manager_are_the_documented_ones() -> None:
    assert {name for name in dir(BlockManager) if not name.startswith("_")} == {
        "allocate",
        "append",
        "append_all",
        "block_size",
        "block_table",
        "can_allocate",
        "check",
        "commit",
        "flush",
        "fork",
        "free",
        "lookup",
        "num_blocks",
        "num_cached",
        "num_exclusive",
        "num_free",
        "num_tokens",
        "num_used",
        "preempt",
        "sliding_window",
        "stats",
        "subscribe",
        "truncate",
        "truncate_all",
    }
