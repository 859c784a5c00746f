"""The name of a full block: a digest of its tokens and of all that came before them.

Two blocks with one digest hold the same keys and values, on whatever machine they were computed,
as long as the model is the same. So the format is fixed, byte for byte (all integers are unsigned
and little-endian unless said otherwise)::

    root    = SHA-256("paged-ops block v1")
    digest  = SHA-256(parent | n | token * n | m | key * m)

    parent  : 32 bytes, the digest of the block before, or the root
    n       : 8 bytes, the number of tokens, which is the block size
    token   : 8 bytes each, signed
    m       : 8 bytes, the number of extra keys that touch the block
    key     : each as value((kind, value, start, stop)); in the order of these bytes

    value(None)        = "N"
    value(bool)        = "T" or "F"
    value(int)         = "i" | length | decimal digits in ASCII
    value(str)         = "s" | length | UTF-8
    value(bytes)       = "b" | length | the bytes
    value(tuple, list) = "t" | number of items | value of each
    length, number of items: 8 bytes

Every part has a fixed length or says its length first, so no two different inputs give the same
bytes. SHA-256 is not replaceable: a weak hash would need the tokens to be compared on a hit.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paged_ops.arguments import checked_int

_INT64_MIN = -(2**63)
_LOW_BYTE = 0 if sys.byteorder == "little" else 7

ROOT = hashlib.sha256(b"paged-ops block v1").digest()
"""The parent of every first block."""


class ExtraKey(NamedTuple):
    """Something besides the tokens that the keys and values of a request depend on.

    Attributes
    ----------
    kind : str
        What it is: ``"adapter"``, ``"image"``, ``"salt"`` or any other word. Values of different
        kinds never meet.
    value : None, bool, int, str, bytes, or a tuple or list of these
        Which one it is. All of it counts, so an adapter that may be loaded again under its old
        name wants a version beside the name.
    start, stop : int, int or None
        The tokens it lies on, for an image among placeholder tokens; stop None: up to the end.
        Blocks wholly before `start` don't depend on it. All later ones do, those behind `stop`
        through their parents.
    """

    kind: str
    value: object
    start: int = 0
    stop: int | None = None


ExtraKeys = Iterable[ExtraKey | tuple[str, object]]
"""Extra keys as callers give them: a pair (kind, value) stands for one on the whole request."""


class PlacedKey(NamedTuple):
    """An extra key in its final bytes, and the tokens that it lies on."""

    start: int
    stop: int | None
    encoded: bytes


def placed_keys(extra_keys: ExtraKeys) -> tuple[PlacedKey, ...]:
    """Check extra keys and encode them, in the order of their bytes.

    Raises
    ------
    TypeError
        A key is no pair or ExtraKey, its kind no str, or its value of a type that has no format.
    ValueError
        A range is empty or begins before the first token.
    """
    placed = []
    for given in extra_keys:
        if isinstance(given, str) or not isinstance(given, Sequence) or not 2 <= len(given) <= 4:
            raise TypeError(f"extra_keys has {given!r}, expected (kind, value) or an ExtraKey")
        key = ExtraKey(*given)
        if not isinstance(key.kind, str):
            raise TypeError(f"extra_keys has the kind {key.kind!r}, expected a str")
        stop = sys.maxsize if key.stop is None else key.stop
        if not 0 <= key.start < stop:
            raise ValueError(
                f"extra_keys has {key.kind} on tokens {key.start} to {key.stop}, expected "
                f"0 <= start < stop"
            )
        placed.append(PlacedKey(key.start, key.stop, _encoded(tuple(key))))
    return tuple(sorted(placed, key=lambda key: key.encoded))


def extend_chain(
    digests: list[bytes],
    tokens: array[int],
    block_size: int,
    keys: Sequence[PlacedKey],
    num_blocks: int,
) -> None:
    """Lengthen a chain of digests to `num_blocks` blocks of the tokens, in place."""
    first = len(digests)
    if first >= num_blocks:
        return
    parent = digests[-1] if digests else ROOT
    count = struct.pack("<Q", block_size)
    ids = _little_endian(tokens[first * block_size : num_blocks * block_size])
    size = len(ids) // (num_blocks - first)  # bytes of the ids of a block
    # Nearly always the same for every block: no key, or keys on the whole request.
    everywhere = not keys or all(key.start == 0 and key.stop is None for key in keys)
    suffix = _suffix(keys)
    sha256, join, append = hashlib.sha256, b"".join, digests.append  # long prompts are hashed here
    for (body,) in struct.iter_unpack(f"{size}s", ids):
        if not everywhere:
            start = len(digests) * block_size
            suffix = _suffix([key for key in keys if _touches(key, start, start + block_size)])
        parent = sha256(join((parent, count, body, suffix))).digest()
        append(parent)


def _touches(key: PlacedKey, start: int, stop: int) -> bool:
    return key.start < stop and (key.stop is None or key.stop > start)


def chain_digests(
    tokens: Sequence[int], block_size: int, extra_keys: ExtraKeys = ()
) -> list[bytes]:
    """Return the digests of the full blocks of a prompt, as every manager names them.

    This is for a router that follows the events of several managers.

    Parameters
    ----------
    tokens : sequence of int
        Token ids.
    block_size : int
        Tokens per block.
    extra_keys : iterable of ExtraKey or (str, value)
        As for `BlockManager.allocate`.

    Returns
    -------
    list of bytes
        32 bytes for each full block.

    Examples
    --------
    >>> [digest.hex()[:8] for digest in chain_digests([1, 2, 3, 4, 5], block_size=2)]
    ['cb242fa7', 'b00314f5']
    >>> tenant = chain_digests([1, 2], 2, [("salt", "tenant 7")])
    >>> tenant == chain_digests([1, 2], 2, [("adapter", "tenant 7")])
    False
    """
    digests: list[bytes] = []
    ids = token_array(tokens)
    extend_chain(digests, ids, block_size, placed_keys(extra_keys), len(ids) // block_size)
    return digests


def token_array(tokens: Sequence[int]) -> array[int]:
    """Return token ids as an array of 64-bit integers, or refuse them.

    Any sequence of integers is read as integers, `bytes` and arrays of any type included.
    """
    listed = tokens if type(tokens) is list else _listed(tokens)
    count = len(listed)
    try:
        # Of struct.pack, many take half the time, and few take longer, by its format.
        ids = array("q", listed) if count < 32 else array("q", struct.pack(f"{count}q", *listed))
        low_bytes = ids.tobytes()[_LOW_BYTE :: ids.itemsize]
        if 0 in low_bytes or 1 in low_bytes:
            _refuse_bools(listed, low_bytes)
    except (struct.error, TypeError, OverflowError, ValueError) as error:
        raise TypeError(f"tokens holds something that is no 64-bit integer: {error}") from None
    return ids


def _listed(tokens: Sequence[int]) -> list[int]:
    """Return what a sequence holds: an array's buffer may hold anything but 64-bit integers."""
    dimensions = getattr(tokens, "ndim", 0)  # of an array or a tensor
    if dimensions > 1:
        raise TypeError(f"tokens has {dimensions} dimensions, expected 1")
    if isinstance(tokens, str) or not (dimensions or isinstance(tokens, Sequence)):
        raise TypeError(f"tokens is {tokens!r}, expected a sequence of token ids")
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)


