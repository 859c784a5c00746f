"""Snapshots: what is restored goes on bit for bit, and nothing else is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_ops
from paged_ops.batch.batch import build_batch
from paged_ops.blocks.digest import chain_digests
from paged_ops.blocks.errors import InFlight, OutOfBlocks, UnknownRequest
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.swap import SwapSpace
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.snapshot import restore_snapshot, save_snapshot
from paged_ops.pool.snapshot_files import sealed
from tests.support.broken_off import Scene, prove

pytest.importorskip("safetensors", reason="snapshots need the safetensors package")

A = list(range(100, 130))
B = list(range(200, 230))


LACKING = {
    "name": "a",
    "table": [],
    "num_tokens": 5,
    "tokens": [],
    "keys": [],
    "num_released": 0,
}


class Pool:
    """Books and a pool of two layers; the keys and values of a token follow from its id."""

    def __init__(self, num_blocks: int = 16, **options: Any) -> None:
        layout = options.pop("layout", "HND")
        self.window = options.get("sliding_window")
        self.manager = BlockManager(num_blocks, 4, **options)
        self.cache = PagedKVCache(2, num_blocks, 4, 2, 8, layout=layout)

    def feed(self, request: Any, tokens: list[int]) -> torch.Tensor:
        """Append tokens, write their keys and values, and attend in the last layer."""
        try:
            self.cache.copy_blocks(self.manager.append(request, tokens))
            new = len(tokens)
        except UnknownRequest:
            new = len(tokens) - self.manager.allocate(request, tokens)
        batch = build_batch(self.manager, [request], [new])
        rows = torch.stack([self.row(token) for token in tokens[len(tokens) - new :]])
        for layer in range(2):
            paged_ops.write_kv(rows, rows + 1, *self.cache.layer(layer), batch.slot_mapping)
        query = rows.repeat(1, 2, 1)
        output = paged_ops.attention(
            query,
            *self.cache.layer(1),
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            sliding_window=self.window,
        )
        self.manager.commit(request)
        return output

    @staticmethod
    def row(token: int) -> torch.Tensor:
        return torch.randn(2, 8, generator=torch.Generator().manual_seed(token))


def busy_pool(**options: Any) -> Pool:
    """Return a pool with two requests that share a prefix, and a third one's cached blocks."""
    pool = Pool(**options)
    pool.feed("gone", B[:9])
    pool.manager.free("gone")
    pool.feed("a", A[:10])
    pool.manager.fork("a", 7)
    pool.feed(7, B[:3])
    return pool


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"prefix_caching": False}])
def test_restored_requests_continue_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], layout: str
) -> None:
    pool = busy_pool(**options)
    save_snapshot(tmp_path, pool.manager, pool.cache)
    other = Pool(num_blocks=20, layout=layout, **options)
    other.feed("here already", A[20:25])
    assert restore_snapshot(tmp_path, other.manager, other.cache) == ["a", 7]
    other.manager.check()
    for request in ("a", 7):
        for tokens in ([1], [2, 3, 4, 5], [6]):
            assert torch.equal(pool.feed(request, tokens), other.feed(request, tokens))
    other.manager.check()


def test_shared_blocks_are_written_once_and_shared_again(tmp_path: Path) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    other = Pool()
    restore_snapshot(tmp_path, other.manager, other.cache)
    assert other.manager.num_used == pool.manager.num_used
    ours, theirs = (other.manager.block_table(request) for request in ("a", 7))
    assert ours[:2] == theirs[:2]
    assert ours[2] != theirs[2]


def test_what_could_be_found_is_found_and_is_evicted_in_the_same_order(tmp_path: Path) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    other = Pool()
    restore_snapshot(tmp_path, other.manager, other.cache)
    for tokens in (A[:9], B[:9], A[:10] + B[:3]):
        assert other.manager.lookup(tokens) == pool.manager.lookup(tokens) > 0
    other.manager.allocate("all but one", (other.manager.num_free - 1) * 4)
    assert other.manager.lookup(B[:9]) == 4  # the end of the chain went first
    other.manager.check()


def test_of_chosen_requests_only_their_own_blocks_are_written(tmp_path: Path) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache, ["a"])
    other = Pool()
    assert restore_snapshot(tmp_path, other.manager, other.cache) == ["a"]
    assert other.manager.num_used == 3
    assert other.manager.lookup(A[:9]) == 8
    assert other.manager.lookup(B[:9]) == 0


def test_cached_blocks_come_along_as_far_as_there_is_room(tmp_path: Path) -> None:
    pool = Pool()
    pool.feed("a", A[:17])
    pool.manager.free("a")
    save_snapshot(tmp_path, pool.manager, pool.cache)
    other = Pool(num_blocks=3)
    restore_snapshot(tmp_path, other.manager, other.cache)
    assert other.manager.lookup(A[:17]) == 12
    assert (other.manager.num_cached, other.manager.num_free) == (3, 3)
    other.manager.check()


