"""A request moves from one rank to another: its books and its blocks, by point-to-point calls.

This is how a rank that computes prompts hands a request to one that decodes. The sender describes
the request; the receiver takes blocks for it, shares those whose content it has cached already, and
asks for the rest; the sender sends these, layer by layer, each block whole and its scales with it.
Whatever one side refuses is raised on both, and nothing has changed then.

While blocks travel, both managers hold them: a request that is freed meanwhile gives back its
blocks when the transfer is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paged_ops.blocks.manager import NO_BLOCK, BlockManager, _Request
from paged_ops.blocks.swap import found_blocks
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.records import describe_requests, describe_sizes, read_request


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
    transfer = object()
    with _telling(destination, group):
        held = _hold(manager, request, transfer)
    try:
        rows = {block: row for row, block in enumerate(dict.fromkeys(held.blocks))}
        _send(_describe(manager, cache, request, held, rows), destination, group)
        wanted = _receive(destination, group)["rows"]
        blocks = torch.tensor(list(rows), dtype=torch.int64, device=cache.device)[wanted]
        for layer in range(cache.num_layers if wanted else 0):
            for part in cache._of_blocks(layer):
                dist.send(part[blocks], dst=destination, group=group)
    finally:
        with manager._lock:
            _let_go(manager, transfer)
    return len(wanted)


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
    transfer = object()
    with _telling(source, group), manager._lock:
        arriving, missing = _admit(manager, cache, books, transfer)
    name = books["requests"][0]["name"]
    try:
        _send({"rows": list(missing)}, source, group)
        blocks = torch.tensor(list(missing.values()), dtype=torch.int64, device=cache.device)
        for layer in range(cache.num_layers if missing else 0):
            for part in cache._of_blocks(layer):
                content = part.new_empty(len(blocks), *part.shape[1:])
                dist.recv(content, src=source, group=group)
                part[blocks] = content
    except BaseException:
        with manager._lock:
            if manager._arriving.get(name) is arriving:
                manager._end(name)
            _let_go(manager, transfer)
        raise
    with manager._lock:
        if manager._arriving.get(name) is arriving:  # and was not freed, nor made anew since then
            manager._requests[name] = manager._arriving.pop(name)
            manager._publish(arriving, books["num_committed"] * manager.block_size)
        _let_go(manager, transfer)
    return name  # type: ignore[no-any-return]


# ------------------------------------------------------------------ messages


def _describe(
    manager: BlockManager,
    cache: PagedKVCache,
    request: Hashable,
    held: _Request,
    rows: dict[int, int],
) -> dict[str, Any]:
    """Return what the receiver has to know."""
    with manager._lock:
        books = describe_requests(manager, {request: held}, rows)
    return {**books, "num_committed": held.num_committed, "pool": _pool_like(manager, cache)}


def _pool_like(manager: BlockManager, cache: PagedKVCache) -> dict[str, Any]:
    """Return what must be equal on both ranks: blocks travel as they lie in memory."""
    return describe_sizes(manager, cache) | {"layout": cache.layout}


def _send(message: dict[str, Any], rank: int, group: dist.ProcessGroup | None) -> None:
    dist.send_object_list([message], dst=rank, group=group)


def _receive(rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the other rank's message, or raise its refusal."""
    messages: list[Any] = [None]
    dist.recv_object_list(messages, src=rank, group=group)
    message: dict[str, Any] = messages[0]
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


def _hold(manager: BlockManager, request: Hashable, transfer: object) -> _Request:
    """Let a transfer hold the blocks of a request, whatever becomes of it."""
    with manager._lock:
        held = manager._find(request).fork()
        manager._share(held.blocks)
        manager._holds[transfer] = [held]
        return held


def _let_go(manager: BlockManager, transfer: object) -> None:
    for held in manager._holds.pop(transfer):
        manager._release(held.blocks)


def _admit(
    manager: BlockManager, cache: PagedKVCache, books: dict[str, Any], transfer: object
) -> tuple[_Request, dict[int, int]]:
    """Take blocks for a request; return it, and the rows to ask for with their blocks."""
    for name, value in _pool_like(manager, cache).items():
        if books["pool"][name] != value:
            raise ValueError(
                f"the sender's pool has {name} {books['pool'][name]!r}, expected {value!r}, as here"
            )
    entry = books["requests"][0]
    manager._refuse_existing("request", entry["name"])
    held = read_request(entry, manager)
    held.generation = manager._generation
    _refuse_other_digests(held, books["published"])
    found = found_blocks([held], manager)
    missing = [row for row in held.blocks if row not in found]
    idle = sum(not manager._ref_counts[block] for block in found.values())
    manager._refuse_beyond_free(len(missing), idle, manager._reserved())
    manager._share(list(found.values()))
    taken = dict(zip(missing, manager._take(len(missing)), strict=True))
    places = found | taken
    held.table = [places.get(row, NO_BLOCK) for row in held.table]
    manager._arriving[entry["name"]] = held
    manager._holds[transfer] = [held.fork()]
    manager._share(held.blocks)
    return held, taken


def _refuse_other_digests(held: _Request, published: list[Any]) -> None:
    """Refuse blocks that the sender finds under other digests than this rank would."""
    theirs = {row: bytes.fromhex(digest) for digest, row in published}
    for row, digest in zip(held.blocks, held.digests[held.num_released :], strict=False):
        if theirs.get(row, digest) != digest:
            raise ValueError(
                f"the sender's digest of block {row} of {len(held.blocks)} is {theirs[row].hex()}, "
                f"expected {digest.hex()}, that of its tokens"
            )
