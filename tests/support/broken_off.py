"""Break a call of the books off at any point, and see what is left."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paged_ops
from paged_ops.blocks.arrival import settle
from paged_ops.blocks.events import Cleared, Stored
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager

PACKAGE = str(Path(paged_ops.__file__).parent)
CORE = ("ledger", "stock", "holding", "journal", "prefix_cache", "arrival", "events")
CORE_FILES = frozenset(f"{PACKAGE}/blocks/{name}.py" for name in CORE)
HANDLING = frozenset({"PUSH_EXC_INFO", "WITH_EXCEPT_START", "COPY", "POP_EXCEPT", "RERAISE"})


def break_off(
    call: Callable[[], object], point: int, by_instruction: frozenset[str] = frozenset()
) -> bool:
    """Make a call, and raise KeyboardInterrupt at one of its points; say if it has that many.

    Points are the lines of the package, and in some of its files all bytecode instructions.
    """
    points = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal points
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        in_core = frame.f_code.co_filename in by_instruction
        if in_core:
            frame.f_trace_opcodes = True
        if event == ("opcode" if in_core else "line") and not at_handler(frame):
            points += 1
            if points > point:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def at_handler(frame: FrameType) -> bool:
    """Say whether an exception is on its way to or from its handler.

    The interpreter admits none there, and would take the first for still being handled.
    """
    instruction = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[instruction] in HANDLING


def state_of(ledger: Ledger) -> Any:
    """Return all that a caller can see of the books, but for the numbers of blocks."""
    with ledger.lock, ledger:
        numbers: dict[int, int] = {}
        requests = {
            name: (
                [numbers.setdefault(block, len(numbers)) for block in held.table],
                held.num_tokens,
                held.tokens.tolist(),
                held.num_released,
                held.generation == ledger.generation,
            )
            for name, held in sorted(ledger.requests.items(), key=lambda each: str(each[0]))
        }
        counters = ledger.prompt_tokens, ledger.hit_tokens, ledger.preemptions
        flights = sorted(ledger.arriving), len(ledger.flights)
        return requests, ledger.stock.num_used, counters, flights


def found(ledger: Ledger) -> set[tuple[bytes, int]]:
    return {(event.digest, event.block) for event in ledger.stock.prefix.stored()}


class Router:
    """Follows the events of a manager."""

    def __init__(self, manager: BlockManager) -> None:
        self.stream, self.known = manager.subscribe(), dict[bytes, int]()
        self.ledger = manager.ledger
        self.follow()  # from now on it hears of changes only

    def follow(self) -> None:
        for event in self.stream.read():
            if isinstance(event, Cleared):
                self.known.clear()
            elif isinstance(event, Stored):
                self.known[event.digest] = event.block
            else:
                assert self.known.pop(event.digest) == event.block
        assert set(self.known.items()) == found(self.ledger)


class Scene:
    """Books before a call.

    Parameters
    ----------
    call : callable
        The call; it may be made again if it has not happened.
    *books : BlockManager
        All that it changes.
    look : callable, optional
        What else to look at, whatever has happened.
    """

    def __init__(
        self,
        call: Callable[[], object],
        *books: BlockManager,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.call = call
        self.books = books
        self.routers = [Router(manager) for manager in books]
        self._look = look

    def state(self) -> Any:
        for manager in self.books:
            assert not manager.lock.locked()
            manager.check()
        self._look()
        return [state_of(manager.ledger) for manager in self.books]

    def found(self) -> list[set[tuple[bytes, int]]]:
        return [found(manager.ledger) for manager in self.books]

    def end(self) -> None:
        """End all that exists: every block comes back."""
        for manager in self.books:
            with manager.lock, manager.ledger as ledger:
                for owner in list(ledger.flights):
                    settle(ledger, owner)
                for request in list(ledger.requests):
                    ledger.end(request)
            manager.check()
            assert manager.num_free == manager.num_blocks
            manager.allocate("all", manager.num_blocks * manager.block_size)
            manager.check()


Setting = Callable[[], Scene]


def prove(setting: Setting, by_instruction: frozenset[str] = frozenset()) -> None:
    """Break a call off everywhere, look at the books, and go on."""
    scene = setting()
    before, found_before = scene.state(), scene.found()
    scene.call()
    after, found_after = scene.state(), scene.found()
    outcomes, point = [], 0
    while break_off((scene := setting()).call, point, by_instruction):
        state = scene.state()
        assert state in (before, after), point
        happened = state == after != before
        for now, old, new in zip(scene.found(), found_before, found_after, strict=True):
            assert now <= (new if happened else old | new)
        if not happened:
            scene.call()
            assert scene.state() == after
        for router in scene.routers:
            router.follow()
        scene.end()
        outcomes.append(happened)
        point += 1
    assert point > 4
    assert outcomes == sorted(outcomes)  # not done, and from one point on done
    assert before == after or not outcomes[0]