def test_what_a_flush_has_outlawed_stays_unpublished(tmp_path: Path) -> None:
    pool = busy_pool()
    pool.manager.flush()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    other = Pool()
    restore_snapshot(tmp_path, other.manager, other.cache)
    other.feed("a", [1, 2, 3, 4])
    assert other.manager.lookup(A[:9]) == 0


def state_of(pool: Pool) -> Any:
    pool.manager.check()
    return pool.manager.stats(), [pool.cache.kv_blocks(layer).clone() for layer in range(2)]


def assert_unchanged(pool: Pool, before: Any) -> None:
    stats, layers = state_of(pool)
    assert stats == before[0]
    assert all(torch.equal(x, y) for x, y in zip(layers, before[1], strict=True))


def change_books(folder: Path, **changes: Any) -> None:
    """Change what the books say, and let them vouch for it."""
    books = json.loads((folder / "books.json").read_text())
    del books["sha256"]
    (folder / "books.json").write_text(sealed(books | changes))


def test_a_snapshot_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    small = Pool(num_blocks=4)
    small.feed("x", A[:5])
    before = state_of(small)
    with pytest.raises(OutOfBlocks, match="5 blocks asked for, 2 free"):
        restore_snapshot(tmp_path, small.manager, small.cache)
    assert_unchanged(small, before)
    taken = Pool()
    taken.feed("a", A[:5])
    before = state_of(taken)
    with pytest.raises(ValueError, match="request is 'a', which exists"):
        restore_snapshot(tmp_path, taken.manager, taken.cache)
    assert_unchanged(taken, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "snapshot has format 'x', expected 'paged-ops snapshot v3'"),
        ({"block_size": 8}, "snapshot has block_size 8, expected 4"),
        ({"dtype": "torch.int8"}, "snapshot has dtype 'torch.int8'"),
        ({"sliding_window": 3}, "snapshot has sliding_window 3, expected None"),
        ({"published": [["00" * 32, 0]]}, "snapshot is damaged: row 0 is not what 'a' has there"),
        ({"published": [["00" * 32, 99]]}, "snapshot is damaged: it names row 99"),
        ({"requests": [LACKING]}, "snapshot is damaged: request 'a' has 0 blocks, but its 5 tok"),
    ],
)
def test_a_snapshot_of_another_kind_or_a_damaged_one_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    change_books(tmp_path, **changes)
    other = Pool()
    before = state_of(other)
    with pytest.raises(ValueError, match=message):
        restore_snapshot(tmp_path, other.manager, other.cache)
    assert_unchanged(other, before)


def test_a_snapshot_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    (tmp_path / "books.json").unlink()
    with pytest.raises(FileNotFoundError):
        restore_snapshot(tmp_path, pool.manager, pool.cache)


def test_requests_that_are_unknown_or_cannot_be_named_are_refused(tmp_path: Path) -> None:
    pool = busy_pool()
    with pytest.raises(UnknownRequest):
        save_snapshot(tmp_path, pool.manager, pool.cache, ["x"])
    pool.manager.allocate(("a", 1), 1)
    with pytest.raises(TypeError, match=r"request \('a', 1\) is no str or int"):
        save_snapshot(tmp_path, pool.manager, pool.cache)
    with pytest.raises(ValueError, match="manager has num_blocks 3, expected 16"):
        save_snapshot(tmp_path, BlockManager(3, 4), pool.cache)


def test_nothing_is_written_while_copies_are_in_flight(tmp_path: Path) -> None:
    pool = busy_pool()
    space = SwapSpace(pool.manager, 8)
    space.swap_out(["a"]).finish()
    transfer = space.swap_in(["a"])
    with pytest.raises(ValueError, match="copies are in flight"):
        save_snapshot(tmp_path, pool.manager, pool.cache)
    with pytest.raises(InFlight):
        save_snapshot(tmp_path, pool.manager, pool.cache, ["a"])
    save_snapshot(tmp_path, pool.manager, pool.cache, [7])
    transfer.finish()


# A file whose ``with`` is broken off just before its end is closed when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_restore_may_be_broken_off_anywhere(tmp_path: Path) -> None:
    pool = busy_pool()
    save_snapshot(tmp_path, pool.manager, pool.cache)
    tokens = {
        digest: prompt[4 * block : 4 * block + 4]
        for prompt in (A, B, A[:10] + B)
        for block, digest in enumerate(chain_digests(prompt, 4))
    }

    def setting() -> Scene:
        other = Pool(num_blocks=9)
        other.feed("here already", B[10:15])
        other.feed("gone", B[20:29])
        other.manager.free("gone")
        return Scene(
            lambda: restore_snapshot(tmp_path, other.manager, other.cache),
            other.manager,
            look=lambda: no_other_keys_are_found(other),
        )

    def no_other_keys_are_found(other: Pool) -> None:
        for event in other.manager.ledger.stock.prefix.stored():
            if event.digest in tokens:
                rows = torch.stack([Pool.row(token) for token in tokens[event.digest]])
                assert torch.equal(other.cache.kv_blocks(1)[event.block, 0], rows)

    prove(setting)
