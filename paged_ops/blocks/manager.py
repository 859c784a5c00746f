"""Which request owns which block of the pool. Plain Python: no tensors, no torch.

Every request has a table of block ids; every block counts how many tables hold it. A block whose
count has gone back to zero is free: it lies in the deque of free ids or, if its content can still
be found, among the idle blocks of the prefix cache. Blocks that were never handed out are free too,
but neither counted nor listed, so a pool costs as much as the part of it that was ever in use. Only
``_take``, ``_share`` and ``_release`` make blocks owned and free. Each public call first works out
everything that can refuse it, and only then changes something, so a call that raises has changed
nothing.

No block is written while its content can be found: `commit` publishes full blocks only, and an
append that begins inside a block gets a copy of it if others hold it, or unpublishes it if not.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, SupportsIndex

from paged_ops.arguments import INT32_MAX, checked_int
from paged_ops.blocks.digest import ExtraKeys, PlacedKey, extend_chain, placed_keys, token_array
from paged_ops.blocks.events import EventStream
from paged_ops.blocks.prefix_cache import PrefixCache
from paged_ops.blocks.stats import BlockStats

NO_BLOCK = -1
"""Stands in a table where there is no block: no block has this id, so it can't name a live one."""

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


class InFlight(RuntimeError):
    """A call needs a request whose blocks are still being copied in, see `SwapSpace`.

    Attributes
    ----------
    request : Hashable
        The name that was given.
    """

    def __init__(self, request: Hashable) -> None:
        super().__init__(request)
        self.request = request

    def __str__(self) -> str:
        return f"request {self.request!r} is being copied: finish its transfer first, or free it"


@dataclass(slots=True, eq=False)
class _Request:
    """What one request holds.

    Invariants: len(table) == ceil(num_tokens / block_size); the first `num_released` entries of
    the table, and no others, are NO_BLOCK; `tokens` are the ids of the first tokens, all of them
    where a prefix cache could use them; `digests` belong to the first full blocks of `tokens`.
    """

    table: list[int]
    num_tokens: int
    tokens: array[int] = field(default_factory=lambda: array("q"))
    keys: tuple[PlacedKey, ...] = ()
    digests: list[bytes] = field(default_factory=list)
    num_committed: int = 0  # blocks, from the first on, that commit has dealt with
    num_released: int = 0  # blocks, from the first on, that no later query can see
    generation: int = 0  # of the model's weights that the first token was computed with
    version: int = 0  # changes when the table does
    rewrites: int = 0  # changes when an entry of the table does; not when entries are added

    def fork(self) -> _Request:
        """Return a copy that shares nothing with this one but the blocks."""
        return _Request(
            self.table.copy(),
            self.num_tokens,
            self.tokens[:],
            self.keys,
            self.digests.copy(),
            self.num_committed,
            self.num_released,
            self.generation,
        )

    @property
    def blocks(self) -> list[int]:
        """The blocks that are held."""
        return self.table[self.num_released :]


@dataclass(slots=True, eq=False)
class _Prompt:
    """The tokens of a request to be, with the digests of its full blocks if they are known."""

    num_tokens: int
    tokens: array[int] | None
    keys: tuple[PlacedKey, ...]
    digests: list[bytes]


