"""Swapping out and in: what is held while copies are under way, and that nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paged_ops.batch.batch import build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.blocks.errors import InFlight, OutOfBlocks, UnknownRequest
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.swap import SwapSpace
from paged_ops.pool.kv_cache import PagedKVCache

A = list(range(100, 120))


def swapped_out(*requests: tuple[str, int]) -> tuple[BlockManager, SwapSpace]:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    for request, length in requests:
        manager.allocate(request, length)
    space.swap_out([request for request, _ in requests]).finish()
    return manager, space


def checked(manager: BlockManager, space: SwapSpace) -> tuple[int, int]:
    manager.check()
    space.check()
    return manager.num_free, space.num_free


# ------------------------------------------------------------------ blocks in flight


def test_a_request_goes_out_and_comes_back_as_it_was() -> None:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    manager.allocate("a", A[:10])
    manager.commit("a", 4)
    transfer = space.swap_out(["a"])
    assert "a" in space
    assert checked(manager, space) == (5, 5)  # both sides hold the blocks
    transfer.finish()
    assert checked(manager, space) == (8, 5)
    back = space.swap_in(["a"])
    assert "a" not in space
    back.finish()
    assert checked(manager, space) == (5, 8)
    manager.append("a", A[10:13])
    manager.commit("a")
    assert manager.lookup(A) == 12
    assert manager.stats().preemptions == 1


def test_blocks_being_copied_out_are_handed_to_nobody_though_their_request_ends() -> None:
    manager = BlockManager(4, 4)
    space = SwapSpace(manager, 4)
    manager.allocate("a", 16)
    transfer = space.swap_out(["a"])
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", 1)
    space.free("a")
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", 1)
    assert checked(manager, space) == (0, 0)
    transfer.finish()
    assert checked(manager, space) == (4, 4)


def test_blocks_being_copied_in_come_back_once_when_the_copy_ends_though_it_was_aborted() -> None:
    manager, space = swapped_out(("a", 10))
    transfer = space.swap_in(["a"])
    manager.free("a")
    assert checked(manager, space) == (5, 5)
    with pytest.raises(UnknownRequest):
        manager.free("a")
    manager.allocate("a", 4)  # the name is free again, and stays the new request's
    transfer.finish()
    assert checked(manager, space) == (7, 8)
    assert manager.num_tokens("a") == 4


def test_a_transfer_is_finished_once() -> None:
    manager, space = swapped_out(("a", 10))
    transfer = space.swap_in(["a"])
    transfer.finish()
    with pytest.raises(ValueError, match="finished already"):
        transfer.finish()
    assert checked(manager, space) == (5, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.append("a", 1),
        lambda m: m.commit("a"),
        lambda m: m.fork("a", "b"),
        lambda m: m.truncate("a", 0),
        lambda m: m.block_table("a"),
        lambda m: m.num_tokens("a"),
        lambda m: build_batch(m, ["a"]),
        lambda m: DecodeBatches(m).build(["a"]),
        lambda m: SwapSpace(m, 4).swap_out(["a"]),
    ],
)
def test_a_request_on_its_way_in_can_only_be_freed(call: Any) -> None:
    manager, space = swapped_out(("a", 10))
    space.swap_in(["a"])
    before = manager.stats()
    with pytest.raises(InFlight, match="request 'a' is being copied"):
        call(manager)
    assert manager.stats() == before
    with pytest.raises(ValueError, match="request is 'a', which exists already"):
        manager.allocate("a", 1)


# ------------------------------------------------------------------ sharing


def test_requests_that_move_together_share_their_blocks_in_both_pools() -> None:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    manager.allocate("a", 10)
    manager.fork("a", "b")
    manager.append("b", 3)
    transfer = space.swap_out(["a", "b"])
    assert len(transfer.copies) == len({source for source, _ in transfer.copies}) == 5
    transfer.finish()
    assert checked(manager, space) == (8, 3)
    assert space.num_blocks_needed(["a", "b"]) == 5
    space.swap_in(["b", "a"]).finish()
    assert checked(manager, space) == (3, 8)
    assert manager.block_table("a")[:2] == manager.block_table("b")[:2]


def test_a_shared_block_stays_with_the_request_that_is_not_moved() -> None:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    manager.allocate("a", 10)
    manager.fork("a", "b")
    table = manager.block_table("b")
    transfer = space.swap_out(["a"])
    ((source, _),) = manager.append("b", 1)  # the copy still reads the shared block
    assert source == table[-1]
    transfer.finish()
    assert manager.block_table("b")[:2] == table[:2]
    assert checked(manager, space) == (5, 5)


def test_blocks_that_are_still_cached_are_shared_and_not_copied() -> None:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    manager.allocate("a", A[:10])
    manager.commit("a")
    table = manager.block_table("a")
    space.swap_out(["a"]).finish()
    transfer = space.swap_in(["a"])
    assert len(transfer.copies) == 1
    transfer.finish()
    assert manager.block_table("a")[:2] == table[:2]
    assert checked(manager, space) == (5, 8)


def test_what_was_swapped_out_before_a_flush_is_never_published() -> None:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    manager.allocate("a", A[:10])
    manager.commit("a")
    space.swap_out(["a"]).finish()
    manager.flush()
    manager.allocate("b", A[:9])
    manager.commit("b")
    transfer = space.swap_in(["a"])
    assert len(transfer.copies) == 3  # nothing of the new weights' blocks is taken for its own
    transfer.finish()
    manager.free("b")
    manager.flush()
    manager.commit("a")
    assert manager.lookup(A) == 0


# ------------------------------------------------------------------ refusals change nothing


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, s: s.swap_out(["big"]), OutOfBlocks, "3 blocks asked for, 1 free"),
        (lambda m, s: s.swap_in(["out"]), OutOfBlocks, "2 blocks asked for, 1 free"),
        (lambda m, s: s.swap_out(["x"]), UnknownRequest, "'x'"),
        (lambda m, s: s.swap_out(["out"]), UnknownRequest, "'out'"),
        (lambda m, s: s.swap_in(["big"]), UnknownRequest, "'big'"),
        (lambda m, s: s.free("big"), UnknownRequest, "'big'"),
        (lambda m, s: s.swap_out(["big", "big"]), ValueError, "expected each request once"),
        (lambda m, s: s.swap_in(["out", "out"]), ValueError, "expected each request once"),
    ],
)
def test_a_refused_move_changes_nothing(call: Any, error: type[Exception], message: str) -> None:
    manager = BlockManager(4, 4)
    space = SwapSpace(manager, 3)
    manager.allocate("out", 8)
    space.swap_out(["out"]).finish()
    manager.allocate("big", 12)
    before = manager.stats(), space.stats(), manager.block_table("big")
    with pytest.raises(error, match=message):
        call(manager, space)
    assert (manager.stats(), space.stats(), manager.block_table("big")) == before
    checked(manager, space)


def test_a_request_on_its_way_out_cannot_be_brought_back_yet() -> None:
    manager = BlockManager(8, 4)
    space = SwapSpace(manager, 8)
    manager.allocate("a", 8)
    transfer = space.swap_out(["a"])
    with pytest.raises(InFlight):
        space.swap_in(["a"])
    transfer.finish()
    space.swap_in(["a"]).finish()


def test_threads_that_swap_and_allocate_leave_the_books_in_order() -> None:
    manager = BlockManager(16, 4)
    space = SwapSpace(manager, 16)
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(500):
                manager.allocate(name, 9)
                space.swap_out([name]).finish()
                space.swap_in([name]).finish()
                manager.free(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert checked(manager, space) == (16, 16)


# ------------------------------------------------------------------ the bytes


def caches(*num_blocks: int, **options: Any) -> list[PagedKVCache]:
    return [PagedKVCache(2, blocks, 4, 2, 8, **options) for blocks in num_blocks]


def fill(cache: PagedKVCache) -> None:
    for layer in range(cache.num_layers):
        cache.kv_blocks(layer).normal_()


def contents(cache: PagedKVCache, table: Sequence[int]) -> list[torch.Tensor]:
    return [cache.kv_blocks(layer)[list(table)].clone() for layer in range(cache.num_layers)]


def test_the_copy_holds_a_requests_bytes_though_its_blocks_are_wanted_meanwhile() -> None:
    device, host = caches(4, 4)
    manager = BlockManager(4, 4)
    space = SwapSpace(manager, 4)
    manager.allocate("a", 10)
    fill(device)
    before = contents(device, manager.block_table("a"))
    may_copy = threading.Event()
    with ThreadPoolExecutor(1) as worker:
        transfer = space.swap_out(["a"])
        copied = worker.submit(
            lambda: may_copy.wait() and device.send_blocks(host, transfer.copies)
        )
        manager.allocate("b", 4)
        for block in manager.block_table("b"):
            for layer in range(2):
                device.kv_blocks(layer)[block] = float("nan")
        may_copy.set()
        copied.result()
    transfer.finish()
    manager.free("b")
    manager.allocate("c", 4)  # so that a comes back to other blocks
    back = space.swap_in(["a"])
    host.send_blocks(device, back.copies)
    back.finish()
    after = contents(device, manager.block_table("a"))
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("options", [{}, {"layout": "NHD"}, {"dtype": torch.bfloat16}])
def test_sent_blocks_are_equal_and_the_others_are_untouched(options: dict[str, Any]) -> None:
    source, destination = caches(5, 3, **options)
    fill(source)
    source.send_blocks(destination, [(4, 0), (1, 2)])
    for layer in range(2):
        assert torch.equal(destination.kv_blocks(layer)[[0, 2]], source.kv_blocks(layer)[[4, 1]])
        assert not destination.kv_blocks(layer)[1].any()
    source.send_blocks(destination, [])


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(5, 0)], "the source 5, expected 0 to 4"),
        ([(-1, 0)], "the source -1, expected 0 to 4"),
        ([(0, 3)], "the destination 3, expected 0 to 2"),
        ([(0, 1), (2, 1)], "a destination twice"),
    ],
)
def test_blocks_that_do_not_exist_are_not_sent(copies: Any, message: str) -> None:
    source, destination = caches(5, 3)
    fill(source)
    with pytest.raises(ValueError, match=message):
        source.send_blocks(destination, copies)
    assert not destination.kv_blocks(0).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 1}, "destination has num_kv_heads 1, expected 2"),
        ({"layout": "NHD"}, "destination has layout NHD, expected HND"),
        ({"dtype": torch.float16}, "destination has dtype torch.float16"),
    ],
)
def test_blocks_are_not_sent_to_a_pool_of_another_kind(options: Any, message: str) -> None:
    sizes = {"num_layers": 2, "num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match=message):
        PagedKVCache(**sizes).send_blocks(PagedKVCache(**sizes | options), [(0, 0)])
