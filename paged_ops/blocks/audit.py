"""The proof that the books of a pool are in order. Costs O(blocks)."""

from __future__ import annotations

from collections import Counter

from paged_ops.blocks.digest import extend_chain
from paged_ops.blocks.holding import NO_BLOCK, Holding
from paged_ops.blocks.ledger import Ledger


def check(ledger: Ledger) -> None:
    """Prove that the books are in order; they are open.

    Raises
    ------
    AssertionError
        Something is wrong, with what it is.
    """
    owners: Counter[int] = Counter()
    for request, held in ledger.holders():
        check_holding(request, held, ledger.block_size)
        _check_found(ledger, request, held)
        owners.update(held.blocks)
    _check_blocks(ledger, owners)


def check_holding(request: object, held: Holding, block_size: int) -> None:
    """Check that what one request holds fits together."""
    needed = -(-held.num_tokens // block_size)
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
    full = min(len(held.tokens) // block_size, len(held.digests))
    extend_chain(expected, held.tokens, block_size, held.keys, full)
    if held.digests != expected:
        raise AssertionError(f"request {request!r} has digests of other tokens than its own")


def _check_found(ledger: Ledger, request: object, held: Holding) -> None:
    """Check that the blocks of a request are found by its own tokens only."""
    for block, digest in zip(held.blocks, held.digests[held.num_released :], strict=False):
        if ledger.stock.prefix.digest(block) not in (None, digest):
            raise AssertionError(
                f"block {block} is found by other tokens than request {request!r} has in it"
            )


def _check_blocks(ledger: Ledger, owners: Counter[int]) -> None:
    """Check every block against the number of tables that were seen to hold it."""
    stock = ledger.stock
    if len(stock.counts) > stock.num_blocks:
        raise AssertionError(f"{len(stock.counts)} blocks were handed out, of {stock.num_blocks}")
    stock.prefix.check()
    free, idle = Counter(stock.free), set(stock.prefix.idle_blocks())
    handed_out = range(len(stock.counts))
    strangers = [b for b in free.keys() | idle | owners.keys() if b not in handed_out]
    if strangers:
        raise AssertionError(f"blocks that were never handed out: {sorted(strangers)}")
    for block, count in enumerate(stock.counts):
        if count != owners[block]:
            raise AssertionError(
                f"block {block} counts {count} owners, but {owners[block]} tables hold it"
            )
        if free[block] + (block in idle) != (0 if count else 1):
            raise AssertionError(
                f"block {block} has {count} owners and is {free[block]} times in the "
                f"free list, {int(block in idle)} times among the cached ones"
            )
        if stock.prefix.digest(block) is not None and not count and block not in idle:
            raise AssertionError(f"block {block} can be found, but is plain free")