class BlockManager:
    """Hands out the blocks of a pool to requests, shares them, and takes them back.

    Every call costs O(1) per block it touches, whatever the size of the pool, and is atomic: a
    call that raises has changed nothing. A lock around each call makes it atomic among threads as
    well. Two calls in a row are not one: rather than asking `can_allocate` first, call `allocate`
    and catch `OutOfBlocks`. Don't call the manager from a finaliser or a signal handler, which
    may run while its own thread holds the lock.

    The most recently freed blocks are handed out first, then new ones: the former are in the
    caches of the processor, and the memory of a pool that is committed lazily grows only as far as
    it is really used. Cached blocks are evicted only when there are no others.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool, 1 to 2**31 - 1. The books take about 50 bytes for each block that was
        ever handed out, and nothing for the others; a cached block takes about 300 more.
    block_size : int
        Tokens per block, 1 to 2**31 - 1.
    prefix_caching : bool
        Whether prompts find the blocks of earlier ones. Only requests whose tokens were given as
        ids take part, and only blocks that `commit` has published are found.
    watermark : float
        The share of the pool, 0 to below 1, that new requests leave to those that run already; in
        whole blocks, rounded down. It holds while any block is in use.
    sliding_window : int, optional
        How many keys a query sees, its own included, in all layers that this pool serves. Blocks
        that no later query can see go back to the pool at each `commit`. None: all keys.

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
    paged_ops.blocks.manager.OutOfBlocks: 25 blocks asked for, 6 free

    With the tokens' ids, a prompt finds what an earlier one has left:

    >>> manager.allocate("d", [3, 1, 4, 1, 5, 9])
    0
    >>> manager.commit("d")                         # keys and values are written
    >>> manager.free("d")
    >>> manager.allocate("e", [3, 1, 4, 1, 5, 8])   # the first block is the same
    4
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        watermark: float = 0.0,
        *,
        sliding_window: int | None = None,
    ) -> None:
        self._num_blocks = checked_int("num_blocks", num_blocks, 1, INT32_MAX)
        self._block_size = checked_int("block_size", block_size, 1, INT32_MAX)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark is {watermark}, expected 0 or more and below 1")
        if sliding_window is not None:
            sliding_window = checked_int("sliding_window", sliding_window, 1)
        self._prefix_caching = bool(prefix_caching)
        self._watermark = int(watermark * self._num_blocks)
        self._window = sliding_window
        self._ref_counts: list[int] = []  # of the blocks handed out so far, which are the first
        self._free: deque[int] = deque()  # those that came back; the left end goes out next
        self._prefix = PrefixCache()
        self._requests: dict[Hashable, _Request] = {}
        self._arriving: dict[Hashable, _Request] = {}  # their blocks are being written by a copy
        self._holds: dict[object, list[_Request]] = {}  # what copies in flight hold
        self._generation = 0
        self._prompt_tokens = self._hit_tokens = self._evictions = self._preemptions = 0
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

    def allocate(self, request: Hashable, tokens: Tokens, extra_keys: ExtraKeys = ()) -> int:
        """Make a request that holds blocks for its first tokens.

        Blocks of the prompt that can be found are shared with whoever else holds them; the rest
        is new. At least one token is always left to compute, because a model must run on one
        to say what follows: of a prompt that is known to its last block, that block is new.

        Parameters
        ----------
        request : Hashable
            The name of the request. It must not exist.
        tokens : int or sequence of int
            How many tokens, 0 or more, or their ids. By a count nothing can be found.
        extra_keys : iterable of ExtraKey or (str, value)
            What the keys and values depend on besides the tokens: adapter, image, tenant. Only
            prompts with the same extra keys share blocks. See `prefix_digest.ExtraKey`.

        Returns
        -------
        int
            How many of the tokens, from the first on, are in the cache already and need no
            computing: a multiple of the block size.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free.
        ValueError
            The request exists, the count is negative, or the range of an extra key is wrong.
        TypeError
            `tokens` is neither a count nor a sequence of integers, `request` can't be hashed, or
            an extra key is of a wrong kind.
        """
        prompt = self._read_prompt(tokens, extra_keys)
        with self._lock:
            self._refuse_existing("request", request)
            hit_blocks = self._match(prompt, self._most_hits(prompt))
            self._refuse_admission(prompt, hit_blocks)
            return self._admit(request, prompt, hit_blocks)

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
            block is taken and none is copied. After tokens that were only counted, nothing more
            of the request is published.

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
        return self._append_all([(request, tokens)])

    def _append_all(self, growth: Sequence[tuple[Hashable, Tokens]]) -> list[tuple[int, int]]:
        """Append to several requests, each named once, or to none of them.

        This is `append` for a batch that must grow as a whole.
        """
        read = [(request, *self._read_tokens(tokens)) for request, tokens in growth]
        with self._lock:
            grown = [(self._find(request), count, ids) for request, count, ids in read]
            self._refuse_beyond_free(self._blocks_to_grow(grown))
            return [copy for held, count, ids in grown for copy in self._grow(held, count, ids)]

    def commit(self, request: Hashable, num_tokens: int | None = None) -> None:
        """Say that the keys and values of a request's first tokens are in the pool.

        Full blocks among them may be found by others from now on, if the ids of all tokens up to
        their end are known. With a sliding window, blocks that no query from token `num_tokens` on
        can see go back to the pool; the table keeps ``-1`` in their places. Call this after each
        step, with the tokens that were accepted.

        Parameters
        ----------
        request : Hashable
            The request.
        num_tokens : int, optional
            How many, 0 to the length of the request; fewer than before changes nothing. None: all.

        Raises
        ------
        UnknownRequest
            The request does not exist.
        ValueError, TypeError
            `num_tokens` is out of its range, or no integer.
        """
        with self._lock:
            held = self._find(request)
            self._commit(held, self._checked_written(held, num_tokens))

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
            self._fork(held, child)

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """Make a request shorter, and give up the blocks that it needs no longer.

        The block that the new end lies in stays as it is, shared or not; a later `append` into
        it copies it if it is shared then. What was cut and is shared with nobody can't be found
        any longer.

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
            `num_tokens` is out of its range, or no integer; or a query at the new end would see
            blocks that were released because they had left the sliding window.
        """
        with self._lock:
            held = self._find(request)
            self._cut(held, self._checked_keep(held, num_tokens))

    def free(self, request: Hashable) -> None:
        """End a request. Blocks that no other request shares become free.

        Blocks that a copy in flight reads or writes become free when the copy is finished.

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
            self._end(request)

    def preempt(self, request: Hashable) -> None:
        """End a request for now: `free`, counted as a preemption in the statistics.

        What it has committed stays cached until others need the blocks, so allocating it again by
        its ids may find much of it.

        Parameters
        ----------
        request : Hashable
            The request.

        Raises
        ------
        UnknownRequest
            The request does not exist.
        """
        with self._lock:
            self._end(request)
            self._preemptions += 1

    def flush(self) -> int:
        """Make everything unfindable, because the model's weights have changed.

        Cached blocks become plain free ones. Requests keep their blocks, but nothing of them is
        ever published, not even what they append: it attends to old keys and values.

        Returns
        -------
        int
            How many blocks requests still hold, all of them written under the old weights.
        """
        with self._lock:
            return self._flush()

    # ---------------------------------------------------------------- looking

    def lookup(self, tokens: Sequence[int], extra_keys: ExtraKeys = ()) -> int:
        """Return how many tokens of a prompt `allocate` would find now.

        Nothing is held or touched by this, so there is nothing to give back.

        Parameters
        ----------
        tokens : sequence of int
            Token ids.
        extra_keys : iterable of ExtraKey or (str, value)
            As for `allocate`.
        """
        prompt = self._read_prompt(tokens, extra_keys)
        with self._lock:
            return self._match(prompt, self._most_hits(prompt)) * self._block_size

    def block_table(self, request: Hashable) -> list[int]:
        """Return the block ids of a request in the order of its tokens; the list is a copy.

        Where a block was released because no later query can see it, the entry is -1.
        """
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
            Tokens of the request, 0 or more. Nothing of it is taken to be cached.
        """
        blocks = self._blocks_for(checked_int("num_tokens", num_tokens, 0))
        with self._lock:
            return not blocks or blocks + self._reserved() <= self._count_free()

    def num_exclusive(self, request: Hashable) -> int:
        """Return how many blocks would become free if a request ended: those it shares with none.

        Costs O(blocks of the request).
        """
        with self._lock:
            held = self._find(request)
            return [self._ref_counts[block] for block in held.blocks].count(1)

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, the cached ones included."""
        with self._lock:
            return self._count_free()

    @property
    def num_used(self) -> int:
        """Distinct blocks that requests hold."""
        with self._lock:
            return self._count_used()

    @property
    def num_cached(self) -> int:
        """Those of the free blocks whose content can be found."""
        with self._lock:
            return self._prefix.num_idle

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def sliding_window(self) -> int | None:
        """How many keys a query sees; None: all of them."""
        return self._window

    def subscribe(self, max_events: int = 100_000) -> EventStream:
        """Return a stream of what becomes findable, and what ceases to be, from now on.

        Parameters
        ----------
        max_events : int
            How many events the stream holds before it starts over, 1 or more.
        """
        limit = checked_int("max_events", max_events, 1)
        with self._lock:
            stream = EventStream(limit, self._lock, self._prefix.stored)
            self._prefix.follow(stream)
        return stream

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
                num_requests=len(self._requests) + len(self._arriving),
                request_tokens=sum(
                    held.num_tokens for held in (*self._requests.values(), *self._arriving.values())
                ),
                live_tokens=used * self._block_size - self._unfilled_slots(),
                num_cached=self._prefix.num_idle,
                prompt_tokens=self._prompt_tokens,
                hit_tokens=self._hit_tokens,
                evictions=self._evictions,
                preemptions=self._preemptions,
            )

    def check(self) -> None:
        """Prove that the books are in order. Costs O(blocks); for tests and for idle moments.

        Every block is free, cached or owned, and only one of these; a block's count is the number
        of tables that hold it; every table is as long as its tokens need; no id is out of range or
        listed twice; every digest belongs to the tokens of its block.

        Raises
        ------
        AssertionError
            Something is wrong, with what it is. Raised under ``python -O`` too.
        """
        with self._lock:
            owners: Counter[int] = Counter()
            for request, held in self._holders():
                self._check_request(request, held)
                self._check_found(request, held)
                owners.update(held.blocks)
            self._check_blocks(owners)

    # ---------------------------------------------------------------- inside: prompts and prefixes

    def _read_tokens(self, tokens: Tokens) -> tuple[int, array[int] | None]:
        """Return how many tokens are meant, and their ids where they matter and are known."""
        if type(tokens) is int and tokens >= 0:  # nearly always; the rest is slower
            return tokens, None
        dimensions = getattr(tokens, "ndim", 0)  # of an array or a tensor; len() sees the first one
        if dimensions > 1:
            raise TypeError(f"tokens has {dimensions} dimensions, expected 1")
        if dimensions == 1 or (isinstance(tokens, Sequence) and not isinstance(tokens, str)):
            ids = token_array(tokens) if self._prefix_caching else None  # type: ignore[arg-type]
            return len(tokens), ids  # type: ignore[arg-type]
        if not hasattr(tokens, "__index__"):
            raise TypeError(f"tokens is {tokens!r}, expected a count or a sequence of token ids")
        return checked_int("tokens", tokens, 0), None

    def _read_prompt(self, tokens: Tokens, extra_keys: ExtraKeys) -> _Prompt:
        """Read the tokens of a new request, and compute the digests; the lock isn't needed."""
        count, ids = self._read_tokens(tokens)
        prompt = _Prompt(count, ids, placed_keys(extra_keys) if extra_keys else (), [])
        if ids is not None:
            full = count // self._block_size
            extend_chain(prompt.digests, ids, self._block_size, prompt.keys, full)
        return prompt

    # The lock is held from here on.

    def _most_hits(self, prompt: _Prompt) -> int:
        """Return how many blocks a hit may have at most, so that one token is left to compute."""
        return max(0, prompt.num_tokens - 1) // self._block_size if prompt.digests else 0

    def _match(self, prompt: _Prompt, limit: int) -> int:
        """Return the blocks, at most `limit`, of the longest prefix that need no computing.

        All of them must be there or, with a sliding window, as many of the last ones as the next
        query sees, and at least one.
        """
        find = self._prefix.find
        if self._window is None:
            for index in range(limit):
                if find(prompt.digests[index]) is None:
                    return index
            return limit
        first = end = limit  # the blocks from `first` to `end` are there
        while end and first > min(self._first_seen(end * self._block_size), end - 1):
            first -= 1
            if find(prompt.digests[first]) is None:
                end = first
        return end

    def _hits(self, prompt: _Prompt, hit_blocks: int) -> tuple[list[int], int]:
        """Return the blocks of a hit that the request will hold, and how many it need not."""
        unseen = self._unseen(hit_blocks)
        return self._prefix.blocks(prompt.digests[unseen:hit_blocks]), unseen

    def _refuse_admission(self, prompt: _Prompt, hit_blocks: int) -> None:
        """Refuse a new request that the pool is too full for."""
        needed = self._blocks_for(prompt.num_tokens) - hit_blocks
        hits, _ = self._hits(prompt, hit_blocks)
        idle = sum(not self._ref_counts[block] for block in hits)
        self._refuse_beyond_free(needed, idle, self._reserved())

    def _admit(self, request: Hashable, prompt: _Prompt, hit_blocks: int) -> int:
        """Make a request that nothing refuses. Its hits are held before anything is evicted."""
        hits, unseen = self._hits(prompt, hit_blocks)
        self._share(hits)
        fresh = self._take(self._blocks_for(prompt.num_tokens) - hit_blocks)
        table = [NO_BLOCK] * unseen + hits + fresh
        held = _Request(table, prompt.num_tokens, keys=prompt.keys, generation=self._generation)
        held.num_committed, held.num_released = hit_blocks, unseen
        if prompt.tokens is not None:
            held.tokens, held.digests = prompt.tokens, prompt.digests
            self._prompt_tokens += prompt.num_tokens
            self._hit_tokens += hit_blocks * self._block_size
        self._requests[request] = held
        return hit_blocks * self._block_size

    def _checked_written(self, held: _Request, num_tokens: int | None) -> int:
        """Return how many tokens a commit is about, or refuse it."""
        if num_tokens is None:
            return held.num_tokens
        return checked_int("num_tokens", num_tokens, 0, held.num_tokens)

    def _commit(self, held: _Request, written: int) -> None:
        """Publish what may be found from now on, and release what nothing sees from now on."""
        self._publish(held, written)
        self._release_unseen(held, written)

    def _publish(self, held: _Request, written: int) -> None:
        """Publish the full blocks among the first `written` tokens whose ids are known."""
        full = min(written, len(held.tokens)) // self._block_size
        if full <= held.num_committed or held.generation != self._generation:
            return
        extend_chain(held.digests, held.tokens, self._block_size, held.keys, full)
        for index in range(max(held.num_committed, held.num_released), full):
            self._prefix.publish(held.digests[index], held.table[index])
        held.num_committed = full

    def _flush(self) -> int:
        """Forget all contents, and begin a generation that no present request belongs to."""
        self._free.extend(self._prefix.clear())
        self._generation += 1
        return self._count_used()

    # ---------------------------------------------------------------- inside: sliding window

    def _first_seen(self, position: int) -> int:
        """Return the first block that a query at a position, or after it, can see."""
        assert self._window is not None
        return max(0, position - self._window + 1) // self._block_size

    def _unseen(self, hit_blocks: int) -> int:
        """Return how many blocks of a hit no query behind it can see."""
        return 0 if self._window is None else self._first_seen(hit_blocks * self._block_size)

    def _release_unseen(self, held: _Request, written: int) -> None:
        """Give back the blocks that no query from token `written` on can see."""
        if self._window is None:
            return
        start, stop = held.num_released, self._first_seen(written)
        if start < stop:
            released = held.table[start:stop]
            held.table[start:stop] = [NO_BLOCK] * (stop - start)
            held.num_released = stop
            held.version += 1
            held.rewrites += 1
            self._release(released)

    def _checked_keep(self, held: _Request, num_tokens: int) -> int:
        """Return the length to cut a request to, or refuse it."""
        return checked_int("num_tokens", num_tokens, self._least_kept(held), held.num_tokens)

    def _least_kept(self, held: _Request) -> int:
        """Return the least length at whose end a query sees no released block."""
        if not held.num_released:
            return 0
        assert self._window is not None
        return held.num_released * self._block_size + self._window - 1

    # ---------------------------------------------------------------- inside: blocks

    def _fork(self, held: _Request, child: Hashable) -> None:
        """Make a request that shares all blocks of another."""
        self._share(held.blocks)
        self._requests[child] = held.fork()

    def _cut(self, held: _Request, keep: int) -> None:
        """Make a request shorter; of what is cut, nothing stays findable that it holds alone."""
        full, blocks = keep // self._block_size, self._blocks_for(keep)
        for block in held.table[max(held.num_released, full) :]:
            if self._ref_counts[block] == 1:
                self._prefix.unpublish(block)
        released = held.table[max(held.num_released, blocks) :]
        del held.table[blocks:], held.tokens[keep:], held.digests[full:]
        held.num_tokens = keep
        held.num_committed = min(held.num_committed, full)
        held.version += 1
        held.rewrites += 1
        self._release(released)

    def _end(self, request: Hashable) -> None:
        """End a request and release what it holds."""
        if request in self._arriving:
            held = self._arriving.pop(request)
        else:
            held = self._find(request)
            del self._requests[request]
        self._release(held.blocks)

    def _blocks_to_grow(self, grown: Iterable[tuple[_Request, int, array[int] | None]]) -> int:
        """Count the blocks that growing all of these takes, copies of shared blocks included."""
        blocks = 0
        gone: dict[int, int] = {}  # owners that a copy will have taken off a shared block by then
        for held, count, _ in grown:
            blocks += self._blocks_for(held.num_tokens + count) - len(held.table)
            if count and held.num_tokens % self._block_size:
                last = held.table[-1]
                if self._ref_counts[last] - gone.get(last, 0) > 1:
                    gone[last] = gone.get(last, 0) + 1
                    blocks += 1
        return blocks

    def _grow(self, held: _Request, count: int, ids: array[int] | None) -> list[tuple[int, int]]:
        """Append to one request, for which enough blocks are known to be free."""
        copies = []
        if count and held.num_tokens % self._block_size:
            source = held.table[-1]
            if self._ref_counts[source] > 1:
                self._ref_counts[source] -= 1
                held.table[-1:] = self._take(1)
                held.version += 1
                held.rewrites += 1
                copies.append((source, held.table[-1]))
            else:
                self._prefix.unpublish(source)  # full for another owner, who has left
        if ids is not None and len(held.tokens) == held.num_tokens:
            held.tokens += ids
        held.num_tokens += count
        blocks = self._blocks_for(held.num_tokens) - len(held.table)
        if blocks:
            held.table += self._take(blocks)
            held.version += 1
        return copies

    def _take(self, blocks: int) -> list[int]:
        """Take free blocks, each with one owner from now on; evict cached ones only at need."""
        taken = [self._free.popleft() for _ in range(min(blocks, len(self._free)))]
        fresh = min(blocks - len(taken), self._num_blocks - len(self._ref_counts))
        evicted = [self._prefix.evict() for _ in range(blocks - len(taken) - fresh)]
        self._evictions += len(evicted)
        taken += evicted
        for block in taken:
            self._ref_counts[block] = 1
        taken += range(len(self._ref_counts), len(self._ref_counts) + fresh)
        self._ref_counts += [1] * fresh
        return taken

    def _share(self, blocks: list[int]) -> None:
        """Give each block one owner more."""
        for block in blocks:
            if not self._ref_counts[block]:
                self._prefix.revive(block)
            self._ref_counts[block] += 1

    def _release(self, blocks: list[int]) -> None:
        """Take one owner off each block; the last owner's leaving makes the block free."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block] and not self._prefix.retire(block):
                self._free.appendleft(block)

    def _count_used(self) -> int:
        return len(self._ref_counts) - len(self._free) - self._prefix.num_idle

    def _count_free(self) -> int:
        return self._num_blocks - self._count_used()

    def _reserved(self) -> int:
        """Return the blocks that a new request must leave free."""
        return self._watermark if self._count_used() else 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _find(self, request: Hashable) -> _Request:
        try:
            return self._requests[request]
        except KeyError:
            unknown = InFlight if request in self._arriving else UnknownRequest
            raise unknown(request) from None
        except TypeError:
            raise _unhashable("request", request) from None

    def _refuse_existing(self, name: str, request: Hashable) -> None:
        try:
            exists = request in self._requests or request in self._arriving
        except TypeError:
            raise _unhashable(name, request) from None
        if exists:
            raise ValueError(f"{name} is {request!r}, which exists already; expected a new one")

    def _refuse_beyond_free(self, blocks: int, shared_idle: int = 0, reserved: int = 0) -> None:
        """Refuse a call that takes blocks, and shares idle ones, beyond what may be taken."""
        free = self._count_free() - shared_idle
        if blocks and blocks + reserved > free:
            raise OutOfBlocks(blocks, free, self._prefix.num_idle - shared_idle, reserved)

    # ---------------------------------------------------------------- inside: counting and checking

    def _holders(self) -> Iterator[tuple[object, _Request]]:
        """List everything that holds blocks, and what to call it."""
        yield from self._requests.items()
        yield from self._arriving.items()
        for holds in self._holds.values():
            yield from (("a copy in flight", held) for held in holds)

    def _unfilled_slots(self) -> int:
        """Count the slots of blocks in use that no owner fills.

        A block has such slots only if it is the partial last block of each of its owners: an
        owner that holds it further forward, or as a full last block, fills it.
        """
        fill: dict[int, int] = {}
        partial_owners: Counter[int] = Counter()
        for _, held in self._holders():
            if tail := held.num_tokens % self._block_size:
                last = held.table[-1]
                fill[last] = max(fill.get(last, 0), tail)
                partial_owners[last] += 1
        return sum(
            self._block_size - tail
            for block, tail in fill.items()
            if partial_owners[block] == self._ref_counts[block]
        )

    def _check_request(self, request: object, held: _Request) -> None:
        """Check that what one request holds fits together."""
        needed = self._blocks_for(held.num_tokens)
        if len(held.table) != needed:
            raise AssertionError(
                f"request {request!r} has {len(held.table)} blocks, but its "
                f"{held.num_tokens} tokens need {needed}"
            )
        owned = held.blocks
        if len(set(owned)) != len(owned):
            raise AssertionError(f"request {request!r} lists a block twice: {held.table}")
        if held.table.count(NO_BLOCK) != held.num_released or NO_BLOCK in owned:
            raise AssertionError(
                f"request {request!r} has released {held.num_released} blocks, but its table is "
                f"{held.table}"
            )
        expected: list[bytes] = []
        full = min(len(held.tokens) // self._block_size, len(held.digests))
        extend_chain(expected, held.tokens, self._block_size, held.keys, full)
        if held.digests != expected:
            raise AssertionError(f"request {request!r} has digests of other tokens than its own")

    def _check_found(self, request: object, held: _Request) -> None:
        """Check that the blocks of a request are found by its own tokens only."""
        for block, digest in zip(held.blocks, held.digests[held.num_released :], strict=False):
            if self._prefix.digest(block) not in (None, digest):
                raise AssertionError(
                    f"block {block} is found by other tokens than request {request!r} has in it"
                )

    def _check_blocks(self, owners: Counter[int]) -> None:
        """Check every block against the number of tables that were seen to hold it."""
        if len(self._ref_counts) > self._num_blocks:
            raise AssertionError(
                f"{len(self._ref_counts)} blocks were handed out, of {self._num_blocks}"
            )
        self._prefix.check()
        free, idle = Counter(self._free), set(self._prefix.idle_blocks())
        handed_out = range(len(self._ref_counts))
        strangers = [b for b in free.keys() | idle | owners.keys() if b not in handed_out]
        if strangers:
            raise AssertionError(f"blocks that were never handed out: {sorted(strangers)}")
        for block, ref_count in enumerate(self._ref_counts):
            if ref_count != owners[block]:
                raise AssertionError(
                    f"block {block} counts {ref_count} owners, but {owners[block]} tables hold it"
                )
            if free[block] + (block in idle) != (0 if ref_count else 1):
                raise AssertionError(
                    f"block {block} has {ref_count} owners and is {free[block]} times in the "
                    f"free list, {int(block in idle)} times among the cached ones"
                )
            if self._prefix.digest(block) is not None and not ref_count and block not in idle:
                raise AssertionError(f"block {block} can be found, but is plain free")


def _unhashable(name: str, request: object) -> TypeError:
    return TypeError(f"{name} is {request!r}, expected something that can be hashed")
