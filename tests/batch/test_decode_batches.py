"""DecodeBatches against build_batch, step after step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.blocks.errors import OutOfBlocks, UnknownRequest
from paged_ops.blocks.manager import BlockManager
from tests.support.broken_off import break_off

FIELDS = tuple(Batch.__dataclass_fields__)


def assert_same(got: Batch, want: Batch) -> None:
    """Compare all tensors; the tables may have more columns, of -1."""
    width = want.block_tables.shape[1]
    assert torch.equal(got.block_tables[:, :width], want.block_tables)
    assert (got.block_tables[:, width:] == -1).all()
    for name in ("seq_lens", "query_start_loc", "slot_mapping"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in Batch.__dataclass_fields__:
        assert getattr(got, name).dtype == getattr(want, name).dtype


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_a_random_history_is_what_build_batch_gives(
    seed: int, window: int | None
) -> None:
    choose = random.Random(seed)
    manager = BlockManager(60, choose.randint(1, 4), sliding_window=window)
    batches = DecodeBatches(manager)
    running: list[int] = []
    for step in range(300):
        event = choose.random()
        if event < 0.1 and manager.can_allocate(9):
            manager.allocate(step, choose.randint(1, 9))
            running.insert(choose.randint(0, len(running)), step)
        elif event < 0.15 and running:
            manager.fork(choose.choice(running), step)
            running.append(step)
        elif event < 0.2 and running:
            manager.free(running.pop(choose.randrange(len(running))))
        elif event < 0.25 and running:
            request = choose.choice(running)
            length = manager.num_tokens(request)
            if window is None:
                manager.truncate(request, choose.randint(1, length))
        elif event < 0.3:
            choose.shuffle(running)
        for request in list(running):
            try:
                manager.append(request, choose.choice([0, 1, 1, 1, 1, 3]))
            except OutOfBlocks:
                manager.free(running.pop(0))
                break
        assert_same(batches.build(running), build_batch(manager, running))
        for request in running:
            manager.commit(request)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_hold_blocks_for_more_may_be_shorter(seed: int) -> None:
    choose = random.Random(seed)
    manager = BlockManager(80, choose.randint(1, 4))
    batches = DecodeBatches(manager)
    lengths = {request: choose.randint(1, 9) for request in range(6)}
    for request, length in lengths.items():
        manager.allocate(request, length + choose.randrange(6))
    for step in range(200):
        running = [request for request in lengths if choose.random() < 0.9]
        for request in running:
            most = manager.num_tokens(request)
            lengths[request] += choose.choice([0, 1, 1, 1, -(lengths[request] // 2)])
            if lengths[request] > most:
                manager.append(request, lengths[request] - most + choose.randrange(4))
            if choose.random() < 0.05 or lengths[request] > 40:
                manager.truncate(request, 1)
                lengths[request] = 1
        whole = not step % 7
        seq_lens = None if whole else [lengths[request] for request in running]
        got, want = batches.build(running, seq_lens), build_batch(manager, running, None)
        if seq_lens is not None:
            want = dataclasses.replace(
                build_batch(manager, running, None, seq_lens=seq_lens),
                block_tables=want.block_tables,  # those behind a sequence are there, too
            )
        assert_same(got, want)


def test_a_step_that_was_broken_off_leaves_nothing_wrong_for_the_next() -> None:
    point = 0
    while True:
        manager = BlockManager(16, 2)
        for request in "abc":
            manager.allocate(request, 3)
        batches = DecodeBatches(manager)
        batches.build("abc")
        manager.append_all([("a", 3), ("b", 1)])
        manager.fork("a", "d")
        manager.append("d", 1)
        if not break_off(partial(batches.build, "dbc"), point):
            break
        assert_same(batches.build("dbc"), build_batch(manager, "dbc"))
        manager.append("b", 1)
        assert_same(batches.build("dbc"), build_batch(manager, "dbc"))
        point += 1
    assert point > 20


def either(build: Callable[[], Batch]) -> tuple[Batch | None, str]:
    """Return what is built, or in which words it is refused."""
    try:
        return build(), ""
    except (ValueError, TypeError, UnknownRequest) as error:
        return None, f"{type(error).__name__}: {error}"


LENGTHS: list[Any] = [None, 0, -1, 1, 2, 3, 5, 8, 9, 2**31, 2**40, True, 2.0, "3", b"\3"]


@given(
    window=st.sampled_from([None, 1, 2, 3, 5, 9]),
    block_size=st.integers(1, 5),
    steps=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abcx"), max_size=3),
            st.lists(st.sampled_from(LENGTHS), max_size=3),
            st.lists(st.integers(0, 3), min_size=3, max_size=3),
            st.lists(st.sampled_from([None, 0.5, 1.0]), min_size=3, max_size=3),
            st.sampled_from([None, list, tuple, bytes, bytearray]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_both_ways_to_a_step_agree_and_refuse_in_the_same_words(
    window: int | None, block_size: int, steps: list[Any]
) -> None:
    """Nobody needs to have appended, and commits may have released any block."""
    manager = BlockManager(80, block_size, sliding_window=window)
    batches = DecodeBatches(manager)
    for request in "abc":
        manager.allocate(request, 6)
    for rows, lengths, growth, commits, kind in steps:
        for request, count, share in zip("abc", growth, commits, strict=True):
            manager.append(request, count)
            if share is not None:
                manager.commit(request, int(share * manager.num_tokens(request)))
        seq_lens: Any = None
        if kind is not None:
            seq_lens = [6 if length is None else length for length in lengths]
            if kind in (bytes, bytearray):
                seq_lens = [length for length in seq_lens if type(length) is int]
                seq_lens = [length for length in seq_lens if 0 <= length < 256]
            seq_lens = kind(seq_lens)
        want, refusal = either(partial(build_batch, manager, rows, seq_lens=seq_lens))
        got, words = either(partial(batches.build, rows, seq_lens))
        assert words == refusal
        if got is not None and want is not None:
            width = want.block_tables.shape[1]
            needed = (want.block_tables != -1).nonzero(as_tuple=True)
            assert torch.equal(got.block_tables[:, :width][needed], want.block_tables[needed])
            for name in ("seq_lens", "query_start_loc", "slot_mapping"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name


MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


@given(modes=st.lists(st.sampled_from(sorted(MODES)), min_size=2, max_size=12))
def test_steps_in_different_modes_are_what_build_batch_gives(modes: list[str]) -> None:
    manager = BlockManager(64, 2)
    manager.allocate("a", 6)
    manager.allocate("b", 1)
    batches = DecodeBatches(manager)
    for step, mode in enumerate(modes):
        rows = ["a", "b"] if step % 5 != 4 else ["b"]
        manager.append_all([("a", 1), ("b", 1)])
        with MODES[mode]():
            batch = batches.build(rows)
            assert not any(getattr(batch, name).is_inference() for name in FIELDS)
        assert_same(batch, build_batch(manager, rows))


def test_a_request_that_comes_again_under_its_old_name_gets_its_new_blocks() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    batches = DecodeBatches(manager)
    batches.build(["a"])
    manager.free("a")
    manager.allocate("b", 4)
    manager.allocate("a", 5)
    assert_same(batches.build(["a"]), build_batch(manager, ["a"]))


def test_tables_are_kept_and_not_written_where_only_lengths_changed() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    batches = DecodeBatches(manager)
    tables = batches.build(["a"]).block_tables
    version = tables._version
    for _ in range(3):
        manager.append("a", 1)
        assert batches.build(["a"]).block_tables is tables
    assert tables._version == version
    manager.append("a", 1)
    assert batches.build(["a"]).block_tables._version > version


def test_the_tensors_go_to_the_device() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    batches = DecodeBatches(manager, device="meta")
    for _ in range(6):
        batch = batches.build(["a"])
        assert {getattr(batch, name).device.type for name in Batch.__dataclass_fields__} == {"meta"}
        manager.append("a", 1)


@pytest.mark.parametrize(
    ("requests", "error"),
    [(["a", "x"], UnknownRequest), (["a", "a"], ValueError), (["a", "empty"], ValueError)],
)
def test_what_build_batch_refuses_is_refused_and_the_next_step_is_right(
    requests: Any, error: type[Exception]
) -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    manager.allocate("empty", 0)
    batches = DecodeBatches(manager)
    batches.build(["a"])
    with pytest.raises(error):
        batches.build(requests)
    manager.append("a", 4)
    assert_same(batches.build(["a"]), build_batch(manager, ["a"]))
    assert_same(batches.build([]), build_batch(manager, []))
    assert_same(batches.build(["a"]), build_batch(manager, ["a"]))


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [
        ([6], r"seq_lens\[0\] is 6, expected 0 to 5"),
        ([0], r"query_lens\[0\] is 1, expected 0 to 0"),
        ([-1], r"seq_lens\[0\] is -1"),
        ([1, 1], "seq_lens has 2 entries, expected 1"),
        ([], "seq_lens has 0 entries, expected 1"),
    ],
)
def test_lengths_that_build_batch_refuses_are_refused(seq_lens: list[int], message: str) -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    for build in (DecodeBatches(manager).build, partial(build_batch, manager)):
        with pytest.raises(ValueError, match=message):
            build(["a"], seq_lens=seq_lens)


def test_a_new_token_whose_block_has_left_the_window_is_refused() -> None:
    manager = BlockManager(8, 4, sliding_window=1)
    manager.allocate("a", 8)
    manager.commit("a")  # and nothing was appended
    for build in (DecodeBatches(manager).build, partial(build_batch, manager)):
        with pytest.raises(ValueError, match="the first 2 blocks have left the sliding window"):
            build(["a"])
