"""Why a call of the books is refused."""

from __future__ import annotations

from collections.abc import Hashable


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks for a call. Nothing was changed.

    Attributes
    ----------
    asked : int
        Blocks that the call needed.
    free : int
        Blocks that it could have had: the free ones, without those that it would have shared.
    evictable : int
        How many of `free` were cached.
    reserved : int
        How many of `free` the watermark keeps for the requests that run already.
    """

    def __init__(self, asked: int, free: int, evictable: int = 0, reserved: int = 0) -> None:
        super().__init__(asked, free, evictable, reserved)
        self.asked = asked
        self.free = free
        self.evictable = evictable
        self.reserved = reserved

    def __str__(self) -> str:
        cached = f" ({self.evictable} of them cached)" if self.evictable else ""
        kept = f", of which the watermark keeps {self.reserved}" if self.reserved else ""
        return f"{self.asked} blocks asked for, {self.free} free{cached}{kept}"


class _OfRequest(Exception):
    """An error that carries the name of a request."""

    def __init__(self, request: Hashable) -> None:
        super().__init__(request)
        self.request = request


class UnknownRequest(_OfRequest, KeyError):
    """A call named a request that holds nothing: never allocated, or freed already.

    Attributes
    ----------
    request : Hashable
        The name that was given.
    """

    def __str__(self) -> str:
        return f"request {self.request!r} is unknown: never allocated, or freed already"


class InFlight(_OfRequest, RuntimeError):
    """A call needs a request whose blocks are still being copied in, see `SwapSpace`.

    Attributes
    ----------
    request : Hashable
        The name that was given.
    """

    def __str__(self) -> str:
        return f"request {self.request!r} is being copied: finish its transfer first, or free it"
