"""What takes a change back that is broken off, wherever that happens.

A change of the books is many steps, and an exception may come between any two of them: a
KeyboardInterrupt comes when it likes. So a change is made inside ``with ledger.lock, ledger:``, and
notes, before each step that changes what somebody holds, how to take that step back. Left by an
exception, the notes are carried out in reverse; if that is broken off as well, whoever opens the
books next begins anew with it. This is sound because

- a note says what was, not by how much it changed: to follow it twice, or for a step that was never
  made, does no harm;
- all else in the books follows from what is held, and is made anew from it (`Ledger.rebuild`);
- a change has happened from the moment that the notes are dropped, which is one step.

Only the books are taken back. What is written to the pool inside a change goes into blocks that it
has taken, and before it gives any back: these might be the same, and are their old holders' again.

Several ledgers may share a journal. They have one lock then, and change together or not at all.
"""

from __future__ import annotations

import threading
from typing import Any


class Journal:
    """The notes of the change under way, and the lock that admits one at a time.

    Attributes
    ----------
    lock : threading.Lock
        Held during each change. It is a ``with`` of its own, because no exception can come between
        taking a lock and being inside of its ``with``, which no function in Python can promise.
    notes : list of (Ledger, callable, argument, ...)
        Whose books change, and what takes that back.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.notes: list[tuple[Any, ...]] = []

    def undo(self) -> None:
        """Take back what the notes are about."""
        for _, undo, *arguments in reversed(self.notes):
            undo(*arguments)
        for ledger in {note[0] for note in self.notes}:
            ledger.rebuild()
        self.notes.clear()
