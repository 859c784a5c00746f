"""Which request owns which block of the pool. Plain Python: no tensors, no torch.

`BlockManager` is the lock, the reading of arguments and the documentation around a `Ledger`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paged_ops.arguments import INT32_MAX, checked_int
from paged_ops.blocks.books import Books, Tokens
from paged_ops.blocks.events import EventStream
from paged_ops.blocks.journal import Journal
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.stats import BlockStats, count_blocks


class BlockManager(Books):
    """Hands out the blocks of a pool to requests, shares them, and takes them back.

    Every call costs O(1) per block it touches, whatever the size of the pool, and is atomic: a
    call that raises has changed nothing, and one that a KeyboardInterrupt breaks off is done or not
    done. A lock around each call makes it atomic among threads as well. Two calls in a row are not
    one: rather than asking `can_allocate` first, call `allocate` and catch `OutOfBlocks`. Don't
    call the manager from a finaliser or a signal handler, which may run while its own thread holds
    the lock.

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
    journal : Journal, optional
        That of the manager that this one changes together with, under one lock. None: its own.

    Attributes
    ----------
    ledger : Ledger
        The books themselves, for those who look at or change more than one request at a time:
        ``with manager.lock, manager.ledger as ledger:`` is one call, however much happens in it,
        and is taken back as a whole if it is left by an exception. So block copies that are made
        inside, of a `Ledger.make_room`, can't be lost by an interrupt, as those that `append` was
        about to return can.

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
    paged_ops.blocks.errors.OutOfBlocks: 25 blocks asked for, 6 free

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
        journal: Journal | None = None,
    ) -> None:
        num_blocks = checked_int("num_blocks", num_blocks, 1, INT32_MAX)
        block_size = checked_int("block_size", block_size, 1, INT32_MAX)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark is {watermark}, expected 0 or more and below 1")
        if sliding_window is not None:
            sliding_window = checked_int("sliding_window", sliding_window, 1)
        self.ledger = Ledger(
            num_blocks,
            block_size,
            bool(prefix_caching),
            int(watermark * num_blocks),
            sliding_window,
            Journal() if journal is None else journal,
        )
        super().__init__([self.ledger])

    def __repr__(self) -> str:
        return (
            f"BlockManager(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_used={self.ledger.stock.num_used}, num_requests={len(self.ledger.requests)})"
        )

    # ---------------------------------------------------------------- changing what requests hold

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
        count, ids = self._read_tokens(tokens)
        with self.lock, self.ledger as ledger:
            growth = [(ledger.find(request), count, ids)]
            ledger.refuse_growth(growth)
            return ledger.grow(growth)

    def append_all(self, growth: Sequence[tuple[Hashable, Tokens]]) -> list[tuple[int, int]]:
        """Make several requests longer, or none of them, as a batch that grows as a whole.

        Parameters
        ----------
        growth : sequence of (Hashable, tokens)
            As for `append`; each request once.

        Returns
        -------
        list of (int, int)
            As `append`, of all requests.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free for all of them together.
        UnknownRequest, ValueError, TypeError
            As `append`; or a request comes twice.
        """
        return self._append_all(growth)[0]

    def flush(self) -> int:
        """Make everything unfindable, because the model's weights have changed.

        Cached blocks become plain free ones. Requests keep their blocks, but nothing of them is
        ever published, not even what they append: it attends to old keys and values.

        Returns
        -------
        int
            How many blocks requests still hold, all of them written under the old weights.
        """
        return self._flush()[0]

    # ---------------------------------------------------------------- looking

    def block_table(self, request: Hashable) -> list[int]:
        """Return the block ids of a request in the order of its tokens; the list is a copy.

        Where a block was released because no later query can see it, the entry is -1.
        """
        with self.lock, self.ledger as ledger:
            return ledger.find(request).table.copy()

    def num_exclusive(self, request: Hashable) -> int:
        """Return how many blocks would become free if a request ended: those it shares with none.

        Costs O(blocks of the request).
        """
        with self.lock, self.ledger as ledger:
            held = ledger.find(request)
            return [ledger.stock.counts[block] for block in held.blocks].count(1)

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, the cached ones included."""
        with self.lock, self.ledger as ledger:
            return ledger.stock.num_free

    @property
    def num_used(self) -> int:
        """Distinct blocks that requests hold."""
        with self.lock, self.ledger as ledger:
            return ledger.stock.num_used

    @property
    def num_cached(self) -> int:
        """Those of the free blocks whose content can be found."""
        with self.lock, self.ledger as ledger:
            return ledger.stock.prefix.num_idle

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.ledger.stock.num_blocks

    @property
    def sliding_window(self) -> int | None:
        """How many keys a query sees; None: all of them."""
        return self.ledger.window

    def subscribe(self, max_events: int = 100_000) -> EventStream:
        """Return a stream of what becomes findable, and what ceases to be, from now on.

        Parameters
        ----------
        max_events : int
            How many events the stream holds before it starts over, 1 or more.
        """
        limit = checked_int("max_events", max_events, 1)
        with self.lock, self.ledger as ledger:
            stream = EventStream(limit, self.lock, ledger.stock.prefix.stored)
            ledger.stock.prefix.follow(stream)
            return stream

    def stats(self) -> BlockStats:
        """Count what the pool holds. Costs O(requests), not O(blocks).

        Returns
        -------
        BlockStats
            The counts, of one moment.
        """
        with self.lock, self.ledger as ledger:
            return count_blocks(ledger)
