"""Sequences whose tables have the same blocks: their rows may be attended to these together.

Nothing of that may show. So a call is compared, to the bit, with the same call on private copies of
the blocks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.checks import assert_accurate, same_bits
from tests.support.quantisation import Quantisation
from tests.support.sequences import DTYPES, Placement, Sequences, make_sequences, place, run
from tests.support.shared_blocks import (
    Sharing,
    piece_keys,
    prefix,
    run_shared,
    share_blocks,
    shared_calls,
    with_shared_keys,
)
from tests.support.strategies import placements
from tests.support.trees import tree_mask

BF16 = torch.bfloat16
THREADS = (1, 2, 5)


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    assert same_bits(a[0], b[0])
    assert same_bits(a[1], b[1])


@settings(max_examples=60)
@given(shared_calls(), placements(), st.sampled_from([1, 8, 24, 64, 512]), st.data())
def test_bits_do_not_depend_on_whether_blocks_are_shared(
    call: tuple[Sequences, Sharing], placement: Placement, block_size: int, data: st.DataObject
) -> None:
    sequences, sharing = call
    torch.set_num_threads(data.draw(st.sampled_from(THREADS), "threads"))
    placement = replace(placement, block_size=block_size)
    assert_same(run_shared(sequences, sharing, placement), run(sequences, placement))


def prefixed(
    tokens: int, own: tuple[int, ...], query_lens: tuple[int, ...] | None = None, **options: object
) -> tuple[Sequences, Sharing]:
    """Return sequences of a prefix in common and some keys of their own."""
    dtype = options.pop("dtype", BF16)
    made = make_sequences(
        [tokens + n for n in own],
        query_lens,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        **options,
    )
    sharing = prefix(tokens, len(own))
    return with_shared_keys(made, sharing), sharing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [2, 5, 20])
def test_a_prefix_has_the_bits_of_private_copies_and_the_result_of_the_reference(
    dtype: torch.dtype, batch: int
) -> None:
    made, sharing = prefixed(piece_keys(dtype), tuple(range(1, batch + 1)), dtype=dtype)
    placement = Placement(32)
    results = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        results.append(run_shared(made, sharing, placement))
        assert_same(results[0], results[-1])
    assert_same(results[0], run(made, placement))
    assert_accurate(made, *results[0])


@pytest.mark.parametrize("column", [0, 7, -1])
def test_a_table_that_differs_in_one_entry_has_keys_of_its_own(column: int) -> None:
    piece = piece_keys(BF16)
    made, sharing = prefixed(piece, (3, 3, 3, 3))
    case = share_blocks(place(made, Placement(64)), sharing)
    tables, (key_cache, value_cache) = case.block_tables.clone(), (case.key_cache, case.value_cache)
    spare = next(b for b in range(len(key_cache)) if not (tables == b).any())
    key_cache[spare] = -key_cache[int(tables[2, column % (piece // 64)])]
    value_cache[spare].fill_(2.0)
    tables[2, column % (piece // 64)] = spare
    rows = [2]
    together = replace(case, block_tables=tables).run()
    alone = replace(
        case,
        query=case.query[rows],
        block_tables=tables[rows],
        seq_lens=case.seq_lens[rows],
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
    ).run()
    assert_same((together[0][rows], together[1][rows]), alone)
    others, before = [0, 1, 3], case.run()
    assert_same((together[0][others], together[1][others]), (before[0][others], before[1][others]))
    assert not same_bits(together[0][rows], before[0][rows])


@pytest.mark.parametrize("short", [-1, -40, 0, 1])
def test_a_sequence_that_ends_within_a_shared_piece_sees_no_further(short: int) -> None:
    piece = piece_keys(BF16)
    made = make_sequences(
        (piece + 90, piece + short, piece + 5), (2, 3, 1), num_heads=4, head_dim=16, dtype=BF16
    )
    sharing = prefix(piece + 5, 3)
    made = with_shared_keys(made, sharing)
    placement = Placement(32)
    assert_same(run_shared(made, sharing, placement), run(made, placement))
    assert_same(
        run_shared(made.with_options(causal=False), sharing, placement),
        run(made.with_options(causal=False), placement),
    )


def test_a_window_cuts_each_sequence_where_it_cuts_it_alone() -> None:
    piece = piece_keys(BF16)
    made, sharing = prefixed(3 * piece, (1, 40, 200), (1, 2, 3))
    placement = Placement(32)
    for window in (piece // 2, piece + 1, piece + 41, 2 * piece + 60, 3 * piece + 200):
        windowed = made.with_options(sliding_window=window)
        assert_same(run_shared(windowed, sharing, placement), run(windowed, placement))


@pytest.mark.parametrize("stored", ["int8-token", "float8_e4m3fn-head"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_quantised_prefixes_have_the_bits_of_private_copies(
    stored: str, dtype: torch.dtype
) -> None:
    name, granularity = stored.split("-")
    quantisation = Quantisation(getattr(torch, name), granularity)
    made, sharing = prefixed(
        1024, (3, 70, 600, 4, 5), (1, 2, 1, 4, 1), dtype=dtype, quantisation=quantisation
    )
    placement = Placement(64)
    assert_same(run_shared(made, sharing, placement), run(made, placement))


def test_options_that_go_by_position_go_by_that_of_each_row() -> None:
    made, sharing = prefixed(piece_keys(BF16), (1, 500, 30, 2000), (1, 2, 1, 3))
    made = made.with_options(
        alibi_slopes=torch.linspace(-0.02, 0.05, 8), softcap=8.0, sinks=torch.linspace(-2, 3, 8)
    )
    placement = Placement(32)
    result = run_shared(made, sharing, placement)
    assert_same(result, run(made, placement))
    assert_accurate(made, *result)


def test_a_tree_hides_new_tokens_from_their_own_rows_only() -> None:
    piece = piece_keys(BF16)
    # The new tokens of the last sequence are the end of a piece that all have in common.
    query_lens = (4, 3, 5)
    made = make_sequences(
        (piece + 9, piece + 30, piece), query_lens, num_heads=4, head_dim=16, dtype=BF16
    )
    sharing = prefix(piece, 3)
    made = with_shared_keys(made, sharing).with_options(
        causal=False, tree_mask=tree_mask(query_lens)
    )
    placement = Placement(16)
    assert_same(run_shared(made, sharing, placement), run(made, placement))


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_what_a_shared_key_holds_reaches_those_that_see_it(value: float) -> None:
    piece = piece_keys(BF16)
    made, sharing = prefixed(2 * piece, (1, 2, 3, 4, 5, 6))
    keys, values = [k.clone() for k in made.keys], [v.clone() for v in made.values]
    for key, val in zip(keys, values, strict=True):
        val[piece + 3, 0, 5] = value
        key[7, 1, 2] = value
        key[piece + 600 % piece, 0] *= 400
    made = replace(made, keys=tuple(keys), values=tuple(values))
    placement = Placement(32)
    assert_same(run_shared(made, sharing, placement), run(made, placement))
    windowed = made.with_options(sliding_window=piece + 2)
    assert_same(run_shared(windowed, sharing, placement), run(windowed, placement))


def test_prefixes_within_prefixes_have_the_bits_of_private_copies() -> None:
    piece = piece_keys(BF16)
    lens = (3 * piece + 7, 2 * piece + 40, 3 * piece, 2 * piece + 600, piece + 1, 3 * piece + 8)
    made = make_sequences(lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=BF16)
    sharing = Sharing(
        (piece, 2 * piece, 3 * piece),
        ((0,) * 6, (0, 1, 0, 1, 2, 0), (0, 1, 0, 2, 3, 4), (0, 1, 2, 3, 4, 5)),
    )
    made = with_shared_keys(made, sharing)
    for threads in THREADS:
        torch.set_num_threads(threads)
        placement = Placement(32)
        assert_same(run_shared(made, sharing, placement), run(made, placement))


def test_equal_blocks_behind_different_ones_are_equal_blocks() -> None:
    piece = piece_keys(BF16)
    made = make_sequences((3 * piece + 7,) * 4, num_heads=4, head_dim=16, dtype=BF16)
    sharing = Sharing(
        (piece, 2 * piece, 3 * piece), ((0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 2, 3))
    )
    made = with_shared_keys(made, sharing)
    placement = Placement(32)
    assert_same(run_shared(made, sharing, placement), run(made, placement))
