"""Requests and cached prefixes on disk: written by one process, continued by another.

A snapshot is a folder of two files. ``blocks.safetensors`` has the blocks, each once however many
requests share it: ``key.0``, ``value.0``, ``key.1``, ... of shape ``[rows, block_size,
num_kv_heads, head_dim]``, one pair per layer, and ``key_scale.0``, ``value_scale.0``, ... ``[rows,
block_size, num_kv_heads]`` where the pool has scales per token. ``books.json`` says which rows
belong to whom, by which digests they are found, and what dtype and other scales the pool has. How
the two are kept together is in `paged_ops.pool.snapshot_files`.

Needs the safetensors package.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import torch

from paged_ops.blocks.arrival import arrive, own, settle
from paged_ops.blocks.holding import Holding
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.dtypes import as_bytes
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.records import (
    describe_requests,
    describe_sizes,
    read_records,
    refuse_other_sizes,
    refusing_damage,
)
from paged_ops.pool.snapshot_files import read_blocks, read_books, write_files


def save_snapshot(
    folder: str | Path,
    manager: BlockManager,
    cache: PagedKVCache,
    requests: Iterable[Hashable] | None = None,
) -> None:
    """Write requests, their blocks, and what can be found.

    Nothing may write to the pool meanwhile; the manager is locked.

    Parameters
    ----------
    folder : str or Path
        Where to; it is made. A snapshot in it is replaced when the new one is complete: a save that
        fails or is killed leaves it as it was. One save at a time.
    manager : BlockManager
        The books.
    cache : PagedKVCache
        The pool that they are about.
    requests : iterable of Hashable, optional
        Which requests; of what can be found, only their blocks are written. None: all requests
        and everything that can be found.

    Raises
    ------
    UnknownRequest, InFlight
        A request is not there, or not yet.
    TypeError
        A request's name is neither a str nor an int, which are what JSON keeps apart.
    ValueError
        The books and the pool are of different sizes, or all is to be written while copies are
        in flight.

    Examples
    --------
    >>> import tempfile
    >>> cache, manager = PagedKVCache(1, 8, 4, 1, 8), BlockManager(8, 4)
    >>> _ = manager.allocate("a", [3, 1, 4, 1, 5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_snapshot(folder, manager, cache)
    ...     other = BlockManager(16, 4)
    ...     restore_snapshot(folder, other, PagedKVCache(1, 16, 4, 1, 8))
    ['a']
    >>> other.num_tokens("a"), other.block_table("a")
    (5, [0, 1])
    """
    _refuse_other_sizes(manager, cache)
    with manager.lock, manager.ledger as ledger:
        held = _chosen(ledger, requests)
        blocks = dict.fromkeys(block for one in held.values() for block in one.blocks)
        if requests is None:
            blocks |= dict.fromkeys(ledger.stock.prefix.idle_blocks())
        rows = {block: row for row, block in enumerate(blocks)}
        books = describe_sizes(manager, cache) | describe_requests(ledger, held, rows)
        contents = _gathered(cache, list(blocks))
    write_files(Path(folder), books, contents)


def restore_snapshot(
    folder: str | Path, manager: BlockManager, cache: PagedKVCache
) -> list[Hashable]:
    """Bring the requests of a snapshot into a pool, beside whatever it holds already.

    They continue bit for bit as they would have in the pool that they come from. Of the cached
    blocks that no request holds, those most recently used come along as far as there is room.

    Parameters
    ----------
    folder : str or Path
        The snapshot.
    manager : BlockManager
        The books, of any number of blocks, of the same block size and sliding window.
    cache : PagedKVCache
        The pool; only its number of blocks, its device and its layout may differ. Scales per head
        or tensor have been set to the same.

    Returns
    -------
    list of Hashable
        The names of the requests.

    Raises
    ------
    FileNotFoundError
        There is no complete snapshot.
    OutOfBlocks
        Too few blocks are free for the requests. In this and all other cases nothing was changed.
    ValueError
        The snapshot is of another kind of pool, is damaged, or has a request that exists.
    """
    _refuse_other_sizes(manager, cache)
    books = read_books(Path(folder))
    refuse_other_sizes("snapshot", books, describe_sizes(manager, cache))
    with refusing_damage("snapshot"):
        records = read_records(books, manager.ledger)
        _refuse_other_names(records.requests)
        blocks = read_blocks(Path(folder), books)
        _refuse_other_tensors(blocks, cache, records.num_rows)
    with manager.lock, manager.ledger as ledger:
        _place(ledger, cache, records.requests, records.published, blocks)
        return list(records.requests)


# -------------------------------------------------------------------- writing


def _chosen(ledger: Ledger, requests: Iterable[Hashable] | None) -> dict[Any, Holding]:
    """Return what the chosen requests hold, or refuse them."""
    if requests is None:
        if ledger.flights:
            raise ValueError("requests is None, but copies are in flight; finish them first")
        requests = list(ledger.requests)
    held = {request: ledger.find(request) for request in requests}
    _refuse_other_names(held)
    return held


def _refuse_other_names(requests: Iterable[object]) -> None:
    """Refuse names that JSON doesn't keep apart."""
    for request in requests:
        if isinstance(request, bool) or not isinstance(request, (str, int)):
            raise TypeError(f"request {request!r} is no str or int, so JSON can't name it")


def _gathered(cache: PagedKVCache, blocks: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    return {
        f"{name}.{layer}": as_bytes(content)[ids].view(content.dtype).contiguous().cpu()
        for layer in range(cache.num_layers)
        for name, content in _contents(cache, layer).items()
    }


def _contents(cache: PagedKVCache, layer: int) -> dict[str, torch.Tensor]:
    """Return views of all that a layer's blocks hold, in shapes that no layout changes."""
    key_cache, value_cache = cache.layer(layer)
    contents = {"key": key_cache, "value": value_cache}
    if cache.scale_granularity == "token":  # others belong to no block; the books have them
        for name, scale in cache.scales(layer).items():
            assert isinstance(scale, torch.Tensor)
            contents[name] = scale
    return contents


# -------------------------------------------------------------------- reading


def _refuse_other_tensors(
    blocks: dict[str, torch.Tensor], cache: PagedKVCache, num_rows: int
) -> None:
    """Refuse tensors that are not what the pool has in so many blocks."""
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in blocks.items()}
    expected = {
        f"{name}.{layer}": (content.dtype, (num_rows, *content.shape[1:]))
        for layer in range(cache.num_layers)
        for name, content in _contents(cache, layer).items()
    }
    for name in sorted(found.keys() | expected.keys()):
        ours, theirs = expected.get(name), found.get(name)
        if ours != theirs:
            raise ValueError(f"its tensor {name} is {theirs}, expected {ours}")


def _place(
    ledger: Ledger,
    cache: PagedKVCache,
    requests: dict[Any, Holding],
    published: dict[int, bytes],
    blocks: dict[str, torch.Tensor],
) -> None:
    """Give every row a block, write it there, and only then let it be found."""
    prefix, restoring = ledger.stock.prefix, object()
    for held in requests.values():
        held.generation = ledger.generation
    places = arrive(ledger, restoring, requests, sharing=False, watermark=False)
    unheld = [
        row
        for row, digest in published.items()
        if row not in places and prefix.find(digest) is None
    ]
    room = ledger.stock.num_free - prefix.num_idle if ledger.prefix_caching else 0
    cached = unheld[max(0, len(unheld) - room) :]  # those that were used last
    taken = own(ledger, [], len(cached))
    places |= zip(cached, taken, strict=True)
    _write(cache, places, blocks)
    if ledger.prefix_caching:
        ledger.publish((published[row], places[row]) for row in places if row in published)
    settle(ledger, restoring)
    ledger.stock.release(taken[::-1])  # in the order of eviction


def _write(cache: PagedKVCache, places: dict[int, int], blocks: dict[str, torch.Tensor]) -> None:
    rows = torch.tensor(list(places), dtype=torch.int64)
    ids = torch.tensor(list(places.values()), dtype=torch.int64, device=cache.device)
    for layer in range(cache.num_layers):
        for name, content in _contents(cache, layer).items():
            saved = as_bytes(blocks[f"{name}.{layer}"])[rows]
            as_bytes(content)[ids] = saved.to(cache.device)


def _refuse_other_sizes(manager: BlockManager, cache: PagedKVCache) -> None:
    """Refuse books and a pool that don't belong together."""
    for name in ("num_blocks", "block_size"):
        ours, theirs = getattr(manager, name), getattr(cache, name)
        if ours != theirs:
            raise ValueError(f"manager has {name} {ours}, expected {theirs}, as the cache")