def _refuse_bools(listed: Sequence[Any], low_bytes: bytes) -> None:
    """Refuse what an array takes for 0 or 1: of these alone, by their low bytes, types matter."""
    for sought in (0, 1):
        at = low_bytes.find(sought)
        while at >= 0:
            if type(listed[at]) is not int:
                checked_int("a token", _as_python(listed[at]), _INT64_MIN)
            at = low_bytes.find(sought, at + 1)


def _as_python(value: Any) -> Any:
    """Return a scalar of an array library as Python's, which tells a bool from an integer."""
    return value.tolist() if hasattr(value, "tolist") else value


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _suffix(keys: Sequence[PlacedKey]) -> bytes:
    return struct.pack("<Q", len(keys)) + b"".join([key.encoded for key in keys])


def _encoded(value: object) -> bytes:
    """Encode a value with its type and its length."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, (tuple, list)):
        return _with_length(b"t", len(value)) + b"".join(map(_encoded, value))
    if isinstance(value, int):
        content = b"%d" % value
        return _with_length(b"i", len(content)) + content
    if isinstance(value, str):
        content = value.encode()
        return _with_length(b"s", len(content)) + content
    if isinstance(value, bytes):
        return _with_length(b"b", len(value)) + value
    raise TypeError(
        f"extra_keys has the value {value!r}, expected None, a bool, int, str, bytes, or a tuple "
        f"of these"
    )


def _with_length(tag: bytes, length: int) -> bytes:
    return tag + struct.pack("<Q", length)
