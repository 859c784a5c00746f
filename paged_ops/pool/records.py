"""Requests as plain data: what a snapshot keeps of them, and what one rank tells another.

Blocks are named by rows, which are numbered anew; the same row twice is the same block twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from paged_ops.blocks.digest import PlacedKey, extend_chain
from paged_ops.blocks.manager import NO_BLOCK, BlockManager, _Request
from paged_ops.pool.kv_cache import PagedKVCache


def describe_sizes(manager: BlockManager, cache: PagedKVCache) -> dict[str, Any]:
    """Return what must be equal where the requests are to go on."""
    names = "num_layers", "block_size", "num_kv_heads", "head_dim", "head_dim_v"
    sizes: dict[str, Any] = {name: getattr(cache, name) for name in names}
    return sizes | {
        "dtype": str(cache.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "scale_granularity": cache.scale_granularity,
        "scales": cache._set_scales(),
        "sliding_window": manager.sliding_window,
    }


def describe_requests(
    manager: BlockManager, held: Mapping[Any, _Request], rows: Mapping[int, int]
) -> dict[str, Any]:
    """Describe requests, and the digests by which their blocks and others can be found.

    Parameters
    ----------
    manager : BlockManager
        The books; its lock is held.
    held : mapping
        The requests by their names.
    rows : mapping of int to int
        The row of each block, of those of the requests at least.

    Returns
    -------
    dict
        ``"requests"`` and ``"published"``, in plain lists, numbers and strings.
    """
    rows = {**rows, NO_BLOCK: NO_BLOCK}
    digests = [(manager._prefix.digest(block), row) for block, row in rows.items()]
    return {
        "requests": [
            {
                "name": name,
                "table": [rows[block] for block in one.table],
                "num_tokens": one.num_tokens,
                # Without ids nothing more is published: right for what a flush has outlawed.
                "tokens": list(one.tokens) if one.generation == manager._generation else [],
                "keys": [[key.start, key.stop, key.encoded.hex()] for key in one.keys],
                "num_released": one.num_released,
            }
            for name, one in held.items()
        ],
        "published": [[digest.hex(), row] for digest, row in digests if digest is not None],
    }


def read_request(entry: Mapping[str, Any], manager: BlockManager) -> _Request:
    """Make a request from its description; its table still has rows in it.

    Raises
    ------
    AssertionError
        The description contradicts itself.
    """
    held = _Request(
        entry["table"],
        entry["num_tokens"],
        array("q", entry["tokens"] if manager._prefix_caching else ()),
        tuple(PlacedKey(start, stop, bytes.fromhex(text)) for start, stop, text in entry["keys"]),
        num_released=entry["num_released"],
    )
    full = len(held.tokens) // manager.block_size
    extend_chain(held.digests, held.tokens, manager.block_size, held.keys, full)
    manager._check_request(entry["name"], held)
    return held
