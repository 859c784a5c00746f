"""The names of blocks: the documented bytes, the same in every process, and no two alike."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_ops.blocks.digest import ROOT, ExtraKey, chain_digests, token_array
from paged_ops.blocks.manager import BlockManager


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_the_digest_is_sha256_of_the_documented_bytes() -> None:
    root = sha(b"paged-ops block v1")
    assert root == ROOT
    first = sha(root, struct.pack("<Qqq", 2, 5, -1), struct.pack("<Q", 0))
    second = sha(first, struct.pack("<Qqq", 2, 2**40, 0), struct.pack("<Q", 0))
    assert chain_digests([5, -1, 2**40, 0, 9], 2) == [first, second]


def test_extra_keys_enter_the_digest_as_documented() -> None:
    def sized(tag: bytes, content: bytes) -> bytes:
        return tag + struct.pack("<Q", len(content)) + content

    def key(kind: bytes, value: bytes) -> bytes:
        items = sized(b"s", kind), value, sized(b"i", b"0"), b"N"
        return b"t" + struct.pack("<Q", 4) + b"".join(items)

    value = b"t" + struct.pack("<Q", 3) + sized(b"b", b"\0") + sized(b"i", b"-7") + b"T"
    keys = sorted([key(b"adapter", value), key(b"salt", sized(b"s", "ä".encode()))])
    want = sha(ROOT, struct.pack("<Qq", 1, 3), struct.pack("<Q", 2), *keys)
    given_keys = [("salt", "ä"), ("adapter", (b"\0", -7, True))]
    assert chain_digests([3], 1, given_keys) == [want]
    assert chain_digests([3], 1, given_keys[::-1]) == [want]  # in any order


def test_another_process_gives_the_same_digest_whatever_its_hash_seed() -> None:
    call = "chain_digests([1, 2, 3, 4], 2, [('salt', 'x'), ('image', b'y', 1, 3)])"
    program = f"from paged_ops.blocks.digest import *; print([d.hex() for d in {call}])"
    here = [d.hex() for d in chain_digests([1, 2, 3, 4], 2, [("salt", "x"), ("image", b"y", 1, 3)])]
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == str(here)


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), range(1, 4), array("i", [1, 2, 3]), torch.arange(1, 4)]
)
def test_the_same_ids_in_any_container_have_the_same_digests(tokens: Any) -> None:
    assert chain_digests(tokens, 1) == chain_digests([1, 2, 3], 1)


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
KEYS = st.lists(st.tuples(st.text(max_size=3), VALUES), max_size=2)


def typed(value: object) -> object:
    """Return a value that equals another one only if the types do too: True is not 1 here."""
    if isinstance(value, (tuple, list)):
        return tuple(typed(item) for item in value)
    return type(value).__name__, value


@given(KEYS, KEYS)
def test_different_extra_keys_give_different_digests(a: Any, b: Any) -> None:
    same = sorted(map(repr, map(typed, a))) == sorted(map(repr, map(typed, b)))
    assert (chain_digests([1], 1, a) == chain_digests([1], 1, b)) == same


@given(
    st.lists(st.integers(0, 2), max_size=8),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 3),
)
def test_blocks_have_one_digest_exactly_if_all_tokens_up_to_their_end_are_equal(
    a: list[int], b: list[int], size: int
) -> None:
    digests = chain_digests(a, size), chain_digests(b, size)
    for i, x in enumerate(digests[0]):
        for j, y in enumerate(digests[1]):
            assert (x == y) == (a[: (i + 1) * size] == b[: (j + 1) * size])


def test_blocks_of_another_size_have_other_digests() -> None:
    assert not set(chain_digests([0] * 8, 2)) & set(chain_digests([0] * 8, 4))


def test_an_image_changes_the_blocks_from_the_one_it_begins_in() -> None:
    plain = chain_digests([7] * 8, 2)
    a = chain_digests([7] * 8, 2, [ExtraKey("image", "A", 3, 5)])
    b = chain_digests([7] * 8, 2, [ExtraKey("image", "B", 3, 5)])
    assert a[0] == b[0] == plain[0]
    assert all(len({x, y, z}) == 3 for x, y, z in zip(a[1:], b[1:], plain[1:], strict=True))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (["x"], TypeError, r"'x', expected \(kind, value\)"),
        ([("x",)], TypeError, r"\('x',\), expected"),
        ([b"ab"], TypeError, "the kind 97"),
        ([(1, "x")], TypeError, "the kind 1"),
        ([("adapter", 1.5)], TypeError, "the value 1.5"),
        ([("adapter", {"a": 1})], TypeError, "the value {'a': 1}"),
        ([("image", "x", 3, 3)], ValueError, "image on tokens 3 to 3"),
        ([("image", "x", -1)], ValueError, "image on tokens -1 to None"),
    ],
)
def test_extra_keys_without_a_format_are_refused(
    keys: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chain_digests([1], 1, keys)


WORDS = b"a prompt"
IDS = list(WORDS)


@pytest.mark.parametrize(
    "tokens",
    [
        WORDS,
        bytearray(WORDS),
        memoryview(WORDS),
        memoryview(np.array(IDS, dtype=np.int16)),
        array("B", IDS),
        array("i", IDS),
        tuple(IDS),
        deque(IDS),
        range(97, 105),
        np.array(IDS, dtype=np.uint8),
        np.array(IDS * 2, dtype=np.int32)[::2],
        np.array(IDS, dtype=object),
        torch.tensor(IDS, dtype=torch.int16),
        [*map(np.int8, IDS)],
        [*map(torch.tensor, IDS)],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_a_sequence_of_integers_is_read_as_integers_whatever_its_type(tokens: Any) -> None:
    ids = [int(token) for token in tokens]
    assert chain_digests(tokens, 3) == chain_digests(ids, 3)
    manager = BlockManager(8, 3)
    manager.allocate("a", tokens)
    manager.append("a", tokens)
    manager.commit("a")
    manager.check()
    assert manager.num_tokens("a") == 16
    assert manager.lookup(tokens) == manager.lookup(ids) == 6
    assert manager.lookup(ids * 2 + [0]) == 15


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        ["a"],
        [b"a"],
        [None],
        [[1]],
        [2**63],
        [-(2**63) - 1],
        [3, True],
        [3, False],
        [np.bool_(True)],
        [torch.tensor(True)],
        [np.float32(1)],
        torch.tensor([1.5]),
        torch.tensor([True, False]),
        np.array([True]),
        np.array([1.0]),
        np.array(["a"]),
        np.array([2**63], dtype=np.uint64),
        memoryview(b"ab").cast("c"),
        array("d", [1.0]),
    ],
    ids=lambda tokens: repr(tokens).split(" at ")[0],
)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ids_that_are_no_64_bit_integers_are_refused(tokens: Any, prefix_caching: bool) -> None:
    with pytest.raises(TypeError, match="tokens holds something that is no 64-bit integer"):
        chain_digests(tokens, 1)
    manager = BlockManager(8, 4, prefix_caching=prefix_caching)
    manager.allocate("a", 3)
    for call in (
        manager.lookup,
        lambda t: manager.allocate("b", t),
        lambda t: manager.append("a", t),
    ):
        with pytest.raises(TypeError, match="tokens holds something that is no 64-bit integer"):
            call(tokens)
    assert manager.num_tokens("a") == 3
    assert manager.num_used == 1


@pytest.mark.parametrize("count", [31, 32, 1000])
def test_many_ids_are_read_as_few_are(count: int) -> None:
    ids = [-(2**63), 2**63 - 1, *range(-3, count - 5)]
    assert len(ids) == count
    assert token_array(ids) == array("q", ids)
    assert token_array([*map(np.int64, ids)]) == array("q", ids)
    for wrong in (1.0, "a", None, 2**63, -(2**63) - 1, True, False, np.bool_(True)):
        for place in (0, count // 2, count - 1):
            with pytest.raises(TypeError, match="tokens holds something that is no 64-bit integer"):
                token_array([*ids[:place], wrong, *ids[place + 1 :]])


@pytest.mark.parametrize("tokens", ["abc", "", {1, 2}, {1: 2}, iter([1]), None, 1.5])
def test_what_is_no_sequence_is_refused_by_name(tokens: Any) -> None:
    with pytest.raises(TypeError, match=r"tokens is .*, expected a "):
        chain_digests(tokens, 1)
    with pytest.raises(TypeError, match=r"tokens is .*, expected a "):
        BlockManager(8, 4).allocate("a", tokens)
