"""Prefix caching: what is found, by whom, until when. One behaviour per test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from paged_ops.blocks.digest import ExtraKey, chain_digests
from paged_ops.blocks.errors import OutOfBlocks
from paged_ops.blocks.events import Cleared, Removed, Stored
from paged_ops.blocks.layer_groups import LayerGroup, LayerGroups
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.swap import SwapSpace

A = list(range(100, 120))  # two prompts that share nothing
B = list(range(200, 220))


def run(manager: BlockManager, request: str, tokens: Sequence[int], keys: Any = ()) -> int:
    """Let a request come, be computed, and go; return its hit tokens."""
    hit = manager.allocate(request, tokens, keys)
    manager.commit(request)
    manager.free(request)
    manager.check()
    return hit


# ------------------------------------------------------------------ finding


def test_a_prompt_finds_the_full_blocks_it_shares_with_an_earlier_one() -> None:
    manager = BlockManager(8, 4)
    assert run(manager, "a", A[:10]) == 0
    assert run(manager, "b", A[:10]) == 8
    assert run(manager, "c", A[:5] + B[:5]) == 4
    assert run(manager, "d", B[:10]) == 0


def test_a_hit_holds_the_very_blocks_of_the_earlier_request() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:10])
    manager.commit("a")
    manager.allocate("b", A[:10])
    a, b = manager.block_table("a"), manager.block_table("b")
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert manager.num_used == 4
    manager.free("a")
    assert manager.block_table("b") == b
    assert manager.num_used == 3


@pytest.mark.parametrize(("prompt", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_full_hit_leaves_at_least_one_token_to_compute(prompt: int, hit: int) -> None:
    manager = BlockManager(8, 4)
    run(manager, "a", A[:prompt])
    assert run(manager, "b", A[:prompt]) == hit


def test_nothing_is_found_before_it_is_committed() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:9])
    assert manager.lookup(A[:9]) == 0
    manager.commit("a", 7)
    assert manager.lookup(A[:9]) == 4
    manager.commit("a", 3)  # known already
    assert manager.lookup(A[:9]) == 4
    manager.commit("a", 8)
    assert manager.lookup(A[:9]) == 8


def test_generated_tokens_are_found_like_prompts() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:3])
    for token in A[3:9]:
        manager.append("a", [token])
    manager.commit("a")
    assert manager.lookup(A) == 8


def test_requests_that_count_their_tokens_take_no_part() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 12)
    manager.commit("a")
    manager.free("a")
    assert manager.num_cached == 0
    run(manager, "b", A[:9])
    assert manager.allocate("c", 9) == 0
    assert not set(manager.block_table("c")) & {0, 1}


def test_tokens_behind_counted_ones_are_not_published() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:4])
    manager.append("a", 4)
    manager.append("a", A[8:16])
    manager.commit("a")
    manager.free("a")
    assert manager.num_cached == 1
    manager.allocate("b", A[:4])
    manager.append("b", 4)
    manager.truncate("b", 4)  # back where all ids are known
    manager.append("b", A[4:8])
    manager.commit("b")
    assert manager.lookup(A[:9]) == 8


def test_a_manager_without_prefix_caching_finds_and_keeps_nothing() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    run(manager, "a", A[:9])
    assert manager.num_cached == 0
    assert manager.lookup(A[:9]) == 0
    assert manager.allocate("b", A[:9]) == 0
    assert manager.stats().prompt_tokens == 0


# ------------------------------------------------------------------ twins


def test_two_requests_that_compute_the_same_prompt_at_once_keep_their_own_blocks() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:9])
    manager.allocate("b", A[:9])
    with manager.lock, manager.ledger as ledger:
        before = [(h.table.copy(), h.version, h.rewrites) for h in ledger.requests.values()]
    manager.commit("a")
    manager.commit("b")
    with manager.lock, manager.ledger as ledger:  # so batches that were built stay right
        now = [(h.table, h.version, h.rewrites) for h in ledger.requests.values()]
    assert now == before
    assert not set(manager.block_table("a")) & set(manager.block_table("b"))
    manager.free("b")
    assert manager.num_cached == 0
    manager.free("a")
    assert manager.num_cached == 2
    manager.check()


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_two_requests_have_computed_is_found_as_long_as_one_of_them_lives(first: str) -> None:
    manager = BlockManager(6, 4)
    for request in ("a", "b"):
        manager.allocate(request, A[:8])
    for request in ("a", "b"):
        manager.commit(request)
    manager.free(first)
    assert manager.num_cached == 0  # what the other one holds is worth as much
    run(manager, "others", B[:16])
    manager.check()
    assert manager.lookup(A[:9]) == 8
    assert manager.allocate("c", A[:9]) == 8
    other = {"a": "b", "b": "a"}[first]
    assert manager.block_table("c")[:2] == manager.block_table(other)


def test_a_twin_takes_the_place_of_a_block_that_is_cut_or_written_anew() -> None:
    manager = BlockManager(8, 4)
    for request in ("a", "b", "c"):
        manager.allocate(request, A[:8])
    for request in ("a", "b", "c"):
        manager.commit(request)
    manager.check()
    manager.truncate("a", 3)
    manager.append("a", B[:5])
    manager.commit("a")
    assert manager.lookup(A[:9]) == 8
    manager.free("b")
    assert manager.lookup(A[:9]) == 8
    manager.truncate("c", 4)
    assert manager.lookup(A[:9]) == 4
    manager.check()


def test_a_cached_block_gives_way_to_one_that_is_held() -> None:
    manager = BlockManager(6, 4)
    manager.allocate("late", A[:8])
    run(manager, "early", A[:8])
    assert manager.num_cached == 2
    manager.commit("late")
    manager.check()
    assert (manager.num_cached, manager.num_free) == (0, 4)
    run(manager, "others", B[:16])
    assert manager.lookup(A[:9]) == 8


def test_followers_learn_where_a_twin_is_when_it_is_found() -> None:
    manager = BlockManager(8, 4)
    for request in ("a", "b"):
        manager.allocate(request, A[:4])
    stream = manager.subscribe()
    for request in ("a", "b"):
        manager.commit(request)
    (digest,) = chain_digests(A[:4], 4)
    assert stream.read() == [Cleared(), Stored(digest, 0)]
    manager.free("a")
    assert stream.read() == [Removed(digest, 0), Stored(digest, 1)]
    manager.free("b")
    assert stream.read() == []
    assert manager.lookup(A[:5]) == 4


def test_twins_in_every_group_of_layers_are_found_as_long_as_one_of_them_lives() -> None:
    groups = LayerGroups({"full": LayerGroup(10), "window": LayerGroup(10, 6)}, 4)
    for request in ("a", "b"):
        groups.allocate(request, A[:16])
    groups.commit("a")
    groups.commit("b")
    groups.free("a")
    groups.allocate("others", B[:20])
    groups.commit("others")
    groups.free("others")
    groups.check()
    assert groups.lookup(A[:17]) == 16
    assert groups.allocate("c", A[:17]) == 16
    for name in groups:
        shared = groups[name].block_table("b")[-1]
        assert groups[name].block_table("c")[3] == shared
    groups.check()


def test_a_copy_in_flight_keeps_what_it_reads_whoever_has_a_twin_of_it() -> None:
    manager = BlockManager(8, 4)
    for request in ("a", "b"):
        manager.allocate(request, A[:8])
    for request in ("a", "b"):
        manager.commit(request)
    space = SwapSpace(manager, 4)
    table = manager.block_table("a")
    transfer = space.swap_out(["a"])
    manager.allocate("others", B[:16])  # all that is free, and nothing of what is being read
    assert not set(manager.block_table("others")) & set(table)
    transfer.finish()
    assert manager.num_free == 2  # the twins of b's blocks are not worth keeping
    assert manager.lookup(A[:9]) == 8
    manager.check()


# ------------------------------------------------------------------ cached blocks are free


def test_cached_blocks_count_as_free_however_often_requests_come_and_go() -> None:
    manager = BlockManager(8, 4)
    for round_ in range(50):
        assert run(manager, f"r{round_}", A[:17]) == (16 if round_ else 0)
    assert (manager.num_used, manager.num_free, manager.num_cached) == (0, 8, 4)
    assert manager.can_allocate(32)
    manager.allocate("all", 32)
    assert (manager.num_free, manager.num_cached) == (0, 0)
    assert manager.stats().evictions == 4


def test_a_reused_block_is_no_longer_found_by_its_old_content() -> None:
    manager = BlockManager(2, 4)
    run(manager, "a", A[:5])
    run(manager, "b", B[:8])
    assert manager.lookup(A[:5]) == 0


def test_the_end_of_a_chain_is_evicted_first() -> None:
    for _ in range(100):
        manager = BlockManager(3, 4)
        run(manager, "a", A[:12])
        manager.allocate("b", 4)
        manager.free("b")
        assert manager.lookup([*A[:12], 0]) == 8


def test_the_prompt_that_was_used_longest_ago_is_evicted_first() -> None:
    manager = BlockManager(6, 4)
    run(manager, "a", A[:9])
    run(manager, "b", B[:9])
    run(manager, "a", A[:9])
    manager.allocate("c", 16)  # the 2 free blocks, then 2 of b
    assert manager.lookup(A[:9]) == 8
    assert manager.lookup(B[:9]) == 0


def test_a_lookup_holds_nothing_and_keeps_nothing_from_being_evicted() -> None:
    manager = BlockManager(4, 4)
    run(manager, "a", A[:8])
    run(manager, "b", B[:8])
    for _ in range(1000):
        assert manager.lookup(A[:9]) == 8
    assert manager.num_free == 4
    manager.allocate("c", 8)
    assert manager.lookup(A[:9]) == 0  # still the older of the two
    assert manager.lookup(B[:9]) == 8


def test_hits_are_held_before_anything_is_evicted() -> None:
    manager = BlockManager(4, 4)
    run(manager, "a", A[:12])  # blocks 0 to 2 are cached, and 2 is evicted first
    run(manager, "b", B[:4])  # takes block 3
    manager.allocate("c", A[:16])  # hits all of a; its new block is b's, the only idle one
    assert manager.stats().hit_tokens == 12
    assert manager.block_table("c") == [0, 1, 2, 3]
    assert manager.lookup(B[:5]) == 0
    manager.check()


def test_an_allocation_that_fails_leaves_its_hits_as_they_were() -> None:
    manager = BlockManager(5, 4)
    run(manager, "a", A[:8])
    manager.allocate("others", 8)
    before = manager.stats()
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 free"):
        manager.allocate("b", A[:16])
    assert manager.stats() == before
    assert manager.lookup(A[:16]) == 8
    manager.allocate("c", A[:12])
    assert manager.num_free == 0
    manager.check()


def test_out_of_blocks_says_how_many_of_the_free_ones_are_cached() -> None:
    manager = BlockManager(4, 4)
    run(manager, "a", A[:8])
    with pytest.raises(OutOfBlocks, match=r"5 blocks asked for, 4 free \(2 of them cached\)"):
        manager.allocate("b", 20)


def test_a_hit_needs_no_more_than_its_new_blocks_above_the_watermark() -> None:
    manager = BlockManager(8, 4, watermark=0.25)
    manager.allocate("a", A[:17])  # 5 blocks, 3 free, 2 of them kept
    manager.commit("a")
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", B[:8])
    assert manager.allocate("b", A[:17]) == 16


# ------------------------------------------------------------------ nothing stale is found


def test_truncated_tokens_are_not_found() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:12])
    manager.commit("a")
    manager.truncate("a", 6)
    assert manager.lookup(A) == 4
    manager.append("a", B[:6])
    manager.commit("a")
    assert manager.lookup(A) == 4
    assert manager.lookup(A[:6] + B) == 12
    manager.check()
    manager.free("a")
    assert (manager.num_cached, manager.num_used) == (3, 0)


def test_a_block_that_another_request_holds_is_found_though_one_truncates_it() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:8])
    manager.commit("a")
    manager.fork("a", "b")
    manager.truncate("b", 6)
    assert manager.lookup(A) == 8
    ((source, destination),) = manager.append("b", B[:2])  # a copy: the old content stays
    manager.commit("b")
    assert manager.lookup(A) == 8
    assert manager.lookup(A[:6] + B[:3]) == 8
    assert (manager.block_table("a")[1], manager.block_table("b")[1]) == (source, destination)
    manager.check()


def test_a_published_block_is_unpublished_when_its_last_owner_writes_into_it() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:8])
    manager.commit("a")
    manager.fork("a", "b")
    manager.truncate("b", 6)
    manager.free("a")  # b alone now holds the block, and has 2 of its 4 tokens
    assert manager.lookup(A) == 8
    assert manager.append("b", B[:1]) == []
    assert manager.lookup(A) == 4
    manager.check()


def test_a_child_publishes_what_it_appends_and_finds_what_it_shares() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:6])
    manager.fork("a", "b")
    manager.append("a", A[6:9])
    manager.append("b", B[:3])
    manager.commit("a")
    manager.commit("b")
    assert manager.lookup(A) == 8
    assert manager.lookup(A[:6] + B[:3]) == 8
    manager.check()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("adapter", "X")], [("salt", "X")]),
        ([("adapter", "X")], []),
        ([("adapter", "ab"), ("salt", "c")], [("adapter", "a"), ("salt", "bc")]),
        ([("adapter", ("name", 1))], [("adapter", ("name", 2))]),
        ([("adapter", "1")], [("adapter", 1)]),
        ([("salt", "x")], [("salt", b"x")]),
        ([("a", ("b", "c"))], [("a", "b"), ("c", None)]),
    ],
)
def test_prompts_with_other_extra_keys_share_nothing(one: Any, other: Any) -> None:
    manager = BlockManager(8, 4)
    run(manager, "a", A[:9], one)
    assert run(manager, "b", A[:9], other) == 0
    assert run(manager, "c", A[:9], one) == 8


def test_images_part_the_blocks_they_lie_on_and_leave_those_before_shared() -> None:
    manager = BlockManager(16, 2)
    tokens = [1, 2, 0, 0, 0, 0, 3, 4, 5]
    assert run(manager, "a", tokens, [ExtraKey("image", "A", 2, 6)]) == 0
    assert run(manager, "b", tokens, [ExtraKey("image", "B", 2, 6)]) == 2
    assert run(manager, "c", tokens, [ExtraKey("image", "A", 2, 6)]) == 8
    assert run(manager, "d", tokens) == 2


def test_extra_keys_hold_for_generated_tokens_too() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:2], [("salt", "x")])
    manager.append("a", A[2:8])
    manager.allocate("b", 0, [("salt", "y")])
    manager.append("b", A[:8])
    manager.commit("a")
    manager.commit("b")
    assert manager.lookup(A) == 0
    assert manager.lookup(A, [("salt", "x")]) == 8
    assert manager.lookup(A, [("salt", "y")]) == 8


# ------------------------------------------------------------------ flush


def test_after_a_flush_nothing_is_found_and_the_call_says_what_lives() -> None:
    manager = BlockManager(8, 4)
    run(manager, "a", A[:9])
    manager.allocate("b", B[:9])
    manager.commit("b")
    assert manager.flush() == 3
    assert manager.lookup(A) == manager.lookup(B) == 0
    assert (manager.num_cached, manager.num_free) == (0, 5)
    manager.check()
    manager.free("b")
    assert manager.flush() == 0
    assert (manager.num_cached, manager.num_free) == (0, 8)


def test_what_a_request_of_before_a_flush_computes_later_is_not_found() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:6])
    manager.flush()
    manager.append("a", A[6:12])
    manager.fork("a", "b")
    manager.commit("a")
    manager.commit("b")
    assert manager.lookup(A) == 0
    manager.free("a")
    manager.free("b")
    run(manager, "c", A[:9])
    assert manager.lookup(A) == 8


# ------------------------------------------------------------------ statistics and events


def test_stats_count_hits_and_evictions() -> None:
    manager = BlockManager(4, 4)
    run(manager, "a", A[:10])
    run(manager, "b", A[:10])
    run(manager, "c", B[:16])
    stats = manager.stats()
    assert (stats.prompt_tokens, stats.hit_tokens, stats.evictions) == (36, 8, 2)
    assert stats.hit_rate == 8 / 36
    assert BlockManager(4, 4).stats().hit_rate == 0.0


def test_a_stream_tells_what_is_stored_removed_and_cleared() -> None:
    manager = BlockManager(3, 4)
    stream = manager.subscribe()
    assert stream.read() == [Cleared()]
    run(manager, "a", A[:8])
    first, second = chain_digests(A[:8], 4)
    assert stream.read() == [Stored(first, 0), Stored(second, 1)]
    manager.allocate("b", 8)
    assert stream.read() == [Removed(second, 1)]
    manager.flush()
    assert stream.read() == [Cleared()]
    assert stream.read() == []


def test_a_stream_begins_with_what_is_findable_then() -> None:
    manager = BlockManager(3, 4)
    run(manager, "a", A[:4])
    stream = manager.subscribe()
    run(manager, "b", B[:4])
    found = [Stored(digest, block) for block, (digest,) in enumerate(map(digests_of, (A, B)))]
    assert stream.read() == [Cleared(), *found]


def digests_of(tokens: Sequence[int]) -> list[bytes]:
    return chain_digests(tokens[:4], 4)


def test_a_stream_that_falls_behind_starts_over() -> None:
    manager = BlockManager(8, 4)
    stream = manager.subscribe(max_events=2)
    stream.read()
    run(manager, "a", A[:12])
    run(manager, "b", B[:4])
    events = stream.read()
    assert events[0] == Cleared()
    assert [event.block for event in events[1:] if isinstance(event, Stored)] == [0, 1, 2, 3]
    assert stream.read() == []


def test_a_stream_that_nobody_holds_is_dropped() -> None:
    manager = BlockManager(8, 4)
    manager.subscribe()
    run(manager, "a", A[:4])
    assert len(manager.ledger.stock.prefix._streams) == 0


def test_threads_that_share_prefixes_leave_the_books_in_order() -> None:
    manager = BlockManager(12, 4)
    errors: list[BaseException] = []

    def work(name: str, tokens: Sequence[int]) -> None:
        try:
            for round_ in range(300):
                manager.allocate(name, tokens)
                manager.append(name, [round_])
                manager.commit(name)
                manager.lookup(A)
                if not round_ % 50:
                    manager.flush()
                manager.free(name)
        except BaseException as error:
            errors.append(error)

    prompts = {"a": A[:9], "b": A[:9], "c": A[:6] + B[:3]}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=each) for each in prompts.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert manager.num_used == 0
    manager.check()
