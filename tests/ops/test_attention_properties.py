"""Properties of attention that hold for every shape, option, layout and dtype.

Two kinds: the result is the reference's, and the bits of a row depend on nothing but its query,
what it sees and the options.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from tests.support.checks import (
    assert_accurate,
    assert_within_bound,
    largest,
    relative_error,
    same_bits,
)
from tests.support.sequences import (
    GARBAGE,
    PagedCase,
    Placement,
    Sequences,
    make_sequences,
    place,
    run,
)
from tests.support.strategies import article_sequences, placements, sequences

assert paged_ops  # Loads the library that registers torch.ops.paged.


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return same_bits(a[0], b[0]) and same_bits(a[1], b[1])


# Against the reference


@given(article_sequences(), placements(cache_layout="article NHD", query_layout="contiguous"))
def test_decode_on_the_shapes_of_the_article_is_within_the_strict_bound(
    made: Sequences, placement: Placement
) -> None:
    case = place(made, placement)
    num_blocks, block_size, num_kv_heads, head_dim = case.key_cache.shape
    kv_blocks = torch.stack([case.key_cache, case.value_cache], dim=1)
    assert kv_blocks.shape == (num_blocks, 2, block_size, num_kv_heads, head_dim)
    output = torch.ops.paged.attention(
        made.query, kv_blocks[:, 0], kv_blocks[:, 1], case.block_tables, case.seq_lens
    )
    assert_within_bound(made, output)


@given(sequences(), placements())
def test_every_case_equals_the_reference(made: Sequences, placement: Placement) -> None:
    assert_accurate(made, *run(made, placement))


@given(sequences(), placements())
def test_all_forms_of_the_op_give_the_same_bits(made: Sequences, placement: Placement) -> None:
    case = place(made, placement)
    output, _ = case.run()
    out = torch.full_like(output, math.nan)
    assert same_bits(torch.ops.paged.attention(*case.tensors, **case.options), output)
    returned = torch.ops.paged.attention.out(*case.tensors, **case.options, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert same_bits(out, output)
    assert same_bits(paged_ops.attention(*case.tensors, **case.options), output)


# What must not change a bit


@given(sequences(), placements(), placements())
def test_bits_do_not_depend_on_block_size_order_layout_or_garbage(
    made: Sequences, first: Placement, second: Placement
) -> None:
    assert equal(run(made, first), run(made, second))


@given(sequences(), placements(), st.sampled_from(GARBAGE))
def test_bits_do_not_depend_on_what_lies_past_the_length(
    made: Sequences, placement: Placement, garbage: str
) -> None:
    clean = place(made, replace(placement, garbage="zero"))
    assert equal(clean.run(), run(made, replace(placement, garbage=garbage)))


@given(sequences(min_batch=1), placements(), st.data())
def test_bits_of_a_row_do_not_depend_on_the_rest_of_the_batch(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    chosen = data.draw(
        st.lists(st.sampled_from(range(len(made.keys))), min_size=1, max_size=6), "chosen"
    )
    output, lse = run(made, placement)
    rows = torch.cat([torch.arange(*made.rows(i).indices(len(output))) for i in chosen])
    assert equal((output[rows], lse[rows]), run(made.select(chosen), placement))


@given(sequences(max_batch=3), placements())
def test_bits_do_not_depend_on_the_number_of_threads(made: Sequences, placement: Placement) -> None:
    case = place(made, placement)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3, 5, 17):
        torch.set_num_threads(num_threads)
        results.append(case.run())
    torch.set_num_threads(before)
    assert all(equal(results[0], result) for result in results)


@given(sequences(), placements())
def test_repeated_calls_give_the_same_bits(made: Sequences, placement: Placement) -> None:
    case = place(made, placement)
    first = case.run()
    assert all(equal(first, case.run()) for _ in range(5))


@given(sequences(causal=True), placements(), placements())
def test_bits_are_the_same_in_decode_form_and_in_prefill_form(
    made: Sequences, first: Placement, second: Placement
) -> None:
    one_by_one = made.split_rows(lambda query_len: list(range(1, query_len)))
    one_by_one = one_by_one.select([i for i, m in enumerate(one_by_one.query_lens) if m])
    decode = place(one_by_one, second).as_decode()
    assert equal(run(made, first), decode.run())


@given(sequences(causal=True), placements(), placements(), st.data())
def test_bits_are_the_same_in_chunks_and_in_one_piece(
    made: Sequences, first: Placement, second: Placement, data: st.DataObject
) -> None:
    def cuts(query_len: int) -> list[int]:
        return sorted(data.draw(st.lists(st.integers(0, query_len), max_size=4), "cuts"))

    assert equal(run(made, first), run(made.split_rows(cuts), second))


@given(sequences(causal=False, min_batch=1), placements(), st.data())
def test_bits_of_the_last_queries_are_the_same_without_the_queries_before_them(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    kept = [data.draw(st.integers(0, m), "kept") for m in made.query_lens]
    starts = [made.rows(i).stop - k for i, k in enumerate(kept)]
    rows = torch.cat([torch.arange(s, s + k) for s, k in zip(starts, kept, strict=True)])
    fewer = replace(made, query=made.query[rows], query_lens=tuple(kept))
    output, lse = run(made, placement)
    assert equal((output[rows], lse[rows]), run(fewer, placement))


@given(sequences(min_batch=1, min_query_len=1), placements(), st.data())
def test_keys_that_a_row_does_not_see_change_no_bit_of_it(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    sequence = data.draw(st.integers(0, len(made.keys) - 1), "sequence")
    row = data.draw(st.integers(0, made.query_lens[sequence] - 1), "row")
    poison = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38]), "poison")
    length = made.seq_lens[sequence]
    position = length - made.query_lens[sequence] + row
    window = made.options.get("sliding_window") or length + made.query_lens[sequence]

    keys, values = made.keys[sequence].clone(), made.values[sequence].clone()
    for tensor in (keys, values):
        tensor[: max(0, position - window + 1)] = poison
        if made.options["causal"]:
            tensor[max(0, position + 1) :] = poison
    poisoned = replace(
        made,
        keys=(*made.keys[:sequence], keys, *made.keys[sequence + 1 :]),
        values=(*made.values[:sequence], values, *made.values[sequence + 1 :]),
    )
    index = made.rows(sequence).start + row
    (output, lse), (output_poisoned, lse_poisoned) = run(made, placement), run(poisoned, placement)
    assert same_bits(output[index], output_poisoned[index])
    assert same_bits(lse[index], lse_poisoned[index])
    others = [r for r in range(len(output)) if not in_range(r, made.rows(sequence))]
    assert same_bits(output[others], output_poisoned[others])


def in_range(index: int, rows: slice) -> bool:
    return rows.start <= index < rows.stop


@given(sequences(min_batch=1, min_query_len=1), placements(), st.data())
def test_a_query_of_nan_reaches_no_other_row(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, len(made.query) - 1), "row")
    head = data.draw(st.integers(0, made.query.shape[1] - 1), "head")
    query = made.query.clone()
    query[row, head] = math.nan
    output, lse = run(made, placement)
    with_nan, lse_with_nan = run(replace(made, query=query), placement)
    for clean, other in ((output, with_nan), (lse, lse_with_nan)):
        other[row, head] = clean[row, head]
        assert same_bits(clean, other)


@given(sequences(), placements())
def test_the_tensors_of_the_caller_are_unchanged(made: Sequences, placement: Placement) -> None:
    case = place(made, placement)
    given_tensors = [t for t in (*case.tensors, *case.options.values()) if isinstance(t, Tensor)]
    before = [tensor.clone() for tensor in given_tensors]
    case.run()
    assert all(same_bits(a, b) for a, b in zip(given_tensors, before, strict=True))


# Splitting the keys


def split_keys(case: PagedCase, cut_blocks: int) -> tuple[PagedCase, PagedCase]:
    """Cut a call on one sequence in two: its first blocks, which all queries see, and the rest."""
    cut = cut_blocks * case.key_cache.shape[1]
    first = replace(
        case,
        seq_lens=torch.full_like(case.seq_lens, cut),
        options={**case.options, "causal": False, "sinks": None},
    )
    second = replace(
        case,
        block_tables=case.block_tables[:, cut_blocks:],
        seq_lens=case.seq_lens - cut,
    )
    return first, second


@given(sequences(min_batch=1, max_batch=1), placements(block_size=3), st.data())
def test_two_parts_of_the_keys_merge_into_the_whole(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    options = {"sliding_window": None, "alibi_slopes": None}
    made = made.with_options(**options)
    common = max(0, made.seq_lens[0] - made.query_lens[0] + 1)
    cut_blocks = data.draw(st.integers(0, common // 3), "cut_blocks")
    case = place(made, placement)
    first, second = split_keys(case, cut_blocks)
    assume(second.seq_lens.item() >= 0)
    merged, merged_lse = torch.ops.paged.merge_states(*first.run(), *second.run())
    output, lse = case.run()
    finite = lse.isfinite()
    # The parts are rounded to the dtype before they are merged, and each lse to float32: it shifts
    # the weight of its part by as much as its own last place.
    bound = 1e-6 if made.dtype == torch.float32 else 2 * torch.finfo(made.dtype).eps
    bound += torch.finfo(torch.float32).eps * largest(lse[finite])
    magnitude = max(largest(part) for part in (output, first.run()[0], second.run()[0]))
    assert largest(merged.double() - output.double()) <= bound * magnitude
    assert torch.equal(finite, merged_lse.isfinite())
    assert torch.allclose(merged_lse[finite], lse[finite], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cut_blocks", [1, 7, 256])
def test_a_long_prefix_and_a_suffix_merge_to_1e_6(cut_blocks: int) -> None:
    made = make_sequences([4096 + 64], [8], num_heads=4, num_kv_heads=2, head_dim=64)
    made = made.with_options(sinks=torch.tensor([0.0, 3.0, -2.0, 8.0]))
    case = place(made, Placement(block_size=16))
    first, second = split_keys(case, cut_blocks)
    merged, merged_lse = torch.ops.paged.merge_states(*first.run(), *second.run())
    output, lse = case.run()
    assert relative_error(merged, output.double()) <= 1e-6
    assert relative_error(merged_lse, lse.double()) <= 1e-6
