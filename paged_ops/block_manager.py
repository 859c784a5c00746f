"""Which request owns which block of the pool. Plain Python: no tensors, no torch.

Every request has a table of block ids; every block counts how many tables hold it. A block whose
count has gone back to zero lies in the deque of free ids. Blocks that were never handed out are
free too, but neither counted nor listed, so a pool costs as much as the part of it that was ever
in use. Only ``_take`` and ``_release`` make blocks owned and free. Each public call first works
out everything that can refuse it, and only then changes something, so a call that raises has
changed nothing.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

INT32_MAX = 2**31 - 1
"""Block ids and sequence lengths travel in int32 tensors."""

# Where tokens are added, a caller says how many, or gives their ids: a sequence, or an array or
# tensor of one dimension (which has an __index__, whether it works or not).
Tokens = SupportsIndex | Sequence[int]


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks for a call. Nothing was changed.

    Attributes
    ----------
    asked : int
        Blocks that the call needed.
    free : int
        Blocks that were free.
    """

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(asked, free)
        self.asked = asked
        self.free = free

    def __str__(self) -> str:
        return f"{self.asked} blocks asked for, {self.free} free"


class UnknownRequest(KeyError):
    """A call named a request that holds nothing: never allocated, or freed already.

    Attributes
    ----------
    request : Hashable
        The name that was given.
    """

    def __init__(self, request: Hashable) -> None:
        super().__init__(request)
        self.request = request

    def __str__(self) -> str:
        return f"request {self.request!r} is unknown: never allocated, or freed already"


