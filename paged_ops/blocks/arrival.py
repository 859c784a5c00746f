"""A request arrives with blocks from elsewhere: from the host's pool, another rank, or a disk."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from paged_ops.blocks.digest import extend_chain
from paged_ops.blocks.holding import NO_BLOCK, Holding
from paged_ops.blocks.ledger import Ledger


def arrive(
    ledger: Ledger,
    owner: object,
    newcomers: Mapping[Hashable, Holding],
    *,
    sharing: bool,
    watermark: bool,
) -> dict[int, int]:
    """Take requests into the books, and let a transfer hold their blocks until they are written.

    Parameters
    ----------
    ledger : Ledger
        The books; they are open.
    owner : object
        Names the transfer, which `Ledger.settle` or `Ledger.abandon` ends. See `Ledger.hold`.
    newcomers : mapping of Hashable to Holding
        What each request holds, with numbers of blocks elsewhere in its table; the same number
        twice is the same block twice. The tables are rewritten.
    sharing : bool
        Whether blocks whose content can be found here are shared instead of written anew.
    watermark : bool
        Whether they leave the watermark's blocks to those that run, as new requests do.

    Returns
    -------
    dict of int to int
        For each block elsewhere that must be written, its block here.

    Raises
    ------
    OutOfBlocks
        Too few blocks are free.
    ValueError
        A request of this name exists.
    """
    for request in newcomers:
        ledger.refuse_existing("request", request)
    found = _found(ledger, newcomers.values()) if sharing else {}
    elsewhere = dict.fromkeys(block for held in newcomers.values() for block in held.blocks)
    missing = [block for block in elsewhere if block not in found]
    shared = list(set(found.values()))
    ledger.refuse_beyond_free(len(missing), shared, ledger.reserved() if watermark else 0)
    taken = ledger.own(shared, len(missing))
    written = dict(zip(missing, taken, strict=True))
    places = found | written
    for held in newcomers.values():
        held.table = [places.get(block, NO_BLOCK) for block in held.table]
        held.num_committed = 0  # its new blocks are to be published again
    ledger.hold(owner, newcomers.values(), newcomers)
    ledger.disown(shared + taken)
    return written


def _found(ledger: Ledger, newcomers: Iterable[Holding]) -> dict[int, int]:
    """Return the blocks whose content can be found here, and where."""
    found: dict[int, int] = {}
    for held in newcomers:
        if held.generation != ledger.generation:
            continue
        full = len(held.tokens) // ledger.block_size
        extend_chain(held.digests, held.tokens, ledger.block_size, held.keys, full)
        for index in range(held.num_released, len(held.digests)):
            block = ledger.stock.prefix.find(held.digests[index])
            if block is not None:
                found[held.table[index]] = block
    return found
