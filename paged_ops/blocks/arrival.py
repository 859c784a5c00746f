"""A request arrives with blocks from elsewhere: from the host's pool, another rank, or a disk.

Copying blocks takes time, and meanwhile the books go on. So a flight holds what is read or written,
until it is settled or abandoned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType

from paged_ops.blocks.digest import extend_chain
from paged_ops.blocks.holding import NO_BLOCK, Flight, Holding
from paged_ops.blocks.ledger import Ledger


def arrive(
    ledger: Ledger,
    owner: object,
    newcomers: Mapping[Hashable, Holding],
    *,
    sharing: bool,
    watermark: bool,
) -> dict[int, int]:
    """Take requests into the books, and let a flight hold their blocks until they are written.

    Parameters
    ----------
    ledger : Ledger
        The books; they are open.
    owner : object
        Names the flight, which `settle` or `Ledger.abandon` ends.
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
    taken = own(ledger, shared, len(missing))
    written = dict(zip(missing, taken, strict=True))
    places = found | written
    for held in newcomers.values():
        held.table = [places.get(block, NO_BLOCK) for block in held.table]
        held.num_committed = 0  # its new blocks are to be published again
    hold(ledger, owner, newcomers.values(), newcomers)
    ledger.stock.release(shared + taken)
    return written


def own(ledger: Ledger, shared: list[int], blocks: int) -> list[int]:
    """Own blocks until they have holders, and are released: shared ones, and new ones."""
    ledger.note((ledger, ledger.rebuild))  # which gives back what nobody holds
    ledger.stock.share(shared)
    return ledger.stock.take(blocks)


def hold(
    ledger: Ledger,
    owner: object,
    held: Iterable[Holding],
    arriving: Mapping[Hashable, Holding] = MappingProxyType({}),
) -> None:
    """Hold blocks until a flight ends, whatever becomes of their requests.

    Parameters
    ----------
    ledger : Ledger
        The books; they are open.
    owner : object
        Names the flight.
    held : iterable of Holding
        The blocks.
    arriving : mapping of Hashable to Holding, optional
        New requests, which can only be freed until the flight is settled.
    """
    flight = Flight([one.fork() for one in held], dict(arriving))
    ledger.note((ledger, ledger.flights.pop, owner, None))
    ledger.flights[owner] = flight
    for request, one in arriving.items():
        ledger.note((ledger, ledger.arriving.pop, request, None))
        ledger.arriving[request] = one
    for one in (*flight.held, *arriving.values()):
        ledger.stock.share(one.blocks)


def settle(ledger: Ledger, owner: object) -> None:
    """End a flight that has made its copies: what was arriving is here."""
    flight = ledger.flights[owner]
    for request, held in flight.under_way(ledger.arriving):
        ledger.note((ledger, ledger.arriving.__setitem__, request, held))
        ledger.note((ledger, ledger.requests.pop, request, None))
        ledger.requests[request] = ledger.arriving.pop(request)
    ledger.note((ledger, ledger.flights.__setitem__, owner, flight))
    del ledger.flights[owner]
    for held in flight.held:
        ledger.stock.release(held.blocks)


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
