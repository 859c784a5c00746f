"""Blocks that have left the window of every later query: released, never read, found when whole."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

import paged_ops
from paged_ops.attention import PagedAttention
from paged_ops.batch.batch import build_batch
from paged_ops.blocks.errors import OutOfBlocks, UnknownRequest
from paged_ops.blocks.holding import NO_BLOCK
from paged_ops.blocks.layer_groups import LayerGroup, LayerGroups
from paged_ops.blocks.manager import BlockManager

A = list(range(100, 140))
B = list(range(200, 240))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 100])
def test_a_block_goes_back_exactly_when_no_later_query_sees_a_key_in_it(window: int) -> None:
    manager = BlockManager(32, 4, sliding_window=window)
    manager.allocate("a", 1)
    for length in range(1, 60):
        manager.commit("a")
        seen = range(max(0, length + 1 - window), length)  # of the cached keys, by the next query
        table = manager.block_table("a")
        for block, held in enumerate(table):
            keys = range(block * 4, block * 4 + 4)
            has_room = keys.stop > length
            assert (held != NO_BLOCK) == (has_room or any(key in seen for key in keys))
        manager.check()
        manager.append("a", 1)
    assert manager.num_used <= -(-window // 4) + 1


def test_blocks_stay_until_the_commit_of_the_tokens_that_see_them() -> None:
    manager = BlockManager(8, 4, sliding_window=4)
    manager.allocate("a", 16)  # a prompt, computed in chunks
    manager.commit("a", 7)
    assert manager.block_table("a").count(NO_BLOCK) == 1
    manager.commit("a", 5)
    assert manager.block_table("a").count(NO_BLOCK) == 1
    manager.commit("a", 16)
    assert manager.block_table("a").count(NO_BLOCK) == 3
    assert manager.num_free == 7


def test_a_fork_keeps_what_its_parent_gives_back() -> None:
    manager = BlockManager(8, 4, sliding_window=4)
    manager.allocate("a", 8)
    manager.fork("a", "b")
    manager.commit("a")
    assert manager.block_table("a")[0] == NO_BLOCK
    assert manager.block_table("b")[0] == 0
    assert manager.num_used == 2
    manager.fork("a", "c")
    assert manager.block_table("c") == manager.block_table("a")
    for request in "abc":
        manager.append(request, 1)
        manager.check()
        manager.free(request)
    assert manager.num_free == 8


def test_truncating_to_where_a_released_block_would_be_seen_is_refused() -> None:
    manager = BlockManager(8, 4, sliding_window=4)
    manager.allocate("a", 12)
    manager.commit("a", 9)  # the next query sees keys 6 to 9: block 0 is gone
    with pytest.raises(ValueError, match="num_tokens is 6, expected 7 to 12"):
        manager.truncate("a", 6)
    manager.truncate("a", 7)  # the next query sees keys 4 to 7
    assert manager.num_used == 1
    manager.check()


def test_a_prompt_is_found_if_the_blocks_in_the_window_are() -> None:
    manager = BlockManager(6, 4, sliding_window=5)
    manager.allocate("a", A[:17])
    manager.commit("a")
    manager.free("a")
    manager.allocate("b", 16)  # the 2 plain free blocks, and those of tokens 4 to 11
    assert manager.lookup(A[:17]) == 16  # the next query sees tokens 12 to 16
    assert manager.lookup(A[:13]) == 4
    assert manager.lookup(A[:4]) == 0
    manager.free("b")
    assert manager.allocate("c", A[:17]) == 16
    assert manager.block_table("c")[:3] == [NO_BLOCK] * 3
    manager.check()


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"sliding_window is {window}, expected 1 or more"):
        BlockManager(8, 4, sliding_window=window)


# ------------------------------------------------------------------ tensors and attention


def test_a_batch_has_no_block_where_one_was_released_and_slots_only_where_there_are_blocks() -> (
    None
):
    manager = BlockManager(8, 4, sliding_window=4)
    manager.allocate("a", 12)
    manager.commit("a", 8)
    batch = build_batch(manager, ["a"], [4])
    assert batch.block_tables.tolist() == [[NO_BLOCK, 1, 2]]
    assert batch.slot_mapping.tolist() == [8, 9, 10, 11]
    with pytest.raises(ValueError, match=r"query_lens\[0\] is 9, expected at most 8: the first 1"):
        build_batch(manager, ["a"], [9])


def test_attention_reads_nothing_of_released_blocks() -> None:
    torch.manual_seed(0)
    manager = BlockManager(6, 4, sliding_window=6)
    caches = torch.full((6, 2, 4, 2, 8), float("nan")).unbind(1)
    keys, values = torch.randn(60, 2, 8), torch.randn(60, 2, 8)
    manager.allocate("a", 0)
    for position in range(60):
        manager.append("a", 1)
        batch = build_batch(manager, ["a"])
        row = slice(position, position + 1)
        paged_ops.write_kv(keys[row], values[row], *caches, batch.slot_mapping)
        query = torch.randn(1, 4, 8)
        got = paged_ops.attention(
            query, *caches, batch.block_tables, batch.seq_lens, sliding_window=6
        )
        seen = slice(max(0, position - 5), position + 1)
        scores = torch.einsum("hd,khd->hk", query[0], keys[seen].repeat_interleave(2, 1)) * 8**-0.5
        want = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen].repeat_interleave(2, 1))
        torch.testing.assert_close(got[0], want, rtol=1e-5, atol=1e-5)
        manager.commit("a")
        used = {block for block in manager.block_table("a") if block != NO_BLOCK}
        for block in set(range(6)) - used:
            caches[0][block] = caches[1][block] = float("nan")


def test_a_paged_attention_with_a_window_holds_no_more_blocks_than_the_window_needs() -> None:
    layer = PagedAttention(2, 8, block_size=4, num_blocks=4, sliding_window=8)
    layer.allocate("a", 0)
    for _ in range(50):
        token = [torch.randn(1, 2, 8) for _ in range(3)]
        layer(*token, ["a"])
    assert layer.num_tokens("a") == 50
    assert layer.manager.num_used <= 3
    layer.fork("a", "b")
    layer(*[torch.randn(2, 2, 8) for _ in range(3)], ["a", "b"])
    layer.manager.check()


# ------------------------------------------------------------------ groups of layers


def two_groups(**options: Any) -> LayerGroups:
    groups = {"full": LayerGroup(16), "window": LayerGroup(6, 5)}
    return LayerGroups(groups, block_size=2, **options)


def test_a_hit_is_as_long_as_every_group_can_serve() -> None:
    groups = two_groups()
    groups.allocate("a", A[:9])
    groups.commit("a")
    groups.free("a")
    assert groups["full"].lookup(A) == groups["window"].lookup(A) == 8
    groups.allocate("b", B[:9])  # evicts from the window's pool, not from the other
    groups.commit("b")
    groups.free("b")
    assert groups["full"].lookup(A) == 8
    window_hit = groups["window"].lookup(A)
    assert window_hit < 8
    assert groups.allocate("c", A[:9]) == window_hit
    groups.check()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda g: g.allocate("c", 100), OutOfBlocks),
        (lambda g: g.allocate("c", 13), OutOfBlocks),  # only the window's pool is too small
        (lambda g: g.append("a", 13), OutOfBlocks),
        (lambda g: g.allocate("a", 1), ValueError),
        (lambda g: g.truncate("a", 2), ValueError),  # only the window has given up something
        (lambda g: g.commit("a", 10), ValueError),
        (lambda g: g.fork("a", "b"), ValueError),
        (lambda g: g.fork("x", "y"), UnknownRequest),
        (lambda g: g.free("x"), UnknownRequest),
        (lambda g: g.append("x", 1), UnknownRequest),
        (lambda g: g.commit("x"), UnknownRequest),
        (lambda g: g.truncate("x", 0), UnknownRequest),
        (lambda g: g.preempt("x"), UnknownRequest),
        (lambda g: g.append_all([("b", 1), ("a", 13)]), OutOfBlocks),
        (lambda g: g.append_all([("b", 1), ("x", 1)]), UnknownRequest),
        (lambda g: g.truncate_all([("b", 0), ("a", 2)]), ValueError),
    ],
)
def test_a_call_that_one_group_refuses_changes_none(call: Any, error: type[Exception]) -> None:
    groups = two_groups()
    groups.allocate("a", A[:9])
    groups.allocate("b", 1)
    groups.commit("a")
    before = (
        [groups[name].stats() for name in groups],
        [groups[name].block_table("a") for name in groups],
    )
    with pytest.raises(error):
        call(groups)
    groups.check()
    after = (
        [groups[name].stats() for name in groups],
        [groups[name].block_table("a") for name in groups],
    )
    assert after == before


def test_groups_stay_in_step_through_random_histories() -> None:
    choose = random.Random(0)
    for _ in range(20):
        groups = two_groups(watermark=choose.choice([0.0, 0.2]))
        for _ in range(150):
            request, other = choose.sample("abc", 2)
            tokens = [choose.randrange(2) for _ in range(choose.randrange(7))]
            call: tuple[Any, ...] = choose.choice(
                [
                    ("allocate", request, tokens),
                    ("append", request, tokens),
                    ("append_all", [(request, tokens), (other, 1)]),
                    ("commit", request),
                    ("fork", request, other),
                    ("truncate", request, choose.randrange(12)),
                    ("truncate_all", [(request, choose.randrange(9)), (other, 3)]),
                    ("preempt", request),
                    ("free", request),
                    ("flush",) if choose.random() < 0.1 else ("num_tokens", request),
                ]
            )
            with contextlib.suppress(OutOfBlocks, UnknownRequest, ValueError):
                getattr(groups, call[0])(*call[1:])
            groups.check()


def test_at_least_one_group_is_needed() -> None:
    with pytest.raises(ValueError, match="groups is empty"):
        LayerGroups({}, 4)
