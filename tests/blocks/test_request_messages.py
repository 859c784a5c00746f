"""What another rank says of a request is checked whole before the first block is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paged_ops.blocks.manager import BlockManager
from paged_ops.distributed import TransferRefused, request_transfer
from paged_ops.pool.kv_cache import PagedKVCache
from tests.support.broken_off import state_of
from tests.support.line import Line, what_is_sent

TOKENS = list(range(100, 110))
VALUES: list[Any] = [None, True, -1, 0, 1, 2**31, 2**64, 1.0, "", "00", b"x", [], [0], {}, ()]


def pool(*requests: str) -> tuple[BlockManager, PagedKVCache]:
    manager, cache = BlockManager(8, 4), PagedKVCache(1, 8, 4, 1, 2)
    cache.kv_blocks(0).normal_()
    for request in requests:
        manager.allocate(request, TOKENS, [("salt", "x")])
        manager.commit(request)
    return manager, cache


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Any:
    return what_is_sent(*pool("a"), "a", monkeypatch)


class Receiver:
    """Receives what it is told, and knows what it was like before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.manager, self.cache = pool()
        self.manager.allocate("mine", 5)
        self.patch = patch
        self.before = self.state()

    def state(self) -> Any:
        self.manager.check()
        bits = self.cache.kv_blocks(0).contiguous().numpy().tobytes()
        return state_of(self.manager.ledger), self.manager.stats(), bits

    def receive(self, message: Any) -> Line:
        line = Line(message)
        self.patch.setattr(request_transfer, "dist", line)
        try:
            request_transfer.receive_request(self.manager, self.cache, 0)
        except (ValueError, TransferRefused):
            assert self.state() == self.before
            raise
        return line


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if not isinstance(value, (dict, list)):
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from fields(each, (*path, key))


def test_any_field_of_any_type_is_refused_or_makes_books_that_are_whole(
    books: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, receiver = set(), Receiver(monkeypatch)
    for *way, last in fields(books):
        for value in (*VALUES, "delete"):
            message = copy.deepcopy(books)
            inner: Any = message
            for key in way:
                inner = inner[key]
            if value == "delete":
                del inner[last]
            elif type(inner[last]) is type(value) and inner[last] == value:
                continue
            else:
                inner[last] = value
            try:
                receiver.receive(message)
            except ValueError:
                continue
            receiver.manager.check()
            accepted.add(next(key for key in (last, *way[::-1]) if isinstance(key, str)))
            for request in set(receiver.manager.ledger.requests) - {"mine"}:
                receiver.manager.append(request, [1, 2, 3])
                receiver.manager.commit(request)
                receiver.manager.check()
                receiver.manager.free(request)
            receiver = Receiver(monkeypatch)
    assert accepted <= {"name", "tokens", "keys", "published", "num_committed"}


def changed(**fields: Any) -> Callable[[Any], Any]:
    return lambda books: books | fields


MESSAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda books: None, "the message of rank 0 is damaged: it is None"),
    "a list": (lambda books: [books], "the message of rank 0 is damaged"),
    "nothing": (lambda books: {}, "the sender's description is damaged: pool is None"),
    "an older sender": (
        lambda books: books | {"pool": {k: v for k, v in books["pool"].items() if k != "layout"}},
        "the sender's pool has layout 'nothing', expected 'HND'",
    ),
    "no request": (changed(requests=[]), "it has 0 requests, expected one"),
    "two requests": (
        lambda books: (
            books | {"requests": [books["requests"][0], books["requests"][0] | {"name": "b"}]}
        ),
        "it has 2 requests, expected one",
    ),
    "other tokens": (
        lambda books: books | {"requests": [books["requests"][0] | {"tokens": TOKENS[::-1]}]},
        "row 0 is not what 'a' has there",
    ),
    "more is committed": (changed(num_committed=3), "num_committed is 3, expected 0 to 2"),
    "unhashable": (
        lambda books: books | {"requests": [books["requests"][0] | {"name": []}]},
        "unhashable",
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_description_that_is_none_is_refused_and_the_sender_told(
    books: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = MESSAGES[kind]
    receiver = Receiver(monkeypatch)
    with pytest.raises(ValueError, match=message):
        receiver.receive(change(books))
    line = request_transfer.dist
    assert kind in ("none", "a list") or "ValueError" in line.sent[0]["refusal"]


def test_a_description_that_is_whole_is_received(
    books: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(monkeypatch)
    assert receiver.receive(books).sent == [{"rows": [0, 1, 2]}]
    assert receiver.manager.num_tokens("a") == 10


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        *({"rows": rows} for rows in (None, [3], [-1], [0, 0], [[0]], [0.0], [True])),
        {"rows": torch.tensor([0])},
    ],
    ids=str,
)
def test_an_answer_that_asks_for_what_is_not_there_is_refused(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, cache = pool("a")
    before = state_of(manager.ledger)
    monkeypatch.setattr(request_transfer, "dist", Line(answer))
    with pytest.raises(ValueError, match="is damaged"):
        request_transfer.send_request(manager, cache, "a", 1)
    assert state_of(manager.ledger) == before
    manager.check()
