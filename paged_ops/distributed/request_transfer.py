"""A request moves from one rank to another: its books and its blocks, by point-to-point calls.

This is how a rank that computes prompts hands a request to one that decodes. The sender describes
the request; the receiver takes blocks for it, shares those whose content it has cached already, and
asks for the rest; the sender sends these, layer by layer, each block whole and its scales with it.
Whatever one side refuses is raised on both, and nothing has changed then.

While blocks travel, both managers hold them: a request that is freed meanwhile gives back its
blocks when the transfer is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paged_ops.arguments import checked_int
from paged_ops.blocks.arrival import arrive, hold, settle
from paged_ops.blocks.holding import Holding
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.records import (
    describe_requests,
    describe_sizes,
    read_records,
    refuse_other_sizes,
    refusing_damage,
)


class TransferRefused(RuntimeError):
    """The other rank refused a transfer, with the reason that it gave. Nothing was changed."""


def send_request(
    manager: BlockManager,
    cache: PagedKVCache,
    request: Hashable,
    destination: int,
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Send a request to a rank that calls `receive_request`.

    The request stays here as well; `BlockManager.free` it when it is of no more use.

    Parameters
    ----------
    manager, cache : BlockManager, PagedKVCache
        The books and the pool of this rank. Nothing may write to the request's blocks meanwhile.
    request : Hashable
        The request; its name can be pickled.
    destination : int
        The global rank that receives.
    group : torch.distributed.ProcessGroup, optional
        A group that both ranks are in. None: the default one.

    Returns
    -------
    int
        Blocks that were sent, fewer than the request has where the receiver had some.

    Raises
    ------
    UnknownRequest, InFlight
        The request is not there, or not yet.
    TransferRefused
        The receiver has too few blocks, a request of this name, or another kind of pool.
    """
    transfer = _Transfer(manager.ledger)
    try:
        with _telling(destination, group), manager.lock, manager.ledger as ledger:
            held = ledger.find(request).fork()
            hold(ledger, transfer.name, [held])
            rows = {block: row for row, block in enumerate(dict.fromkeys(held.blocks))}
            books = describe_requests(ledger, {request: held}, rows)
        pool = _pool_like(manager, cache)
        books |= {"num_committed": held.num_committed, "pool": pool}
        _send(books, destination, group)
        wanted = _wanted(_receive(destination, group), len(rows))
        blocks = torch.tensor(list(rows), dtype=torch.int64, device=cache.device)[wanted]
        for layer in range(cache.num_layers if wanted else 0):
            for part in cache.block_parts(layer):
                dist.send(part[blocks], dst=destination, group=group)
        with manager.lock, manager.ledger as ledger:
            settle(ledger, transfer.name)
        return len(wanted)
    finally:
        transfer.abandon()


def receive_request(
    manager: BlockManager,
    cache: PagedKVCache,
    source: int,
    *,
    group: dist.ProcessGroup | None = None,
) -> Hashable:
    """Receive a request from a rank that calls `send_request`.

    It arrives under its name, with its tokens, extra keys and digests. What the sender has
    committed is committed here too. The manager's watermark holds, as for new requests.

    Parameters
    ----------
    manager, cache : BlockManager, PagedKVCache
        The books and the pool of this rank; of any number of blocks, else like the sender's. Both
        serve the same model.
    source : int
        The global rank that sends.
    group : torch.distributed.ProcessGroup, optional
        A group that both ranks are in. None: the default one.

    Returns
    -------
    Hashable
        The name of the request.

    Raises
    ------
    OutOfBlocks
        Too few blocks are free.
    ValueError
        The pools are of different kinds, or a request of this name exists.
    TransferRefused
        The sender does not have the request.
    """
    books = _receive(source, group)
    transfer = _Transfer(manager.ledger)
    try:
        with _telling(source, group), manager.lock, manager.ledger as ledger:
            name, arriving, num_committed = _newcomer(books, ledger, _pool_like(manager, cache))
            missing = arrive(ledger, transfer.name, {name: arriving}, sharing=True, watermark=True)
        _send({"rows": list(missing)}, source, group)
        blocks = torch.tensor(list(missing.values()), dtype=torch.int64, device=cache.device)
        for layer in range(cache.num_layers if missing else 0):
            for part in cache.block_parts(layer):
                content = part.new_empty(len(blocks), *part.shape[1:])
                dist.recv(content, src=source, group=group)
                part[blocks] = content
        with manager.lock, manager.ledger as ledger:
            settle(ledger, transfer.name)
            if ledger.requests.get(name) is arriving:  # and was not freed on its way
                ledger.commit(arriving, num_committed * ledger.block_size)
        return name
    finally:
        transfer.abandon()


# ------------------------------------------------------------------ messages


def _pool_like(manager: BlockManager, cache: PagedKVCache) -> dict[str, Any]:
    """Return what must be equal on both ranks: blocks travel as they lie in memory."""
    return describe_sizes(manager, cache) | {"layout": cache.layout}


def _send(message: dict[str, Any], rank: int, group: dist.ProcessGroup | None) -> None:
    dist.send_object_list([message], dst=rank, group=group)


def _receive(rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the other rank's message, or raise its refusal."""
    messages: list[Any] = [None]
    dist.recv_object_list(messages, src=rank, group=group)
    message = messages[0]
    if not isinstance(message, dict):
        raise ValueError(f"the message of rank {rank} is damaged: it is {message!r}")
    if "refusal" in message:
        raise TransferRefused(f"rank {rank}: {message['refusal']}")
    return message


@contextmanager
def _telling(rank: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell the other rank, which waits for a message, of a refusal here."""
    try:
        yield
    except Exception as error:
        _send({"refusal": f"{type(error).__name__}: {error}"}, rank, group)
        raise


# ------------------------------------------------------------------ books


class _Transfer:
    """A transfer that is over with its call, however that ends.

    If `abandon` is broken off as well, the weak reference that the books know it by tells them.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.name = weakref.ref(self, ledger.orphans.append)

    def abandon(self) -> None:
        """Let go of all that it still holds."""
        with self._ledger.lock, self._ledger:
            self._ledger.abandon(self.name)


def _newcomer(
    books: dict[str, Any], ledger: Ledger, pool: dict[str, Any]
) -> tuple[Hashable, Holding, int]:
    """Read the request that arrives, and how many of its blocks are committed, or refuse it."""
    theirs = books.get("pool")
    with refusing_damage("the sender's description"):
        if not isinstance(theirs, dict):
            raise TypeError(f"pool is {theirs!r}, expected what the pool is like")
    refuse_other_sizes("the sender's pool", theirs, pool)
    with refusing_damage("the sender's description"):
        requests = read_records(books, ledger).requests
        if len(requests) != 1:
            raise ValueError(f"it has {len(requests)} requests, expected one")
        ((request, held),) = requests.items()
        full = held.num_tokens // ledger.block_size
        num_committed = checked_int("num_committed", books.get("num_committed"), 0, full)
    ledger.refuse_existing("request", request)
    held.generation = ledger.generation
    return request, held, num_committed


def _wanted(answer: dict[str, Any], num_rows: int) -> list[int]:
    """Read which rows the receiver asks for."""
    with refusing_damage("the receiver's answer"):
        wanted = answer.get("rows")
        if not isinstance(wanted, list) or len(set(wanted)) < len(wanted):
            raise ValueError(f"rows is {wanted!r}, expected a list with each row once")
        return [checked_int("a row", row, 0, num_rows - 1) for row in wanted]
