"""Requests as plain data: what a snapshot keeps of them, and what one rank tells another.

Blocks are named by rows, which are numbered anew; the same row twice is the same block twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from paged_ops.blocks.audit import check_holding
from paged_ops.blocks.digest import PlacedKey, extend_chain
from paged_ops.blocks.holding import NO_BLOCK, Holding
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.pool.kv_cache import PagedKVCache


def describe_sizes(manager: BlockManager, cache: PagedKVCache) -> dict[str, Any]:
    """Return what must be equal where the requests are to go on."""
    names = "num_layers", "block_size", "num_kv_heads", "head_dim", "head_dim_v"
    sizes: dict[str, Any] = {name: getattr(cache, name) for name in names}
    return sizes | {
        "dtype": str(cache.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "scale_granularity": cache.scale_granularity,
        "scales": cache.chosen_scales(),
        "sliding_window": manager.sliding_window,
    }


def describe_requests(
    ledger: Ledger, held: Mapping[Any, Holding], rows: Mapping[int, int]
) -> dict[str, Any]:
    """Describe requests, and the digests by which their blocks and others can be found.

    Parameters
    ----------
    ledger : Ledger
        The books; they are open.
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
    digests = [(ledger.stock.prefix.digest(block), row) for block, row in rows.items()]
    return {
        "requests": [
            {
                "name": name,
                "table": [rows[block] for block in one.table],
                "num_tokens": one.num_tokens,
                # Without ids nothing more is published: right for what a flush has outlawed.
                "tokens": list(one.tokens) if one.generation == ledger.generation else [],
                "keys": [[key.start, key.stop, key.encoded.hex()] for key in one.keys],
                "num_released": one.num_released,
            }
            for name, one in held.items()
        ],
        "published": [[digest.hex(), row] for digest, row in digests if digest is not None],
    }


def read_request(entry: Mapping[str, Any], ledger: Ledger) -> Holding:
    """Make a request from its description; its table still has rows in it.

    Raises
    ------
    AssertionError
        The description contradicts itself.
    """
    held = Holding(
        entry["table"],
        entry["num_tokens"],
        array("q", entry["tokens"] if ledger.prefix_caching else ()),
        tuple(PlacedKey(start, stop, bytes.fromhex(text)) for start, stop, text in entry["keys"]),
        num_released=entry["num_released"],
    )
    full = len(held.tokens) // ledger.block_size
    extend_chain(held.digests, held.tokens, ledger.block_size, held.keys, full)
    check_holding(entry["name"], held, ledger.block_size)
    return held