@dataclass(frozen=True)
class BlockStats:
    """The books of a pool at one moment, in blocks and in token slots.

    Attributes
    ----------
    block_size : int
        Slots per block.
    num_blocks, num_free, num_used : int
        Blocks of the pool, free ones, and distinct ones that requests hold.
    num_requests : int
        Requests that exist, those of 0 tokens included.
    request_tokens : int
        Sum of the requests' lengths: a token shared by two requests counts twice.
    live_tokens : int
        Distinct tokens: a shared token counts once. Of a block whose owners fill it differently,
        the fullest owner counts.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_used: int
    num_requests: int
    request_tokens: int
    live_tokens: int

    @property
    def num_slots(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def allocated_slots(self) -> int:
        """Slots of the blocks in use, whether filled or not."""
        return self.num_used * self.block_size

    @property
    def internal_waste(self) -> int:
        """Slots of blocks in use that hold no token: at most block_size - 1 per request."""
        return self.allocated_slots - self.live_tokens

    @property
    def pool_utilisation(self) -> float:
        """Share of all slots that hold a token, 0 to 1."""
        return self.live_tokens / self.num_slots

    @property
    def allocation_utilisation(self) -> float:
        """Share of the slots in use that hold a token, 0 to 1; 1 when no block is in use."""
        return self.live_tokens / self.allocated_slots if self.num_used else 1.0

    @property
    def effective_utilisation(self) -> float:
        """Tokens served per slot of the pool; above 1 when sharing saves more than waste costs."""
        return self.request_tokens / self.num_slots


@dataclass(slots=True)
class _Request:
    """What one request holds. Invariant: len(table) == ceil(num_tokens / block_size)."""

    table: list[int]
    num_tokens: int


class BlockManager:
    """Hands out the blocks of a pool to requests, shares them, and takes them back.

    Every call costs O(1) per block it touches, whatever the size of the pool, and is atomic: a
    call that raises has changed nothing. A lock around each call makes it atomic among threads as
    well. Two calls in a row are not one: rather than asking `can_allocate` first, call `allocate`
    and catch `OutOfBlocks`. Don't call the manager from a finaliser or a signal handler, which
    may run while its own thread holds the lock.

    The most recently freed blocks are handed out first, and new ones only when there are none:
    they are in the caches of the processor, and the memory of a pool that is committed lazily
    grows only as far as it is really used.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool, 1 to 2**31 - 1. The books take about 50 bytes for each block that was
        ever handed out, and nothing for the others.
    block_size : int
        Tokens per block, 1 to 2**31 - 1.

    Raises
    ------
    TypeError
        An argument is no integer (a bool is none either).
    ValueError
        An argument is out of its range.

    Examples
    --------
    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> manager.allocate("a", 6)                    # a prompt of 6 tokens
    0
    >>> manager.block_table("a")
    [0, 1]
    >>> manager.fork("a", "b")                      # b shares both blocks
    >>> manager.append("b", 1)                      # block 1 is partial and shared: b gets its own
    [(1, 2)]
    >>> manager.block_table("a"), manager.block_table("b")
    ([0, 1], [0, 2])
    >>> manager.free("a")
    >>> manager.num_used, manager.num_free
    (2, 6)
    >>> manager.allocate("c", 100)
    Traceback (most recent call last):
        ...
    paged_ops.block_manager.OutOfBlocks: 25 blocks asked for, 6 free
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = checked_int("num_blocks", num_blocks, 1, INT32_MAX)
        self._block_size = checked_int("block_size", block_size, 1, INT32_MAX)
        self._ref_counts: list[int] = []  # of the blocks handed out so far, which are the first
        self._free: deque[int] = deque()  # those that came back; the left end goes out next
        self._requests: dict[Hashable, _Request] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"BlockManager(num_blocks={self._num_blocks}, block_size={self._block_size}, "
            f"num_used={self._count_used()}, num_requests={len(self._requests)})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a BlockManager can't be copied or pickled: two managers would hand out the same blocks"
        )

    # ---------------------------------------------------------------- changing what requests hold

    def allocate(self, request: Hashable, tokens: Tokens) -> int:
        """Make a request that holds blocks for its first tokens.

        Parameters
        ----------
        request : Hashable
            The name of the request. It must not exist.
        tokens : int or sequence of int
            How many tokens, 0 or more, or their ids. Only their number matters here.

        Returns
        -------
        int
            How many of the tokens, from the first on, are in the cache already and need no
            computing: 0.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free.
        ValueError
            The request exists, or the count is negative.
        TypeError
            `tokens` is neither a count nor a sequence, or `request` can't be hashed.
        """
        num_tokens = _num_tokens(tokens)
        with self._lock:
            self._refuse_existing("request", request)
            blocks = self._blocks_for(num_tokens)
            self._refuse_beyond_free(blocks)
            self._requests[request] = _Request(self._take(blocks), num_tokens)
        return 0

    def append(self, request: Hashable, tokens: Tokens) -> list[tuple[int, int]]:
        """Make a request longer.

        Where the new tokens begin inside a block that other requests hold too, this request gets
        a fresh block in its place (copy-on-write).

        Parameters
        ----------
        request : Hashable
            The request.
        tokens : int or sequence of int
            How many tokens to add, 0 or more, or their ids. Adding 0 tokens does nothing: no
            block is taken and none is copied.

        Returns
        -------
        list of (int, int)
            Block copies (source, destination) to make, in the pool, before the new tokens are
            written and before any other request is truncated or freed. The pairs of several
            appends in a row may be joined into one copy.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free.
        UnknownRequest
            The request does not exist.
        ValueError, TypeError
            As `allocate`.
        """
        return self._append_all([(request, _num_tokens(tokens))])

    def _append_all(self, growth: Sequence[tuple[Hashable, int]]) -> list[tuple[int, int]]:
        """Append to several requests, each named once, or to none of them.

        This is `append` for a batch that must grow as a whole.
        """
        with self._lock:
            grown = [(self._find(request), count) for request, count in growth]
            self._refuse_beyond_free(self._blocks_to_grow(grown))
            return [copy for held, count in grown for copy in self._grow(held, count)]

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Make a request that shares every block of another one.

        Parent and child are equals afterwards: whichever first appends into the shared partial
        block gets a copy of it.

        Parameters
        ----------
        parent : Hashable
            The request to share.
        child : Hashable
            The name of the new request. It must not exist.

        Raises
        ------
        UnknownRequest
            `parent` does not exist.
        ValueError
            `child` exists.
        """
        with self._lock:
            held = self._find(parent)
            self._refuse_existing("child", child)
            for block in held.table:
                self._ref_counts[block] += 1
            self._requests[child] = _Request(held.table.copy(), held.num_tokens)

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """Make a request shorter, and give up the blocks that it needs no longer.

        The block that the new end lies in stays as it is, shared or not; a later `append` into
        it copies it if it is shared then.

        Parameters
        ----------
        request : Hashable
            The request.
        num_tokens : int
            Tokens to keep, 0 to the present number. With 0 the request still exists.

        Raises
        ------
        UnknownRequest
            The request does not exist.
        ValueError, TypeError
            `num_tokens` is out of its range, or no integer.
        """
        with self._lock:
            held = self._find(request)
            keep = checked_int("num_tokens", num_tokens, 0, held.num_tokens)
            blocks = self._blocks_for(keep)
            released = held.table[blocks:]
            del held.table[blocks:]
            held.num_tokens = keep
            self._release(released)

    def free(self, request: Hashable) -> None:
        """End a request. Blocks that no other request shares become free.

        Parameters
        ----------
        request : Hashable
            The request.

        Raises
        ------
        UnknownRequest
            The request does not exist, or was freed already.
        """
        with self._lock:
            held = self._find(request)
            del self._requests[request]
            self._release(held.table)

    # ---------------------------------------------------------------- looking

    def block_table(self, request: Hashable) -> list[int]:
        """Return the block ids of a request in the order of its tokens; the list is a copy."""
        with self._lock:
            return self._find(request).table.copy()

    def num_tokens(self, request: Hashable) -> int:
        """Return the length of a request in tokens."""
        with self._lock:
            return self._find(request).num_tokens

    def can_allocate(self, num_tokens: int) -> bool:
        """Say whether `allocate` of a new request with so many tokens would find its blocks.

        Parameters
        ----------
        num_tokens : int
            Tokens of the request, 0 or more.
        """
        blocks = self._blocks_for(checked_int("num_tokens", num_tokens, 0))
        return blocks <= self.num_free

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._num_blocks - self.num_used

    @property
    def num_used(self) -> int:
        """Distinct blocks that requests hold."""
        with self._lock:
            return self._count_used()

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    def stats(self) -> BlockStats:
        """Count what the pool holds. Costs O(requests), not O(blocks).

        Returns
        -------
        BlockStats
            The counts, of one moment.
        """
        with self._lock:
            used = self._count_used()
            return BlockStats(
                block_size=self._block_size,
                num_blocks=self._num_blocks,
                num_free=self._num_blocks - used,
                num_used=used,
                num_requests=len(self._requests),
                request_tokens=sum(held.num_tokens for held in self._requests.values()),
                live_tokens=used * self._block_size - self._unfilled_slots(),
            )

    def check(self) -> None:
        """Prove that the books are in order. Costs O(blocks); for tests and for idle moments.

        Every block is free or owned, never both; a block's count is the number of tables that
        hold it; every table is as long as its tokens need; no id is out of range or listed twice.

        Raises
        ------
        AssertionError
            Something is wrong, with what it is. Raised under ``python -O`` too.
        """
        with self._lock:
            owners: Counter[int] = Counter()
            for request, held in self._requests.items():
                needed = self._blocks_for(held.num_tokens)
                if len(held.table) != needed:
                    raise AssertionError(
                        f"request {request!r} has {len(held.table)} blocks, but its "
                        f"{held.num_tokens} tokens need {needed}"
                    )
                if len(set(held.table)) != len(held.table):
                    raise AssertionError(f"request {request!r} lists a block twice: {held.table}")
                owners.update(held.table)
            self._check_blocks(owners)

    # ---------------------------------------------------------------- inside; the lock is held

    def _blocks_to_grow(self, grown: Iterable[tuple[_Request, int]]) -> int:
        """Count the blocks that growing all of these takes, copies of shared blocks included."""
        blocks = 0
        gone: dict[int, int] = {}  # owners that a copy will have taken off a shared block by then
        for held, count in grown:
            blocks += self._blocks_for(held.num_tokens + count) - len(held.table)
            if count and held.num_tokens % self._block_size:
                last = held.table[-1]
                if self._ref_counts[last] - gone.get(last, 0) > 1:
                    gone[last] = gone.get(last, 0) + 1
                    blocks += 1
        return blocks

    def _grow(self, held: _Request, count: int) -> list[tuple[int, int]]:
        """Append to one request, for which enough blocks are known to be free."""
        copies = []
        if count and held.num_tokens % self._block_size:
            source = held.table[-1]
            if self._ref_counts[source] > 1:
                self._ref_counts[source] -= 1
                held.table[-1:] = self._take(1)
                copies.append((source, held.table[-1]))
        held.num_tokens += count
        held.table += self._take(self._blocks_for(held.num_tokens) - len(held.table))
        return copies

    def _take(self, blocks: int) -> list[int]:
        """Take free blocks, each with one owner from now on."""
        taken = [self._free.popleft() for _ in range(min(blocks, len(self._free)))]
        for block in taken:
            self._ref_counts[block] = 1
        fresh = blocks - len(taken)
        taken += range(len(self._ref_counts), len(self._ref_counts) + fresh)
        self._ref_counts += [1] * fresh
        return taken

    def _release(self, blocks: list[int]) -> None:
        """Take one owner off each block; the last owner's leaving makes the block free."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free.appendleft(block)

    def _count_used(self) -> int:
        return len(self._ref_counts) - len(self._free)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _find(self, request: Hashable) -> _Request:
        try:
            return self._requests[request]
        except KeyError:
            raise UnknownRequest(request) from None
        except TypeError:
            raise _unhashable("request", request) from None

    def _refuse_existing(self, name: str, request: Hashable) -> None:
        try:
            exists = request in self._requests
        except TypeError:
            raise _unhashable(name, request) from None
        if exists:
            raise ValueError(f"{name} is {request!r}, which exists already; expected a new one")

    def _refuse_beyond_free(self, blocks: int) -> None:
        free = self._num_blocks - self._count_used()
        if blocks > free:
            raise OutOfBlocks(blocks, free)

    def _unfilled_slots(self) -> int:
        """Count the slots of blocks in use that no owner fills.

        A block has such slots only if it is the partial last block of each of its owners: an
        owner that holds it further forward, or as a full last block, fills it.
        """
        fill: dict[int, int] = {}
        partial_owners: Counter[int] = Counter()
        for held in self._requests.values():
            if tail := held.num_tokens % self._block_size:
                last = held.table[-1]
                fill[last] = max(fill.get(last, 0), tail)
                partial_owners[last] += 1
        return sum(
            self._block_size - tail
            for block, tail in fill.items()
            if partial_owners[block] == self._ref_counts[block]
        )

    def _check_blocks(self, owners: Counter[int]) -> None:
        """Check every block against the number of tables that were seen to hold it."""
        if len(self._ref_counts) > self._num_blocks:
            raise AssertionError(
                f"{len(self._ref_counts)} blocks were handed out, of {self._num_blocks}"
            )
        free = Counter(self._free)
        handed_out = range(len(self._ref_counts))
        strangers = [block for block in free.keys() | owners.keys() if block not in handed_out]
        if strangers:
            raise AssertionError(f"blocks that were never handed out: {sorted(strangers)}")
        for block, ref_count in enumerate(self._ref_counts):
            if ref_count != owners[block]:
                raise AssertionError(
                    f"block {block} counts {ref_count} owners, but {owners[block]} tables hold it"
                )
            if free[block] != (0 if ref_count else 1):
                raise AssertionError(
                    f"block {block} has {ref_count} owners and is {free[block]} times in the "
                    f"free list"
                )


def checked_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return an integer argument as an int, or refuse it with its name, value and limits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None
    if number < minimum or (maximum is not None and number > maximum):
        limit = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
        raise ValueError(f"{name} is {number}, expected {limit}")
    return number


def _num_tokens(tokens: Tokens) -> int:
    """Return how many tokens are meant by a count or by a sequence of ids."""
    dimensions = getattr(tokens, "ndim", 0)  # of an array or a tensor; len() sees the first one
    if dimensions > 1:
        raise TypeError(f"tokens has {dimensions} dimensions, expected 1")
    if dimensions == 1 or (isinstance(tokens, Sequence) and not isinstance(tokens, str)):
        return len(tokens)  # type: ignore[arg-type]
    if not hasattr(tokens, "__index__"):
        raise TypeError(f"tokens is {tokens!r}, expected a count or a sequence of token ids")
    return checked_int("tokens", tokens, 0)


def _unhashable(name: str, request: object) -> TypeError:
    return TypeError(f"{name} is {request!r}, expected something that can be hashed")
