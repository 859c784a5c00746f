"""The calls that change requests, over the books of one pool or of several in step.

Reads the arguments, takes the lock, asks every ledger for what may refuse the call, and only then
changes them all.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NoReturn, SupportsIndex

from paged_ops.arguments import checked_int
from paged_ops.blocks import audit
from paged_ops.blocks.digest import ExtraKeys, extend_chain, placed_keys, token_array
from paged_ops.blocks.holding import Prompt
from paged_ops.blocks.ledger import Ledger

# Where tokens are added, a caller says how many, or gives their ids: a sequence, or an array or
# tensor of one dimension (which has an __index__, whether it works or not).
Tokens = SupportsIndex | Sequence[int]


class Books:
    """What `BlockManager` and `LayerGroups` have in common.

    Every call is atomic: one that raises has changed nothing. A lock around each call makes it
    atomic among threads as well, and it may be broken off anywhere, by a KeyboardInterrupt too: it
    has then happened or not, in every pool.

    Parameters
    ----------
    ledgers : sequence of Ledger
        The books of each pool, one or more, of one block size and one journal.

    Attributes
    ----------
    lock : threading.Lock
        Held during each call.
    """

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = tuple(ledgers)
        self._first = self._ledgers[0]
        self.lock = self._first.lock

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} can't be copied or pickled: two managers would hand out the same blocks"
        )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._first.block_size

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
            prompts with the same extra keys share blocks. See `ExtraKey`.

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
        with self.lock, self._first:
            for ledger in self._ledgers:
                ledger.refuse_existing("request", request)
            hit_blocks = self._longest_hit(prompt)
            for ledger in self._ledgers:
                ledger.refuse_admission(prompt, hit_blocks)
            for ledger in self._ledgers:
                ledger.admit(request, prompt, hit_blocks)
            return hit_blocks * self.block_size

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
        with self.lock, self._first:
            held = self._first.find(request)
            written = held.num_tokens
            if num_tokens is not None:
                written = checked_int("num_tokens", num_tokens, 0, written)
            for ledger in self._ledgers:
                ledger.commit(ledger.find(request), written)

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
        with self.lock, self._first:
            self._first.find(parent)
            self._first.refuse_existing("child", child)
            for ledger in self._ledgers:
                ledger.fork(ledger.find(parent), child)

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
        with self.lock, self._first:
            for ledger in self._ledgers:
                keep = ledger.checked_keep(ledger.find(request), num_tokens)
            for ledger in self._ledgers:
                ledger.cut(ledger.find(request), keep)

    def truncate_all(self, cuts: Sequence[tuple[Hashable, int]]) -> None:
        """Make several requests shorter, or none of them.

        Parameters
        ----------
        cuts : sequence of (Hashable, int)
            As for `truncate`; each request once.

        Raises
        ------
        UnknownRequest, ValueError, TypeError
            As `truncate`; or a request comes twice.
        """
        requests = [request for request, _ in cuts]
        with self.lock, self._first:
            held = [ledger.find_all(requests) for ledger in self._ledgers]
            for ledger, rows in zip(self._ledgers, held, strict=True):
                keep = [
                    ledger.checked_keep(one, num_tokens)
                    for one, (_, num_tokens) in zip(rows, cuts, strict=True)
                ]
            for ledger, rows in zip(self._ledgers, held, strict=True):
                for one, length in zip(rows, keep, strict=True):
                    ledger.cut(one, length)

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
        with self.lock, self._first:
            for ledger in self._ledgers:
                ledger.end(request)

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
        with self.lock, self._first:
            for ledger in self._ledgers:
                ledger.end(request, preempted=True)

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
        with self.lock, self._first:
            return self._longest_hit(prompt) * self.block_size

    def num_tokens(self, request: Hashable) -> int:
        """Return the length of a request in tokens."""
        with self.lock, self._first:
            return self._first.find(request).num_tokens

    def can_allocate(self, num_tokens: int) -> bool:
        """Say whether `allocate` of a new request with so many tokens would find its blocks.

        Parameters
        ----------
        num_tokens : int
            Tokens of the request, 0 or more. Nothing of it is taken to be cached.
        """
        blocks = self._first.blocks_for(checked_int("num_tokens", num_tokens, 0))
        with self.lock, self._first:
            return not blocks or all(
                blocks + ledger.reserved() <= ledger.stock.num_free for ledger in self._ledgers
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
        with self.lock, self._first:
            for ledger in self._ledgers:
                audit.check(ledger)
            lengths = [
                {request: held.num_tokens for request, held in ledger.requests.items()}
                for ledger in self._ledgers
            ]
        if any(other != lengths[0] for other in lengths):
            raise AssertionError(f"the groups hold different requests: {lengths}")

    # ---------------------------------------------------------------- inside

    def _append_all(self, growth: Sequence[tuple[Hashable, Tokens]]) -> list[list[tuple[int, int]]]:
        """Append to all of these, or to none; return the copies to make in each pool."""
        read = [self._read_tokens(tokens) for _, tokens in growth]
        requests = [request for request, _ in growth]
        with self.lock, self._first:
            grown = [
                [(held, *new) for held, new in zip(ledger.find_all(requests), read, strict=True)]
                for ledger in self._ledgers
            ]
            for ledger, rows in zip(self._ledgers, grown, strict=True):
                ledger.refuse_growth(rows)
            return [ledger.grow(rows) for ledger, rows in zip(self._ledgers, grown, strict=True)]

    def _flush(self) -> list[int]:
        """Make everything unfindable; return the blocks that requests hold in each pool."""
        with self.lock, self._first:
            for ledger in self._ledgers:
                ledger.flush()
            return [ledger.stock.num_used for ledger in self._ledgers]

    def _read_tokens(self, tokens: Tokens) -> tuple[int, array[int] | None]:
        """Return how many tokens are meant, and their ids where they matter and are known."""
        if type(tokens) is int and tokens >= 0:  # nearly always; the rest is slower
            return tokens, None
        if getattr(tokens, "ndim", 0) or isinstance(tokens, Sequence):
            ids = token_array(tokens)  # type: ignore[arg-type]
            return len(ids), ids if self._first.prefix_caching else None
        if not hasattr(tokens, "__index__"):
            raise TypeError(f"tokens is {tokens!r}, expected a count or a sequence of token ids")
        return checked_int("tokens", tokens, 0), None

    def _read_prompt(self, tokens: Tokens, extra_keys: ExtraKeys) -> Prompt:
        """Read the tokens of a new request, and compute the digests; the lock isn't needed."""
        count, ids = self._read_tokens(tokens)
        prompt = Prompt(count, ids, placed_keys(extra_keys) if extra_keys else (), [])
        if ids is not None:
            full = count // self.block_size
            extend_chain(prompt.digests, ids, self.block_size, prompt.keys, full)
        return prompt

    def _longest_hit(self, prompt: Prompt) -> int:
        """Return how many blocks of a prompt all ledgers have, one token being left to compute."""
        hit = max(0, prompt.num_tokens - 1) // self.block_size if prompt.digests else 0
        if not hit:
            return 0
        # Each pass cuts the hit to what some ledger has; when none cuts it, all have it.
        while (least := min(each.longest_hit(prompt, hit) for each in self._ledgers)) < hit:
            hit = least
        return hit
