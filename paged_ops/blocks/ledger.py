"""Which request holds which blocks.

Every request has a table of block ids; how many tables hold a block, the stock counts. No block is
written while its content can be found: `commit` publishes full blocks only, and a growth that
begins inside a block takes a copy of it if others hold it, or unpublishes it if not.

A caller first asks for all that may refuse a change (`find`, `refuse_growth`), and then makes it;
so a refused change has changed nothing. What breaks a change off, the journal takes back: each verb
notes how to undo what it does to a holding, or to the lists of holdings, before it does so, and
before it touches the stock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from paged_ops.arguments import checked_int
from paged_ops.blocks.digest import extend_chain
from paged_ops.blocks.errors import InFlight, OutOfBlocks, UnknownRequest
from paged_ops.blocks.holding import NO_BLOCK, Flight, Holding, Prompt
from paged_ops.blocks.journal import Journal
from paged_ops.blocks.stock import Stock

Growth = tuple[Holding, int, "array[int] | None"]
"""A request, how many tokens are added to it, and their ids where these are known."""


class Ledger:
    """The books of a pool.

    Use it as ``with ledger.lock, ledger:`` only, for looking too. What is changed inside has
    happened when the block is left, and has not if it is left by an exception; see `Journal`.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks of the pool, and tokens per block.
    prefix_caching : bool
        Whether prompts find the blocks of earlier ones.
    watermark : int
        Blocks that new requests leave to those that run already.
    window : int, optional
        How many keys a query sees. None: all of them.
    journal : Journal
        What undoes a change. Ledgers that change together share it.

    Attributes
    ----------
    requests : dict of Hashable to Holding
        What each request holds.
    arriving : dict of Hashable to Holding
        The same of requests whose blocks are still being written by a copy.
    flights : dict of object to Flight
        What copies in flight hold, by their owners, which end them; see `hold`.
    orphans : list of object
        Owners that won't. A weak reference with the callback ``orphans.append`` is one in time.
    stock : Stock
        The blocks.
    generation : int
        Changes with the weights of the model; what was computed with others is never found.
    prompt_tokens, hit_tokens, preemptions : int
        As in `BlockStats`.
    note : callable
        Notes what undoes a step, before the step: this ledger, a callable, its arguments. Whoever
        keeps something of their own that changes with the books notes that as well.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        watermark: int,
        window: int | None,
        journal: Journal,
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.watermark = watermark
        self.window = window
        self.journal = journal
        self.lock = journal.lock
        self.stock = Stock(num_blocks)
        self.requests: dict[Hashable, Holding] = {}
        self.arriving: dict[Hashable, Holding] = {}
        self.flights: dict[object, Flight] = {}
        self.orphans: list[object] = []
        self.generation = self.prompt_tokens = self.hit_tokens = self.preemptions = 0
        self.note = journal.notes.append

    def __enter__(self) -> Ledger:
        if self.journal.notes:  # of a change that was broken off, and its undoing as well
            self.journal.undo()
        if self.orphans:
            self._abandon_orphans()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.journal.notes:
            if kind is None:
                self.journal.notes.clear()
            else:
                self.journal.undo()

    # ---------------------------------------------------------------- looking, and refusing

    def find(self, request: Hashable) -> Holding:
        """Return what a request holds, or refuse one that is unknown or in flight."""
        try:
            return self.requests[request]
        except KeyError:
            unknown = InFlight if request in self.arriving else UnknownRequest
            raise unknown(request) from None
        except TypeError:
            raise _unhashable("request", request) from None

    def find_all(self, requests: Sequence[Hashable]) -> list[Holding]:
        """Return what requests hold, or refuse one that is not there or comes twice."""
        held = [self.find(request) for request in requests]
        if len(held) > 1 and len(set(requests)) != len(held):
            raise ValueError(f"requests is {list(requests)!r}, expected each request once")
        return held

    def holders(self) -> Iterator[tuple[object, Holding]]:
        """List everything that holds blocks, and what to call it."""
        yield from self.requests.items()
        yield from self.arriving.items()
        for flight in self.flights.values():
            yield from (("a copy in flight", held) for held in flight.held)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, position: int) -> int:
        """Return the first block that a query at a position, or after it, can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def reserved(self) -> int:
        """Return the blocks that a new request must leave free."""
        return self.watermark if self.stock.num_used else 0

    def refuse_existing(self, name: str, request: Hashable) -> None:
        """Refuse the name of a new request that an old one has."""
        try:
            exists = request in self.requests or request in self.arriving
        except TypeError:
            raise _unhashable(name, request) from None
        if exists:
            raise ValueError(f"{name} is {request!r}, which exists already; expected a new one")

    def refuse_beyond_free(
        self, blocks: int, shared: Sequence[int] = (), reserved: int = 0
    ) -> None:
        """Refuse a change that takes new blocks, and shares others, beyond what may be taken."""
        idle = sum(not self.stock.counts[block] for block in shared) if shared else 0
        free = self.stock.num_free - idle
        if blocks and blocks + reserved > free:
            raise OutOfBlocks(blocks, free, self.stock.prefix.num_idle - idle, reserved)

    # ---------------------------------------------------------------- a request comes

    def longest_hit(self, prompt: Prompt, limit: int) -> int:
        """Return the blocks, at most `limit`, of the longest prefix that need no computing.

        All of them must be there or, with a sliding window, as many of the last ones as the next
        query sees, and at least one.
        """
        find = self.stock.prefix.find
        if self.window is None:
            for index in range(limit):
                if find(prompt.digests[index]) is None:
                    return index
            return limit
        first = end = limit  # the blocks from `first` to `end` are there
        while end and first > min(self.first_seen(end * self.block_size), end - 1):
            first -= 1
            if find(prompt.digests[first]) is None:
                end = first
        return end

    def hits(self, prompt: Prompt, hit_blocks: int) -> list[int]:
        """Return the blocks of a hit that the request will hold: those that its window reaches."""
        if not hit_blocks:
            return []
        unseen = self.first_seen(hit_blocks * self.block_size)
        return self.stock.prefix.blocks(prompt.digests[unseen:hit_blocks])

    def refuse_admission(self, prompt: Prompt, hit_blocks: int) -> None:
        """Refuse a new request that the pool is too full for."""
        needed = self.blocks_for(prompt.num_tokens) - hit_blocks
        self.refuse_beyond_free(needed, self.hits(prompt, hit_blocks), self.reserved())

    def admit(self, request: Hashable, prompt: Prompt, hit_blocks: int) -> None:
        """Make a request that nothing refuses. Its hits are held before anything is evicted."""
        hits = self.hits(prompt, hit_blocks)
        unseen = hit_blocks - len(hits)
        self.note((self, self.requests.pop, request, None))
        self.stock.share(hits)
        fresh = self.stock.take(self.blocks_for(prompt.num_tokens) - hit_blocks)
        table = [NO_BLOCK] * unseen + hits + fresh
        held = Holding(table, prompt.num_tokens, keys=prompt.keys, generation=self.generation)
        held.num_committed, held.num_released = hit_blocks, unseen
        if prompt.tokens is not None:
            held.tokens, held.digests = prompt.tokens[:], prompt.digests.copy()
            self.note((self, setattr, self, "prompt_tokens", self.prompt_tokens))
            self.note((self, setattr, self, "hit_tokens", self.hit_tokens))
            self.prompt_tokens += prompt.num_tokens
            self.hit_tokens += hit_blocks * self.block_size
        self.requests[request] = held

    def fork(self, held: Holding, child: Hashable) -> None:
        """Make a request that shares all blocks of another."""
        self.note((self, self.requests.pop, child, None))
        self.stock.share(held.blocks)
        self.requests[child] = held.fork()

    # ---------------------------------------------------------------- a request changes

    def refuse_growth(self, growth: Iterable[Growth]) -> None:
        """Refuse to grow requests for which the free blocks don't suffice all together."""
        blocks = 0
        gone: dict[int, int] = {}  # owners that a copy will have taken off a shared block by then
        for held, count, _ in growth:
            blocks += -(-(held.num_tokens + count) // self.block_size) - len(held.table)
            if count and held.num_tokens % self.block_size:
                last = held.table[-1]
                if self.stock.counts[last] - gone.get(last, 0) > 1:
                    gone[last] = gone.get(last, 0) + 1
                    blocks += 1
        self.refuse_beyond_free(blocks)

    def grow(self, growth: Iterable[Growth]) -> list[tuple[int, int]]:
        """Append to requests, each of them once, for which enough blocks are free.

        Returns
        -------
        list of (int, int)
            Block copies (source, destination) to make before the new tokens are written.
        """
        copies = []
        for held, count, ids in growth:
            table, length = held.table, held.num_tokens
            was = length, length // self.block_size, len(held.tokens), len(table), table[-1:]
            self.note((self, held.shrink, *was))
            if count and length % self.block_size:
                source = table[-1]
                if self.stock.counts[source] > 1:
                    table[-1:] = self.stock.take(1)
                    held.rewrite()
                    copies.append((source, table[-1]))
                    self.stock.release([source])
                else:
                    self.stock.prefix.unpublish(source)  # full for another owner, who has left
            if ids is not None and len(held.tokens) == length:
                held.tokens += ids
            held.num_tokens = length + count
            blocks = -(-(length + count) // self.block_size) - len(table)
            if blocks:
                table += self.stock.take(blocks)
                held.version += 1
        return copies

    def make_room(
        self, requests: Sequence[Hashable], lengths: Iterable[int]
    ) -> list[tuple[int, int]]:
        """Let requests hold blocks for so many tokens at least, all of them or none; as `grow`."""
        pairs = zip(self.find_all(requests), lengths, strict=True)
        missing = [(held, length - held.num_tokens, None) for held, length in pairs]
        growth = [each for each in missing if each[1] > 0]
        self.refuse_growth(growth)
        return self.grow(growth)

    def least_kept(self, held: Holding) -> int:
        """Return the least length at whose end a query sees no released block."""
        if not held.num_released:
            return 0
        assert self.window is not None
        return held.num_released * self.block_size + self.window - 1

    def checked_keep(self, held: Holding, num_tokens: int) -> int:
        """Return the length to cut a request to, or refuse it."""
        return checked_int("num_tokens", num_tokens, self.least_kept(held), held.num_tokens)

    def cut(self, held: Holding, keep: int) -> None:
        """Make a request shorter; of what is cut, nothing stays findable that it holds alone."""
        full, blocks = keep // self.block_size, self.blocks_for(keep)
        tails = (
            (blocks, held.table[blocks:]),
            (keep, held.tokens[keep:]),
            (full, held.digests[full:]),
        )
        self.note((self, held.regrow, held.num_tokens, held.num_committed, *tails))
        for block in held.table[max(held.num_released, full) :]:
            if self.stock.counts[block] == 1:
                self.stock.prefix.unpublish(block)
        released = held.table[max(held.num_released, blocks) :]
        del held.table[blocks:], held.tokens[keep:], held.digests[full:]
        held.num_tokens = keep
        held.num_committed = min(held.num_committed, full)
        held.rewrite()
        self.stock.release(released)

    def commit(self, held: Holding, written: int) -> None:
        """Publish what may be found from now on, and release what nothing sees from now on."""
        full = min(written, len(held.tokens)) // self.block_size
        if full > held.num_committed and held.generation == self.generation:
            extend_chain(held.digests, held.tokens, self.block_size, held.keys, full)
            new = slice(max(held.num_committed, held.num_released), full)
            self.publish(zip(held.digests[new], held.table[new], strict=True))
            held.num_committed = full
        start, stop = held.num_released, self.first_seen(written)
        if start < stop:
            released = held.table[start:stop]
            self.note((self, held.reclaim, start, released))
            held.table[start:stop] = [NO_BLOCK] * (stop - start)
            held.num_released = stop
            held.rewrite()
            self.stock.release(released)

    def publish(self, contents: Iterable[tuple[bytes, int]]) -> None:
        """Let held blocks be found by their digests, because what these name is written."""
        self.note((self, self.rebuild))  # a content is there, or is forgotten
        self.stock.publish(contents)

    def flush(self) -> None:
        """Forget all contents, and begin a generation that no present request belongs to."""
        self.note((self, self.stock.forget))  # forward: old contents must not be found
        self.note((self, setattr, self, "generation", self.generation))
        self.generation += 1
        self.stock.forget()

    # ---------------------------------------------------------------- a request goes

    def end(self, request: Hashable, *, preempted: bool = False) -> None:
        """End a request, one that is arriving too, and release what it holds."""
        where = self.arriving if request in self.arriving else self.requests
        held = where[request] if where is self.arriving else self.find(request)
        self.note((self, where.__setitem__, request, held))
        del where[request]
        if preempted:
            self.note((self, setattr, self, "preemptions", self.preemptions))
            self.preemptions += 1
        self.stock.release(held.blocks)

    # ---------------------------------------------------------------- copies in flight end badly

    def abandon(self, owner: object) -> None:
        """End a flight that makes no more copies, if there is one. Costs O(blocks of the pool)."""
        if any(owner is each for each in self.flights):
            self.note((self, self.rebuild))
            for request, _ in self.flights[owner].under_way(self.arriving):
                del self.arriving[request]
            del self.flights[owner]
            self.rebuild()

    def _abandon_orphans(self) -> None:
        """Abandon the flights whose owners are gone, each as a change of its own."""
        while self.orphans:
            self.abandon(self.orphans[0])
            self.journal.notes.clear()
            del self.orphans[0]

    # ---------------------------------------------------------------- after a change that broke off

    def rebuild(self) -> None:
        """Make the stock anew from what is held."""
        self.stock.rebuild(Counter(block for _, held in self.holders() for block in held.blocks))


def _unhashable(name: str, request: object) -> TypeError:
    return TypeError(f"{name} is {request!r}, expected something that can be hashed")
