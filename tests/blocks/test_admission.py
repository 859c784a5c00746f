"""Victims and the way they step aside, up to a scheduler of a few lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import pytest

from paged_ops.blocks.admission import Preemption, cheaper_preemption, victims
from paged_ops.blocks.manager import BlockManager, OutOfBlocks, UnknownRequest


def three() -> BlockManager:
    manager = BlockManager(8, 4)
    for request in "abc":
        manager.allocate(request, 8)
    return manager


@pytest.mark.parametrize(
    ("num_blocks", "chosen"),
    [(0, ""), (2, ""), (3, "c"), (4, "c"), (5, "cb"), (8, "cba"), (100, "cba")],
)
def test_the_youngest_step_aside_and_no_more_than_needed(num_blocks: int, chosen: str) -> None:
    manager = three()
    assert victims(manager, "abc", num_blocks) == list(chosen)
    assert manager.num_free == 2
    for request in chosen:
        manager.preempt(request)
    assert manager.num_free >= min(num_blocks, 8)


def test_shared_blocks_count_with_their_last_owner_only() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 16)
    manager.allocate("b", 8)
    manager.fork("b", "c")
    assert victims(manager, "abc", 3) == ["c", "b"]
    assert victims(manager, "bac", 3) == ["c", "a"]


def test_only_requests_of_the_manager_can_be_chosen() -> None:
    with pytest.raises(UnknownRequest):
        victims(three(), "abx", 3)
    with pytest.raises(ValueError, match="num_blocks is -1"):
        victims(three(), "abc", -1)


@pytest.mark.parametrize(
    ("copy_speed", "cheaper"), [(1e9, Preemption.RECOMPUTE), (1e10, Preemption.SWAP)]
)
def test_the_faster_way_back_is_chosen(copy_speed: float, cheaper: Preemption) -> None:
    assert cheaper is cheaper_preemption(
        500,
        bytes_per_token=1e5,
        copy_bytes_per_second=copy_speed,
        compute_tokens_per_second=1e4,
    )


def test_a_scheduler_made_of_these_calls_finishes_every_request() -> None:
    manager = BlockManager(6, 4, watermark=0.2)
    waiting = deque((name, 3 + 2 * name, 20) for name in range(8))  # name, tokens, final length
    running: dict[Hashable, tuple[int, int, int]] = {}
    finished = []
    for _ in range(1000):
        for name in list(running):  # grow, the oldest first
            while name in running:
                try:
                    manager.append(name, 1)
                except OutOfBlocks:
                    for victim in victims(manager, list(running), 1):
                        _, _, final = running.pop(victim)
                        waiting.appendleft((victim, manager.num_tokens(victim), final))
                        manager.preempt(victim)
                else:
                    break
        while waiting:  # admit, first come, first served
            name, length, final = waiting[0]
            try:
                manager.allocate(name, length)
            except OutOfBlocks:
                break
            running[name] = waiting.popleft()
        for name, (_, _, final) in list(running.items()):
            if manager.num_tokens(name) >= final:
                manager.free(name)
                finished.append(name)
                del running[name]
        manager.check()
    assert sorted(finished) == list(range(8))
    assert manager.stats().preemptions > 0
    assert manager.num_used == 0
