"""What becomes findable in a prefix cache and what ceases to be, as a stream to follow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """A block can be found from now on.

    Attributes
    ----------
    digest : bytes
        The name of its content, see `chain_digests`.
    block : int
        Where it lies.
    """

    digest: bytes
    block: int


@dataclass(frozen=True)
class Removed:
    """A block can't be found any longer: evicted, or about to be written anew.

    Attributes
    ----------
    digest : bytes
        The name that its content had.
    block : int
        Where it lay.
    """

    digest: bytes
    block: int


@dataclass(frozen=True)
class Cleared:
    """No block can be found any longer."""


Event = Stored | Removed | Cleared


class EventStream:
    """The events of one manager since the last look, in order.

    Made by `BlockManager.subscribe`. The first reading begins with `Cleared` and a `Stored` for
    each block that is findable then, so a router that applies every event in turn to a dictionary
    knows the cache. A stream that holds more than its limit when an event comes forgets all it
    has, and starts over in the same way.

    Reading is safe from any thread. The stream ends when it is no longer referenced.

    Examples
    --------
    >>> from paged_ops.blocks.manager import BlockManager
    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> stream = manager.subscribe()
    >>> _ = manager.allocate("a", [7, 8, 9])
    >>> manager.commit("a")
    >>> [type(event).__name__ for event in stream.read()]
    ['Cleared', 'Stored']
    >>> manager.flush(), stream.read()
    (2, [Cleared()])
    """

    def __init__(
        self, max_events: int, lock: threading.Lock, present: Callable[[], Iterable[Stored]]
    ) -> None:
        self._max_events = max_events
        self._lock = lock  # the manager's
        self._present = present  # lists what is findable; the lock is held
        self._events: deque[Event] = deque()
        self._starts_over = True

    def read(self) -> list[Event]:
        """Return the events since the last call and forget them."""
        with self._lock:
            if self._starts_over:
                events: list[Event] = [Cleared(), *self._present()]
            else:
                events = list(self._events)
            self._starts_over = True  # unless this reading goes through
            self._events.clear()
            self._starts_over = False
            return events

    def put(self, event: Event) -> None:
        """Add an event; the prefix cache calls this, and the lock is held."""
        if self._starts_over:
            return
        if len(self._events) < self._max_events:
            self._events.append(event)
        else:
            self.start_over()

    def start_over(self) -> None:
        """Begin the next reading anew; the prefix cache calls this, and the lock is held."""
        self._starts_over = True
        self._events.clear()
