"""Which requests from elsewhere leave the watermark's blocks, and which share what is cached here.

One that was swapped out, and one from another rank, are like new requests: they leave the blocks of
the watermark to those that run, and share what can be found. A snapshot is restored as it was:
it may fill the pool, and its requests get blocks of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paged_ops.blocks.arrival import arrive, settle
from paged_ops.blocks.errors import OutOfBlocks
from paged_ops.blocks.holding import Holding
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.swap import SwapSpace
from paged_ops.distributed import request_transfer
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.snapshot import restore_snapshot, save_snapshot
from tests.support.line import Line, what_is_sent

A = list(range(100, 130))
Arrive = Callable[[], object]  # request "a", of the tokens A[:10] in 3 blocks, arrives


def pool(num_blocks: int) -> PagedKVCache:
    return PagedKVCache(1, num_blocks, 4, 1, 1)


def by_swap(manager: BlockManager, folder: Path, patch: pytest.MonkeyPatch) -> Arrive:
    space = SwapSpace(manager, 3)
    manager.allocate("a", A[:10])
    space.swap_out(["a"]).finish()
    return lambda: space.swap_in(["a"]).finish()


def elsewhere() -> BlockManager:
    manager = BlockManager(3, 4)
    manager.allocate("a", A[:10])
    manager.commit("a")
    return manager


def from_another_rank(manager: BlockManager, folder: Path, patch: pytest.MonkeyPatch) -> Arrive:
    books = what_is_sent(elsewhere(), pool(3), "a", patch)
    patch.setattr(request_transfer, "dist", Line(books))
    return lambda: request_transfer.receive_request(manager, pool(8), 0)


def from_a_snapshot(manager: BlockManager, folder: Path, patch: pytest.MonkeyPatch) -> Arrive:
    pytest.importorskip("safetensors", reason="snapshots need the safetensors package")
    save_snapshot(folder, elsewhere(), pool(3))
    return lambda: restore_snapshot(folder, manager, pool(8))


WAYS = pytest.mark.parametrize(
    ("way", "like_a_new_one"),
    [(by_swap, True), (from_another_rank, True), (from_a_snapshot, False)],
)
Way = Callable[[BlockManager, Path, pytest.MonkeyPatch], Arrive]


@WAYS
def test_only_a_snapshot_may_take_the_blocks_of_the_watermark(
    way: Way, like_a_new_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = BlockManager(8, 4, watermark=0.25)
    arrives = way(manager, tmp_path, monkeypatch)
    manager.allocate("running", 16)  # of the 4 blocks that are left, 2 are the watermark's
    before = manager.stats()
    if like_a_new_one:
        with pytest.raises(OutOfBlocks, match=r"3 blocks asked for, 4 free, .* keeps 2"):
            arrives()
        assert manager.stats() == before
    else:
        arrives()
        assert manager.num_tokens("a") == 10
    manager.check()


@WAYS
def test_only_a_snapshot_shares_nothing_that_is_cached_already(
    way: Way, like_a_new_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = BlockManager(8, 4)
    arrives = way(manager, tmp_path, monkeypatch)
    manager.allocate("earlier", A[:9])
    manager.commit("earlier")
    arrives()
    common = set(manager.block_table("earlier")) & set(manager.block_table("a"))
    assert len(common) == (2 if like_a_new_one else 0)
    manager.check()


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("watermark", [False, True])
def test_an_arrival_shares_and_leaves_the_watermark_as_it_is_told(
    sharing: bool, watermark: bool
) -> None:
    manager = BlockManager(8, 4, watermark=0.25)
    manager.allocate("earlier", A[:9])
    manager.commit("earlier")
    manager.append("earlier", 8)  # 3 of 8 blocks are free, of which the watermark keeps 2
    newcomer = Holding([7, 5, 9], 10)
    newcomer.tokens.extend(A[:10])
    with manager.lock, manager.ledger as ledger:
        if watermark and not sharing:
            with pytest.raises(OutOfBlocks):
                arrive(ledger, "flight", {"a": newcomer}, sharing=sharing, watermark=watermark)
            return
        written = arrive(ledger, "flight", {"a": newcomer}, sharing=sharing, watermark=watermark)
        assert list(written) == ([9] if sharing else [7, 5, 9])
        settle(ledger, "flight")
    first = manager.block_table("earlier")[:2]
    assert (manager.block_table("a")[:2] == first) == sharing
    manager.check()
