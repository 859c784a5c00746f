"""Which sequences a call of attention on the CPU attends to keys together, and in which order."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.driver.plan import Call, Plan, Stretch, Task, plan

THREADS = (1, 2, 3, 8, 64)
BLOCK = 128


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw sequences with tables that agree in some places, and lengths that end anywhere."""
    batch = draw(st.integers(1, 6))
    lengths = st.one_of(
        st.sampled_from([0, 1, 511, 512, 513, 1024, 1500, 2048]), st.integers(0, 3000)
    )
    seq_lens = draw(st.lists(lengths, min_size=batch, max_size=batch))
    num_kv_heads = draw(st.integers(1, 2))
    columns = -(-max(seq_lens) // BLOCK)
    tables = []
    for _ in range(batch):
        pieces = [draw(st.sampled_from([0, 0, 1])) for _ in range(0, columns, 4)]
        table = [3 * column + pieces[column // 4] for column in range(columns)]
        if columns and draw(st.booleans()):
            changed = draw(st.integers(0, columns - 1))
            table[changed] = 3 * changed + 2
        tables.append(tuple(table))
    return Call(
        tuple(seq_lens),
        tuple(draw(st.sampled_from([0, 1, 1, 2, 40])) for _ in seq_lens),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3, 4])),
        num_kv_heads=num_kv_heads,
        causal=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([0, 0, 600, 1500])),
        most_rows=draw(st.sampled_from([256, 1024])),
        block_size=BLOCK,
        tables=tuple(tables),
    )


def sequences_of_tokens(call: Call) -> list[int]:
    return [sequence for sequence, count in enumerate(call.query_lens) for _ in range(count)]


