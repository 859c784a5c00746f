"""Requests as plain data: what a snapshot keeps of them, and what one rank tells another.

Blocks are named by rows, which are numbered anew; the same row twice is the same block twice. What
comes from outside is read whole and checked whole before anything is done with it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paged_ops.arguments import checked_int
from paged_ops.blocks.audit import check_holding
from paged_ops.blocks.digest import PlacedKey, extend_chain, token_array
from paged_ops.blocks.holding import NO_BLOCK, Holding
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.pool.kv_cache import PagedKVCache

REQUEST_FIELDS = {"name", "table", "num_tokens", "tokens", "keys", "num_released"}
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Records:
    """Requests that have been read, and what their rows and others are found by.

    Attributes
    ----------
    requests : dict
        What each request is to hold, by its name. Their tables have rows in them.
    published : dict of int to bytes
        The digest of each row that can be found, in the order of the description.
    """

    requests: dict[Any, Holding]
    published: dict[int, bytes]

    @property
    def num_rows(self) -> int:
        """How many rows there are: 0 to `num_rows` - 1, each held or published."""
        return len(
            {row for held in self.requests.values() for row in held.blocks} | set(self.published)
        )


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


def refuse_other_sizes(whose: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse sizes from outside that are not those here, whatever compares equal to these."""
    for name, value in ours.items():
        other = theirs.get(name, "nothing")
        if repr(other) != repr(value):
            raise ValueError(f"{whose} has {name} {other!r}, expected {value!r}, as here")


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


@contextmanager
def refusing_damage(what: str) -> Iterator[None]:
    """Say of what is wrong with something from outside that it is damaged."""
    try:
        yield
    except (ValueError, TypeError, AssertionError, RecursionError) as error:
        raise ValueError(f"{what} is damaged: {error}") from None


def read_records(description: Mapping[str, Any], ledger: Ledger) -> Records:
    """Read what `describe_requests` has written, or refuse it.

    Parameters
    ----------
    description : mapping of str to object
        From outside: nothing is known of it.
    ledger : Ledger
        The books that the requests are to come into. Only its sizes are looked at.

    Raises
    ------
    ValueError, TypeError, AssertionError
        The description is none, or contradicts itself.
    """
    requests: dict[Any, Holding] = {}
    for entry in _listed("requests", description.get("requests")):
        name, held = _read_request(entry, ledger)
        if name in requests:
            raise ValueError(f"it has the request {name!r} twice")
        requests[name] = held
    published: dict[int, bytes] = {}
    for entry in _listed("published", description.get("published")):
        text, row = _listed("published", entry, 2)
        if _integer("row", row, 0) in published:
            raise ValueError(f"row {row} is published twice")
        published[row] = _bytes("a digest", text, DIGEST_BYTES)
    records = Records(requests, published)
    _refuse_contradictions(records)
    if not ledger.prefix_caching:
        for held in requests.values():
            held.tokens, held.digests = array("q"), []
    return records


def _read_request(entry: object, ledger: Ledger) -> tuple[Any, Holding]:
    """Read a request with all the digests that its tokens give."""
    if not isinstance(entry, dict) or entry.keys() != REQUEST_FIELDS:
        raise ValueError(f"a request is {entry!r}, expected {sorted(REQUEST_FIELDS)}")
    name = entry["name"]
    hash(name)
    num_tokens = _integer("num_tokens", entry["num_tokens"], 0)
    unseen = min(ledger.first_seen(num_tokens), ledger.blocks_for(num_tokens))
    num_released = _integer("num_released", entry["num_released"], 0, unseen)
    table = _listed("table", entry["table"])
    for row in table[:num_released]:
        _integer("a released row", row, NO_BLOCK, NO_BLOCK)
    for row in table[num_released:]:
        _integer("a row", row, 0)
    tokens = token_array(_listed("tokens", entry["tokens"]))
    if len(tokens) > num_tokens:
        raise ValueError(f"request {name!r} has {len(tokens)} ids of {num_tokens} tokens")
    keys = tuple(_read_key(key) for key in _listed("keys", entry["keys"]))
    if list(keys) != sorted(keys, key=lambda key: key.encoded):
        raise ValueError(f"the extra keys of request {name!r} are in disorder")
    held = Holding(table, num_tokens, tokens, keys, num_released=num_released)
    full = len(tokens) // ledger.block_size
    extend_chain(held.digests, tokens, ledger.block_size, keys, full)
    check_holding(name, held, ledger.block_size)
    return name, held


def _read_key(entry: object) -> PlacedKey:
    start, stop, text = _listed("an extra key", entry, 3)
    _integer("start", start, 0, sys.maxsize - 1)
    if stop is not None:
        _integer("stop", stop, start + 1)
    return PlacedKey(start, stop, _bytes("an extra key", text))


def _refuse_contradictions(records: Records) -> None:
    """Refuse rows that are more than one thing, or nothing."""
    places: dict[int, int] = {}
    digests = dict(records.published)
    for name, held in records.requests.items():
        for index, row in enumerate(held.blocks, held.num_released):
            if places.setdefault(row, index) != index:
                raise ValueError(
                    f"row {row} is block {places[row]} of one request and {index} of {name!r}"
                )
            digest = held.digests[index] if index < len(held.digests) else None
            if digest is not None and digests.setdefault(row, digest) != digest:
                raise ValueError(f"row {row} is not what {name!r} has there")
    rows = places.keys() | records.published.keys()
    if rows and max(rows) >= len(rows):
        raise ValueError(f"it names row {max(rows)}, but not all of the rows before it")
    shared = {digest for row, digest in records.published.items() if row in places}
    cached = [digest for row, digest in records.published.items() if row not in places]
    if len(shared.union(cached)) < len(shared) + len(cached):
        raise ValueError("it has a cached block twice")


# -------------------------------------------------------------------- fields, of any type at first


def _listed(name: str, value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        many = "" if length is None else f" of {length}"
        raise TypeError(f"{name} is {value!r}, expected a list{many}")
    return value


def _integer(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}, expected an integer")
    return checked_int(name, value, minimum, maximum)


def _bytes(name: str, value: object, length: int | None = None) -> bytes:
    """Read bytes as hexadecimal digits, which have one way to be written."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected hexadecimal digits")
    content = bytes.fromhex(value)
    if content.hex() != value or length not in (None, len(content)):
        raise ValueError(f"{name} is {value!r}, expected {length or 'some'} bytes")
    return content
