"""An exception at any point of a call leaves the books whole, and the call done or not done.

KeyboardInterrupt is raised at every line of the package that a call runs through, and in the core
of the books at every bytecode instruction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paged_ops.blocks.errors import OutOfBlocks
from paged_ops.blocks.layer_groups import LayerGroup, LayerGroups
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.swap import SwapSpace
from paged_ops.distributed import request_transfer
from paged_ops.pool.kv_cache import PagedKVCache
from tests.support.broken_off import CORE_FILES, Scene, break_off, prove
from tests.support.line import Line, what_is_sent

A = list(range(100, 130))
B = list(range(200, 230))


# ------------------------------------------------------------------ one pool


def busy_manager(**options: Any) -> BlockManager:
    """Return a manager whose blocks are all shared, cached, or held by one; the last 2 are free."""
    manager = BlockManager(14, 4, **options)
    manager.allocate("gone", B[:9])
    manager.commit("gone")
    manager.free("gone")
    manager.allocate("a", A[:14])
    manager.commit("a", 8)
    manager.fork("a", "b")
    manager.fork("a", "c")
    manager.allocate("d", B[:4])
    manager.commit("d")
    manager.fork("d", "e")
    manager.truncate("e", 2)
    manager.free("d")  # e holds a block that is found by more than e has of it
    manager.allocate("f", 9)
    return manager


CALLS: dict[str, Callable[[BlockManager], object]] = {
    "flush": lambda m: m.flush(),
    "fork": lambda m: m.fork("a", "new"),
    "free": lambda m: m.free("e"),
    "free what is shared": lambda m: m.free("b"),
    "preempt": lambda m: m.preempt("f"),
    "commit": lambda m: m.commit("a"),
    "truncate": lambda m: m.truncate("a", 3),
    "truncate what is found": lambda m: m.truncate("e", 0),
    "append in place": lambda m: m.append("f", 2),
    "append to a shared block": lambda m: m.append("a", A[14:20]),
    "append to a block that is found": lambda m: m.append("e", [7]),
    "allocate, evicting what it doesn't hit": lambda m: m.allocate("new", 12),
    "allocate, with hits and evictions": lambda m: m.allocate("new", [*B[:9], *A[:6]]),
    "append_all": lambda m: m.append_all([("a", [1]), ("b", 1), ("c", [3] * 3), ("f", 4)]),
    "truncate_all": lambda m: m.truncate_all([("a", 5), ("b", 12), ("f", 0)]),
    "several calls in one": lambda m: rearrange(m),
}


def rearrange(manager: BlockManager) -> None:
    """Change one request several times, and others, in what is one call to everybody else."""
    with manager.lock, manager.ledger as ledger:
        ledger.make_room(["a", "f"], [17, 14])
        held = ledger.find("a")
        ledger.commit(held, 14)
        ledger.cut(held, 6)
        ledger.end("b")
        ledger.grow([(held, 4, None)])
        ledger.fork(held, "new")


def test_changes_that_are_left_by_an_error_are_taken_back_together() -> None:
    manager = busy_manager()
    scene = Scene(lambda: rearrange(manager), manager)
    before = scene.state()
    with contextlib.suppress(ZeroDivisionError), manager.lock, manager.ledger as ledger:
        ledger.make_room(["a", "f"], [17, 14])
        ledger.end("b", preempted=True)
        ledger.flush()
        _ = 1 / 0
    assert scene.state() == before
    scene.call()
    scene.end()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_manager_may_be_broken_off_anywhere(name: str) -> None:
    def setting() -> Scene:
        manager = busy_manager()
        return Scene(lambda: CALLS[name](manager), manager)

    prove(setting, CORE_FILES)


@pytest.mark.parametrize("name", ["commit", "append", "truncate_all", "fork"])
def test_a_call_of_a_manager_with_a_window_may_be_broken_off_anywhere(name: str) -> None:
    calls: dict[str, Callable[[BlockManager], object]] = {
        "commit": lambda m: m.commit("a"),
        "append": lambda m: m.append("a", A[20:30]),
        "truncate_all": lambda m: m.truncate_all([("a", 19), ("b", 18)]),
        "fork": lambda m: m.fork("a", "new"),
    }

    def setting() -> Scene:
        manager = BlockManager(12, 4, sliding_window=6)
        manager.allocate("a", A[:20])
        manager.commit("a", 9)
        manager.fork("a", "b")
        return Scene(lambda: calls[name](manager), manager)

    prove(setting)


LOOKS: dict[str, Callable[[BlockManager], object]] = {
    "lookup": lambda m: m.lookup(A),
    "stats": lambda m: m.stats(),
    "block_table": lambda m: m.block_table("a"),
    "num_free": lambda m: m.num_free,
    "check": lambda m: m.check(),
    "refused": lambda m: refused(m),
}


def refused(manager: BlockManager) -> None:
    with contextlib.suppress(OutOfBlocks):
        manager.append_all([("a", 1), ("f", 100)])


@pytest.mark.parametrize("name", LOOKS)
def test_looking_may_be_broken_off_anywhere(name: str) -> None:
    def setting() -> Scene:
        manager = busy_manager()
        return Scene(lambda: LOOKS[name](manager), manager)

    prove(setting)


@pytest.mark.parametrize("name", CALLS)
def test_the_undoing_of_a_call_may_be_broken_off_anywhere_too(name: str) -> None:
    """All steps of the call are done, but it is left by an exception, and so is its undoing."""
    before = Scene(lambda: None, busy_manager()).state()
    point = 0
    while True:
        manager = busy_manager()
        journal = manager.ledger.journal
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "__exit__", leave_undone)
            with contextlib.suppress(KeyboardInterrupt):
                CALLS[name](manager)
        assert journal.notes
        if not break_off(journal.undo, point, CORE_FILES):
            break
        scene = Scene(partial(CALLS[name], manager), manager)
        assert scene.state() == before
        scene.call()
        scene.end()
        point += 1
    assert point > 10


def leave_undone(*_: object) -> None:
    """Leave a change with its notes, as if its undoing had been broken off at once."""
    raise KeyboardInterrupt


# ------------------------------------------------------------------ several pools


GROUP_CALLS: dict[str, Callable[[LayerGroups], object]] = {
    "allocate": lambda g: g.allocate("new", A[:14]),
    "append": lambda g: g.append("a", [1, 2, 3]),
    "append_all": lambda g: g.append_all([("a", 1), ("b", [1] * 5)]),
    "commit": lambda g: g.commit("a"),
    "fork": lambda g: g.fork("a", "new"),
    "truncate": lambda g: g.truncate("a", 12),
    "truncate_all": lambda g: g.truncate_all([("a", 12), ("b", 11)]),
    "free": lambda g: g.free("b"),
    "preempt": lambda g: g.preempt("a"),
    "flush": lambda g: g.flush(),
    "lookup": lambda g: g.lookup(A),
    "num_tokens": lambda g: g.num_tokens("a"),
    "check": lambda g: g.check(),
}


@pytest.mark.parametrize("name", GROUP_CALLS)
def test_a_call_of_several_pools_may_be_broken_off_anywhere(name: str) -> None:
    def setting() -> Scene:
        groups = LayerGroups({"full": LayerGroup(12), "window": LayerGroup(9, 6)}, 4)
        groups.allocate("a", A[:14])
        groups.commit("a", 9)
        groups.fork("a", "b")
        return Scene(lambda: GROUP_CALLS[name](groups), groups["full"], groups["window"])

    prove(setting)


# ------------------------------------------------------------------ copies in flight


def swapping() -> tuple[BlockManager, SwapSpace, BlockManager]:
    """Return books of a device, and those of a host where a and b wait, of whom c has blocks."""
    manager = BlockManager(10, 4)
    with pytest.MonkeyPatch.context() as patch:
        made: list[BlockManager] = []
        patch.setattr(
            "paged_ops.blocks.swap.BlockManager",
            lambda *sizes, **options: made.append(BlockManager(*sizes, **options)) or made[0],
        )
        space = SwapSpace(manager, 10)
    manager.allocate("a", A[:10])
    manager.commit("a")
    manager.fork("a", "b")
    manager.append("b", 3)
    manager.fork("a", "c")
    space.swap_out(["a", "b"]).finish()
    return manager, space, made[0]


SWAPS: dict[str, Callable[[BlockManager, SwapSpace], Callable[[], object]]] = {
    "out": lambda m, s: lambda: s.swap_out(["c"]),
    "in": lambda m, s: lambda: s.swap_in(["b", "a"]),
    "finish out": lambda m, s: s.swap_out(["c"]).finish,
    "finish in": lambda m, s: s.swap_in(["b", "a"]).finish,
    "free there": lambda m, s: lambda: s.free("a"),
    "free on its way out": lambda m, s: (s.swap_out(["c"]), lambda: s.free("c"))[1],
    "free on its way in": lambda m, s: (s.swap_in(["a"]), lambda: m.free("a"))[1],
    "look": lambda m, s: lambda: ("a" in s, s.num_blocks_needed(["a", "b"]), s.transfers),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_swap_may_be_broken_off_anywhere(name: str) -> None:
    def setting() -> Scene:
        manager, space, host = swapping()
        return Scene(SWAPS[name](manager, space), manager, host)

    prove(setting)


def test_a_transfer_whose_call_was_broken_off_when_it_had_begun_is_not_lost() -> None:
    point, begun = 0, 0
    while True:
        manager, space, _ = swapping()
        if not break_off(partial(space.swap_in, ["a"]), point, CORE_FILES):
            break
        for transfer in space.transfers:
            transfer.finish()
            assert manager.num_tokens("a") == 10
            begun += 1
        assert ("a" in space) == (not manager.ledger.requests.get("a"))
        point += 1
    assert begun


# ------------------------------------------------------------------ requests from another rank


def pool_of_a() -> tuple[BlockManager, PagedKVCache]:
    manager = BlockManager(12, 4)
    manager.allocate("a", A[:14])
    manager.commit("a", 9)
    return manager, PagedKVCache(1, 12, 4, 1, 1)


def test_sending_a_request_may_be_broken_off_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def setting() -> Scene:
        manager, cache = pool_of_a()

        def send() -> None:
            monkeypatch.setattr(request_transfer, "dist", Line({"rows": [0, 3]}))
            request_transfer.send_request(manager, cache, "a", 1)

        return Scene(send, manager)

    prove(setting)


def test_receiving_a_request_may_be_broken_off_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    books = what_is_sent(*pool_of_a(), "a", monkeypatch)

    def setting() -> Scene:
        manager = BlockManager(8, 4, watermark=0.2)
        for request, tokens in [("earlier", A[:9]), ("gone", B[:13])]:
            manager.allocate(request, tokens)
            manager.commit(request)
        manager.free("gone")
        cache = PagedKVCache(1, 8, 4, 1, 1)

        def receive() -> None:
            monkeypatch.setattr(request_transfer, "dist", Line(books))
            request_transfer.receive_request(manager, cache, 0)

        return Scene(receive, manager)

    prove(setting)


def test_the_end_of_a_transfer_that_fails_may_be_broken_off_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    books = what_is_sent(*pool_of_a(), "a", monkeypatch)

    class Dead(Line):
        def recv(self, *_: object, **__: object) -> None:
            raise ConnectionError

    def setting() -> Scene:
        manager, cache = BlockManager(8, 4), PagedKVCache(1, 8, 4, 1, 1)

        def receive() -> None:
            monkeypatch.setattr(request_transfer, "dist", Dead(books))
            with contextlib.suppress(ConnectionError):
                request_transfer.receive_request(manager, cache, 0)

        return Scene(receive, manager)

    prove(setting)
