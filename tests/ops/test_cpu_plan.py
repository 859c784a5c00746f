"""How a call of attention is cut into tasks for the threads of the CPU."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.driver.plan import Call, Plan, Task, plan

BLOCK_ROWS = 32
SEGMENTS = {"most_rows": 2048, "piece_keys": 2048}
THREADS = (1, 2, 3, 8, 64)

BALANCED = {
    "one long sequence, decode": Call((100_000,), (1,), num_kv_heads=1),
    "one long sequence, decode of as many rows as are cut between keys": Call(
        (60_000,), (2,), num_heads=64, num_kv_heads=1
    ),
    "one long prefill": Call((8192,), (8192,)),
    "one long prefill of one head": Call((8192,), (8192,), num_heads=1, num_kv_heads=1),
    "a chunk after a long context": Call((40_000,), (256,)),
    "one long sequence among short ones": Call((60_000, *[500] * 30), (1,) * 31),
    "prefill beside decode": Call((4096, *[3000] * 16), (4096, *[1] * 16)),
    "a sliding window": Call((30_000,), (30_000,), sliding_window=1000),
    "one long prefill, by segments": Call((8192,), (8192,), **SEGMENTS),
    "a long sequence, decode by segments": Call((300_000,), (1,), num_kv_heads=1, **SEGMENTS),
}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw small and large batches, more queries than keys and sequences without any included."""
    seq_lens = draw(st.lists(st.sampled_from([0, 1, 40, 511, 512, 513, 3000, 20_000]), max_size=5))
    num_kv_heads = draw(st.integers(1, 3))
    return Call(
        tuple(seq_lens),
        tuple(draw(st.sampled_from([0, 1, 2, 33, 700])) for _ in seq_lens),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 128, 576])),
        head_dim_v=draw(st.sampled_from([5, 128])),
        causal=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([0, 1, 600])),
        most_rows=draw(st.sampled_from([256, 1024, 2048])),
        piece_keys=draw(st.sampled_from([512, 2048])),
    )


def attended(call: Call, made: Plan) -> Counter[tuple[int, int, int, int]]:
    """Return how often each block of rows, by its first, is attended to each piece it sees."""
    return Counter(
        (task.sequence, task.kv_head, block, piece)
        for task in made.tasks
        for block in range(task.row_begin, task.rows.stop, BLOCK_ROWS)
        for piece in task.pieces
        if piece in pieces_seen(call, task.sequence, block)
    )