def tokens_of(call: Call, made: Plan, task: Task) -> list[int]:
    """Return the query tokens of a task whose rows are whole tokens'."""
    if task.num_shared:
        return made.shared_by(task)
    first = [0, *accumulate(call.query_lens)][task.sequence]
    group = call.group_size
    return list(range(first + task.row_begin // group, first + -(-task.rows.stop // group)))


def columns_of_piece(call: Call, piece: int) -> range:
    keys = call.piece_keys
    return range(piece * keys // BLOCK, -(-(piece + 1) * keys // BLOCK))


@settings(max_examples=50)
@given(calls(), st.sampled_from(THREADS))
def test_sequences_share_pieces_that_all_see_whole_in_the_same_blocks(
    call: Call, threads: int
) -> None:
    made = plan(call, threads)
    sequence_of = sequences_of_tokens(call)
    for task in made.tasks:
        sequences = {sequence_of[token] for token in made.shared_by(task)}
        for piece in task.pieces if sequences else ():
            blocks = {
                tuple(call.tables[s][c] for c in columns_of_piece(call, piece)) for s in sequences
            }
            assert len(blocks) == 1
            keys = range(piece * call.piece_keys, (piece + 1) * call.piece_keys)
            for sequence in sequences:
                last_row = call.query_lens[sequence] * call.group_size - 1
                assert call.visible(sequence, last_row).start <= keys.start
                assert keys.stop <= call.visible(sequence, 0).stop


@settings(max_examples=50)
@given(calls(), st.sampled_from(THREADS))
def test_a_token_is_attended_to_each_piece_once_in_the_order_of_its_keys(
    call: Call, threads: int
) -> None:
    made = plan(call, threads)
    kept = {
        (token, task.kv_head)
        for task in made.tasks
        if task.stretch != Stretch.ALL
        for token in tokens_of(call, made, task)
    }
    pieces: dict[tuple[int, int], list[int]] = {row: [] for row in kept}
    last = Counter[tuple[int, int]]()
    for task in made.tasks:
        for token in tokens_of(call, made, task):
            row = (token, task.kv_head)
            assert (row in kept) == (task.stretch != Stretch.ALL)
            if row in kept:
                assert not last[row] or task.stretch == Stretch.LAST
                pieces[row] += task.pieces
                last[row] += task.stretch == Stretch.LAST
    assert set(last) == kept
    sequence_of = sequences_of_tokens(call)
    for (token, _), found in pieces.items():
        sequence = sequence_of[token]
        rows = call.query_lens[sequence] * call.group_size
        begin = call.visible(sequence, 0).start // call.piece_keys
        end = -(-call.visible(sequence, rows - 1).stop // call.piece_keys)
        assert found == list(range(begin, end))


@settings(max_examples=50)
@given(calls())
def test_all_that_may_share_a_piece_do(call: Call) -> None:
    made = plan(call, 1)
    sequence_of = sequences_of_tokens(call)
    together = {
        (frozenset(sequence_of[token] for token in made.shared_by(task)), piece)
        for task in made.tasks
        if task.num_shared
        for piece in task.pieces
    }
    for piece in range(-(-max(call.seq_lens) // call.piece_keys)):
        keys = range(piece * call.piece_keys, (piece + 1) * call.piece_keys)
        by_blocks: dict[tuple[int, ...], set[int]] = {}
        for sequence, query_len in enumerate(call.query_lens):
            rows = query_len * call.group_size
            if not 0 < rows <= 128:
                continue
            first, last = call.visible(sequence, 0), call.visible(sequence, rows - 1)
            if last.start <= keys.start and keys.stop <= first.stop:
                blocks = tuple(call.tables[sequence][c] for c in columns_of_piece(call, piece))
                by_blocks.setdefault(blocks, set()).add(sequence)
        wanted = {frozenset(group) for group in by_blocks.values() if len(group) > 1}
        assert {group for group, where in together if where == piece} == wanted


@settings(max_examples=50)
@given(calls(), st.sampled_from(THREADS))
def test_states_have_room_of_their_own(call: Call, threads: int) -> None:
    made = plan(call, threads)
    splits = {task.split: task for task in made.tasks if task.split >= 0}
    ends = 0
    for split, task in sorted(splits.items()):
        floats = 3 * -(-task.num_rows // 16) * 16 + task.num_rows * -(-call.head_dim_v // 32) * 32
        pieces = sum(len(other.pieces) for other in made.tasks if other.split == split)
        # One state more, before them, is that over the keys before.
        assert task.states == ends + floats * (task.stretch != Stretch.ALL)
        ends = task.states + floats * pieces
    assert made.state_floats == ends


@pytest.mark.parametrize("num_seqs", [2, 32, 300])
@pytest.mark.parametrize("threads", [2, 8, 64])
def test_threads_finish_together_where_a_prefix_is_shared(num_seqs: int, threads: int) -> None:
    shared, own = 32, 1
    prefix = tuple(range(shared))
    call = Call(
        (shared * BLOCK + own * BLOCK,) * num_seqs,
        (1,) * num_seqs,
        num_heads=32,
        num_kv_heads=8,
        block_size=BLOCK,
        tables=tuple((*prefix, shared + s) for s in range(num_seqs)),
    )
    made = plan(call, threads)
    loads = [0] * made.num_threads
    for task in made.tasks:
        keys = min(task.piece_end * 512, call.seq_lens[0]) - task.piece_begin * 512
        loads[loads.index(min(loads))] += keys * (task.num_rows + 16)
    assert max(loads) <= 1.3 * sum(loads) / made.num_threads + 512 * (128 + 16)
    assert all(task.num_rows <= call.most_rows for task in made.tasks)


def test_no_keys_are_shared_where_no_table_has_a_block_of_another() -> None:
    call = Call((5000, 5000, 700), (1, 2, 700))
    assert {task.stretch for task in plan(call, 4).tasks} == {Stretch.ALL}


def test_rows_of_many_tokens_share_nothing() -> None:
    tables = ((0, 1, 2, 3),) * 2
    call = Call((2048, 2048), (33, 33), block_size=512, tables=tables)
    assert {task.stretch for task in plan(call, 4).tasks} == {Stretch.ALL}
    assert any(
        task.num_shared for task in plan(Call((2048,) * 2, (32,) * 2, tables=tables), 4).tasks
    )


def test_consecutive_pieces_of_the_same_sequences_are_one_stretch() -> None:
    tables = ((*range(8), 100), (*range(8), 200), (*range(4), *range(50, 55)))
    call = Call((4500,) * 3, (1,) * 3, num_heads=4, num_kv_heads=1, tables=tables)
    made = plan(call, 1)
    found = [
        (task.num_shared, task.piece_begin, task.piece_end, Stretch(task.stretch).name)
        for task in made.tasks
    ]
    assert found == [
        (3, 0, 4, "PART"),
        (2, 4, 8, "PART"),
        *[(0, 8, 9, "LAST")] * 2,
        (0, 4, 9, "LAST"),
    ]


def shared_pieces(call: Call) -> list[tuple[int, int]]:
    """Return which ranges of pieces some tokens share."""
    made = plan(call, 1)
    return [(task.piece_begin, task.piece_end) for task in made.tasks if task.num_shared]


def test_a_piece_that_not_all_rows_of_a_sequence_see_is_its_own() -> None:
    tables = ((0, 1, 2, 3),) * 2
    ends = Call((1024, 1024), (1, 2), num_heads=2, tables=tables)
    assert shared_pieces(ends) == [(0, 1)] * 2
    assert shared_pieces(Call((1025, 1024), (2, 1), num_heads=2, tables=tables)) == [(0, 2)] * 2
    begins = Call((1536, 1536), (1, 1), num_heads=2, sliding_window=1024, tables=tables)
    assert shared_pieces(begins) == [(1, 3)] * 2
    begins = Call((1536, 1537), (1, 2), num_heads=2, sliding_window=1024, tables=tables)
    assert shared_pieces(begins) == [(2, 3)] * 2


def test_pieces_with_another_between_them_are_two_stretches() -> None:
    tables = ((0, 1, 2, 3), (0, 5, 2, 6))
    assert shared_pieces(Call((2000, 2000), (1, 1), num_heads=2, tables=tables)) == [
        *[(0, 1)] * 2,
        *[(2, 3)] * 2,
    ]