def pieces_seen(call: Call, sequence: int, row: int, num_rows: int = BLOCK_ROWS) -> range:
    """Return the pieces that at least one of some rows sees."""
    last_row = min(row + num_rows, call.query_lens[sequence] * call.group_size) - 1
    begin, end = call.visible(sequence, row).start, call.visible(sequence, last_row).stop
    size = call.piece_keys
    return range(begin // size, -(-end // size)) if begin < end else range(0)


@given(calls())
def test_any_number_of_threads_attends_each_row_to_each_piece_that_it_sees_once(
    call: Call,
) -> None:
    wanted = Counter(
        (sequence, kv_head, block, piece)
        for sequence, query_len in enumerate(call.query_lens)
        for kv_head in range(call.num_kv_heads)
        for block in range(0, query_len * call.group_size, BLOCK_ROWS)
        for piece in pieces_seen(call, sequence, block)
    )
    for threads in THREADS:
        assert attended(call, plan(call, threads)) == wanted


@given(calls(), st.sampled_from(THREADS))
def test_each_row_is_written_once_whether_or_not_it_sees_a_key(call: Call, threads: int) -> None:
    made = plan(call, threads)
    spans = [task for task in made.tasks if task.split < 0]
    spans += {task.split: task for task in made.tasks if task.split >= 0}.values()
    written = Counter((task.sequence, task.kv_head, row) for task in spans for row in task.rows)
    assert written == Counter(
        (sequence, kv_head, row)
        for sequence, query_len in enumerate(call.query_lens)
        for kv_head in range(call.num_kv_heads)
        for row in range(query_len * call.group_size)
    )


@given(calls(), st.sampled_from(THREADS))
def test_blocks_of_rows_stay_whole_and_spans_small(call: Call, threads: int) -> None:
    made = plan(call, threads)
    assert made.most_rows == max((task.num_rows for task in made.tasks), default=0)
    assert made.most_rows <= call.most_rows
    for task in made.tasks:
        assert task.num_rows > 0
        assert task.row_begin % BLOCK_ROWS == 0


@given(calls(), st.sampled_from(THREADS))
def test_a_split_span_is_cut_between_pieces_with_room_for_the_state_of_each(
    call: Call, threads: int
) -> None:
    made = plan(call, threads)
    splits: dict[int, list[Task]] = {}
    for task in made.tasks:
        if task.split >= 0:
            splits.setdefault(task.split, []).append(task)
    free = 0
    for tasks in splits.values():
        first, last = tasks[0], tasks[-1]
        assert len({(task.sequence, task.kv_head, task.rows) for task in tasks}) == 1
        assert [task.piece_begin for task in tasks[1:]] == [task.piece_end for task in tasks[:-1]]
        seen = pieces_seen(call, first.sequence, first.row_begin, first.num_rows)
        assert range(first.piece_begin, last.piece_end) == seen
        assert all(task.pieces for task in tasks)
        assert {task.tasks_left for task in tasks} == {len(tasks)}
        assert first.states == free
        assert free % 16 == 0
        free += state_floats(call, first.num_rows) * (last.piece_end - first.piece_begin)
    assert made.state_floats == free


def state_floats(call: Call, num_rows: int) -> int:
    """Return three numbers of each row, whole cache lines of them, and an accumulator."""
    return 3 * -(-num_rows // 16) * 16 + num_rows * -(-call.head_dim_v // 32) * 32


@given(calls(), st.sampled_from(THREADS))
def test_there_are_no_more_threads_than_allowed_and_tasks_for_all(call: Call, threads: int) -> None:
    made = plan(call, threads)
    assert made.num_threads <= min(threads, len(made.tasks))
    assert (made.num_threads > 0) == any(call.query_lens)


def test_a_tiny_call_wakes_no_other_thread() -> None:
    assert plan(Call((30, 20), (1, 1), head_dim=64, head_dim_v=64), 8).num_threads == 1
    assert plan(Call((3000,), (1,)), 8).num_threads > 1


def test_one_thread_gets_spans_as_large_as_they_may_be() -> None:
    made = plan(Call((5000, 100), (1, 100), num_heads=32, num_kv_heads=2), 1)
    assert [(task.sequence, task.num_rows) for task in made.tasks] == [
        *[(0, 16)] * 2,
        *[(1, 800), (1, 800)] * 2,
    ]
    assert all(task.split < 0 for task in made.tasks)


def cost(call: Call, task: Task) -> int:
    """Return how many keys the rows of a task see, all told."""
    low, high = task.piece_begin * call.piece_keys, task.piece_end * call.piece_keys
    seen = (call.visible(task.sequence, row) for row in task.rows)
    return sum(max(0, min(keys.stop, high) - max(keys.start, low)) for keys in seen)


@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("call", BALANCED.values(), ids=BALANCED)
def test_threads_that_take_tasks_from_the_list_finish_together(call: Call, threads: int) -> None:
    made = plan(call, threads)
    assert made.num_threads == threads
    loads = [0] * threads
    for task in made.tasks:
        loads[loads.index(min(loads))] += cost(call, task)
    assert max(loads) <= 1.15 * sum(loads) / threads


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_the_last_task_of_a_long_sequence_is_an_eighth_of_a_share(threads: int) -> None:
    call = Call((100_000,), (1,), num_kv_heads=1)
    costs = [cost(call, task) for task in plan(call, threads).tasks]
    assert max(costs) <= sum(costs) / threads / 8 + call.piece_keys * call.num_heads


def test_the_rows_that_see_most_come_first() -> None:
    call = Call((8192,), (8192,), num_heads=1, num_kv_heads=1)
    begins = [task.row_begin for task in plan(call, 4).tasks]
    assert begins == sorted(begins, reverse=True)
