"""Attention, case by case: the inputs on which other implementations are known to have failed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops import reference
from tests.support.checks import (
    assert_accurate,
    assert_within_bound,
    largest,
    relative_error,
    same_bits,
    torch_error,
)
from tests.support.sequences import (
    CACHE_LAYOUTS,
    DTYPES,
    GARBAGE,
    QUERY_LAYOUTS,
    PagedCase,
    Placement,
    Sequences,
    exact,
    make_sequences,
    normal,
    place,
    run,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HALF = (torch.float16, torch.bfloat16)


def check(made: Sequences, placement: Placement | None = None) -> tuple[Tensor, Tensor]:
    """Run the op on the sequences, hold it against the reference, and return output and lse."""
    output, lse = run(made, placement)
    assert_accurate(made, output, lse)
    return output, lse


def with_position_values(made: Sequences) -> Sequences:
    """Return the same sequences with equal scores, and values one-hot in the position."""
    longest = max(made.seq_lens)
    eye = torch.eye(longest, dtype=made.dtype).unsqueeze(1).expand(-1, made.num_kv_heads, -1)
    return replace(
        made,
        keys=tuple(torch.zeros_like(keys) for keys in made.keys),
        values=tuple(eye[: len(keys)] for keys in made.keys),
        head_dim_v=longest,
    )


def seen_keys(made: Sequences, placement: Placement | None = None) -> list[set[int]]:
    """Return for every row the positions of the keys that reach its output, for all heads."""
    output, _ = run(with_position_values(made), placement)
    assert torch.equal(output.ne(0).all(dim=1), output.ne(0).any(dim=1))
    return [set(row.nonzero().flatten().tolist()) for row in output[:, 0]]


# The shapes of the article


@each_dtype
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_layer_of_the_pool_is_read_in_the_shape_that_the_article_shows(
    dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    made = make_sequences(
        [1, 15, 16, 17, 100, 511],
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    case = place(made, Placement(block_size=16))
    kv_blocks = torch.stack([case.key_cache, case.value_cache], dim=1)
    block_tables, seq_lens = case.block_tables, case.seq_lens
    output = torch.ops.paged.attention(
        made.query, kv_blocks[:, 0], kv_blocks[:, 1], block_tables, seq_lens
    )
    assert_within_bound(made, output)


@pytest.mark.parametrize("name", ["attention", "attention_with_lse"])
def test_the_public_function_is_the_op(name: str) -> None:
    made = make_sequences([20, 3], [4, 1], sliding_window=7, softcap=5.0, causal=False, scale=0.2)
    made = made.with_options(alibi_slopes=torch.tensor([0.1, 0.2]), sinks=torch.tensor([0.0, 1.0]))
    case = place(made, Placement())
    got = getattr(paged_ops, name)(*case.tensors, **case.options)
    want = getattr(torch.ops.paged, name)(*case.tensors, **case.options)
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


# What lies past the length


@each_dtype
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("poisoned", ["values", "keys", "both"])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([5], [1]), ([1, 3], [1, 3]), ([130, 64], [5, 64])]
)
def test_nothing_past_the_length_reaches_the_output(
    dtype: torch.dtype,
    garbage: str,
    poisoned: str,
    seq_lens: list[int],
    query_lens: list[int],
) -> None:
    made = make_sequences(seq_lens, query_lens, dtype=dtype)
    dirty = place(made, Placement(garbage=garbage))
    clean = place(made, Placement(garbage=garbage))
    for cache in (clean.key_cache, clean.value_cache):
        slots = torch.arange(cache.shape[1])
        for table, length in zip(clean.block_tables, clean.seq_lens.tolist(), strict=True):
            for index in range(-(-length // cache.shape[1])):
                past = slots + index * cache.shape[1] >= length
                cache[table[index], past] = 0.0
    if poisoned != "both":
        spared = "key_cache" if poisoned == "values" else "value_cache"
        dirty = replace(dirty, **{spared: getattr(clean, spared)})
    output, lse = dirty.run()
    assert output.isfinite().all()
    want, want_lse = clean.run()
    assert same_bits(output, want)
    assert same_bits(lse, want_lse)


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_nan_in_a_key_or_value_that_a_row_sees_is_not_hidden(kind: str, form: str) -> None:
    made = make_sequences([100], [1 if form == "decode" else 60], head_dim=16)
    poisoned = tuple(tensor.clone() for tensor in getattr(made, kind))
    poisoned[0][50, 0, 3] = math.nan
    output, _ = run(replace(made, **{kind: poisoned}))
    rows = output[max(0, 50 - (100 - len(output))) :]
    assert (rows if kind == "keys" else rows[..., 3]).isnan().all()


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_nan_in_a_query_is_not_hidden(form: str) -> None:
    made = make_sequences([100], [1 if form == "decode" else 60])
    query = made.query.clone()
    query[-1, 0, 5] = math.nan
    output, lse = run(replace(made, query=query))
    assert output[-1, 0].isnan().all()
    assert lse[-1, 0].isnan()
    assert output[-1, 1].isfinite().all()


@each_dtype
def test_rows_of_empty_sequences_are_zero_whatever_the_memory_held(dtype: torch.dtype) -> None:
    case = place(make_sequences([7, 0, 0], dtype=dtype), Placement()).as_decode()
    out = torch.full((3, 2, 16), math.nan, dtype=dtype)
    torch.ops.paged.attention.out(*case.tensors, out=out)
    assert out.isfinite().all()
    assert out[1:].eq(0).all()
    for _ in range(20):
        del out
        out = torch.full((3, 2, 16), math.nan, dtype=dtype)
        del out
        out = torch.ops.paged.attention(*case.tensors)
        assert out[1:].eq(0).all()


# Magnitudes


@each_dtype
@pytest.mark.parametrize("seq_len", [1, 5, 700])
def test_scores_far_below_any_finite_sentinel_still_make_a_softmax(
    dtype: torch.dtype, seq_len: int
) -> None:
    made = make_sequences([seq_len], [min(seq_len, 3)], head_dim=128, dtype=dtype)
    made = replace(
        made,
        query=torch.full_like(made.query, 450.0),
        keys=(torch.full_like(made.keys[0], -1800.0),),
        values=(torch.ones_like(made.values[0]),),
    )
    output, lse = run(made)
    want_lse = -450.0 * 1800.0 * 128 / math.sqrt(128)
    assert relative_error(output, torch.ones(output.shape).double()) <= 1e-6
    assert relative_error(lse, torch.full(lse.shape, want_lse).double()) <= 1e-6


@each_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_one_dominant_key_takes_all_the_weight_wherever_it_stands(
    dtype: torch.dtype, sign: int
) -> None:
    for position in (0, 1, 63, 64, 511, 512, 600):
        made = make_sequences([601], head_dim=32, dtype=dtype)
        keys = torch.zeros_like(made.keys[0])
        keys[position] = sign * 60.0
        made = replace(made, query=torch.full_like(made.query, sign * 60.0), keys=(keys,))
        output, _ = run(made)
        assert same_bits(output[0], made.values[0][position].expand(2, -1).contiguous())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_large_values_over_a_long_sequence_beside_a_short_one_round_only_once(
    dtype: torch.dtype,
) -> None:
    made = make_sequences([16_384, 20], num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype)
    # The weights are equal, which is exact in every dtype: only partial sums could be rounded.
    made = replace(
        made,
        query=torch.zeros_like(made.query),
        values=tuple(values * 1e3 for values in made.values),
    )
    output, _ = check(made)
    want, _ = exact(made)
    one_rounding = torch.finfo(dtype).eps / 2 * want.abs()
    assert bool(((output.double() - want).abs() <= one_rounding * 1.02 + 1e-4).all())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("query_len", [1, 30])
def test_equal_values_come_out_as_they_are_though_all_weights_round_the_same_way(
    dtype: torch.dtype, query_len: int
) -> None:
    made = make_sequences([500], [query_len], head_dim=32, dtype=dtype, scale=1.0)
    made = replace(
        made,
        query=torch.zeros_like(made.query),
        keys=tuple(torch.zeros_like(keys) for keys in made.keys),
        values=tuple(torch.full_like(values, 1.5) for values in made.values),
    )
    # The first key has the largest score by 1.3828125, and e to the minus that is 0.25087: almost
    # half way from 0.25 to the next bfloat16.
    made.query[..., 0] = 1.0
    made.keys[0][0, :, 0] = 1.3828125
    output, _ = run(made)
    assert torch.equal(output, torch.full_like(output, 1.5))


@each_dtype
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-3, 4.0])
def test_scale_may_be_zero_negative_or_large(dtype: torch.dtype, scale: float) -> None:
    check(make_sequences([30, 600], [30, 2], dtype=dtype, scale=scale))


def test_a_scale_of_zero_gives_the_mean_of_the_values() -> None:
    made = make_sequences([77], scale=0.0)
    output, lse = run(made)
    assert relative_error(output[0], made.values[0].double().mean(0).expand(2, -1)) <= 2e-6
    assert relative_error(lse, torch.full((1, 2), math.log(77)).double()) <= 2e-6


# Boundaries


def test_query_lengths_of_zero_and_one_in_one_batch_give_only_the_existing_rows() -> None:
    output, _ = check(make_sequences([0, 3, 0, 5], [0, 1, 0, 1]))
    assert output.shape == (2, 2, 16)


@each_dtype
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("width", [0, 3])
def test_a_call_without_tokens_returns_empty_tensors(
    dtype: torch.dtype, batch: int, width: int
) -> None:
    arguments = (
        torch.empty(0, 6, 16, dtype=dtype),
        torch.empty(4, 16, 2, 16, dtype=dtype),
        torch.empty(4, 16, 2, 24, dtype=dtype),
        torch.zeros(batch, width, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch + 1, dtype=torch.int32),
    )
    output, lse = torch.ops.paged.attention_with_lse(*arguments)
    assert (output.shape, output.dtype) == ((0, 6, 24), dtype)
    assert (lse.shape, lse.dtype) == ((0, 6), torch.float32)
    assert torch.ops.paged.attention(*arguments).shape == (0, 6, 24)


def test_a_table_without_columns_works_for_empty_sequences_and_a_pool_without_blocks() -> None:
    for num_blocks in (0, 3):
        output, lse = torch.ops.paged.attention_with_lse(
            torch.randn(2, 4, 8),
            torch.full((num_blocks, 16, 2, 8), math.nan),
            torch.full((num_blocks, 16, 2, 8), math.nan),
            torch.zeros(2, 0, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )
        assert output.eq(0).all()
        assert lse.isneginf().all()


@each_dtype
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(71, 1), (7, 1), (14, 2), (9, 3), (17, 17), (142, 2), (33, 11)]
)
@pytest.mark.parametrize("query_len", [1, 6])
def test_any_number_of_query_heads_per_kv_head_works(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, query_len: int
) -> None:
    check(
        make_sequences(
            [33],
            [query_len],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=64,
            dtype=dtype,
        )
    )


@each_dtype
@pytest.mark.parametrize(
    "head_dim", [1, 2, 3, 5, 7, 8, 9, 31, 72, 80, 96, 100, 112, 192, 255, 256, 512, 576, 1024]
)
def test_any_head_dim_works_in_decode_and_prefill(dtype: torch.dtype, head_dim: int) -> None:
    check(make_sequences([40, 17], [1, 17], head_dim=head_dim, dtype=dtype))


@each_dtype
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (576, 512), (8, 100), (64, 1)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_values_may_have_another_head_dim_than_keys(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: int
) -> None:
    made = make_sequences(
        [100, 300, 100],
        [1, 1, 100],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
    )
    check(made, Placement(block_size=block_size))


@each_dtype
@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 17, 32, 64, 100, 128, 256, 1000])
def test_every_block_size_gives_the_same_bits(dtype: torch.dtype, block_size: int) -> None:
    made = make_sequences([1, 64, 130, 515], [1, 64, 1, 7], dtype=dtype)
    want, want_lse = check(made, Placement(block_size=16))
    output, lse = run(made, Placement(block_size=block_size, seed=1))
    assert same_bits(output, want)
    assert same_bits(lse, want_lse)


def test_more_sequences_than_16_bits_can_count_are_all_computed() -> None:
    batch = 65_537
    query, key, value = (normal((batch, 1, 8), torch.float32, seed) for seed in (0, 1, 2))
    key, value = torch.cat([key, key.flip(0)]), torch.cat([value, value.flip(0)])
    seq_lens = torch.arange(batch).remainder(2).add(1).int()
    block_tables = torch.stack([torch.arange(batch), torch.arange(batch) + batch], 1).int()
    output = torch.ops.paged.attention(
        query, key.unsqueeze(1), value.unsqueeze(1), block_tables, seq_lens
    )
    pairs = torch.stack([key[:batch], key[batch:]], dim=1).double()
    scores = torch.einsum("bhd,bkhd->bk", query.double(), pairs) * 8**-0.5
    scores[seq_lens == 1, 1] = -math.inf
    values = torch.stack([value[:batch], value[batch:]], dim=1).double()
    want = torch.einsum("bk,bkhd->bhd", scores.softmax(1), values)
    assert relative_error(output, want) <= 2e-6


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_rows_before_the_first_key_are_zero_with_lse_minus_infinity(form: str) -> None:
    made = make_sequences([3], [5])
    if form == "decode":
        made = made.split_rows(lambda query_len: list(range(1, query_len)))
    output, lse = check(made)
    assert output[:2].eq(0).all()
    assert lse[:2].isneginf().all()
    assert output[2:].ne(0).all()
    assert lse[2:].isfinite().all()


def test_a_row_without_keys_has_the_sink_as_its_lse() -> None:
    sinks = torch.tensor([0.5, -3.0])
    output, lse = check(make_sequences([3, 0], [5, 1], sinks=sinks))
    for row in (0, 1, 5):
        assert output[row].eq(0).all()
        assert torch.equal(lse[row], sinks)


@pytest.mark.parametrize(("seq_len", "block_size"), [(64, 128), (130, 128), (1, 64), (129, 16)])
@pytest.mark.parametrize("query_len", [1, 9])
def test_without_causal_keys_past_the_length_get_no_weight(
    seq_len: int, block_size: int, query_len: int
) -> None:
    made = make_sequences([seq_len], [query_len], causal=False, scale=0.0)
    placement = Placement(block_size=block_size, garbage="max")
    assert seen_keys(made, placement) == [set(range(seq_len))] * query_len


# Masks, biases, caps and sinks


@pytest.mark.parametrize("window", [1, 2, 3, 6, 7, 100, 2**31, 2**62])
@pytest.mark.parametrize("form", ["prefill", "chunks", "decode"])
def test_a_window_of_w_sees_exactly_w_keys(window: int, form: str) -> None:
    made = make_sequences([6], [6], sliding_window=window)
    if form == "chunks":
        made = made.split_rows(lambda _: [2, 3])
    elif form == "decode":
        made = made.split_rows(lambda query_len: list(range(1, query_len)))
    want = [set(range(max(0, position - window + 1), position + 1)) for position in range(6)]
    assert seen_keys(made, Placement(block_size=4)) == want


def test_a_window_across_blocks_is_exact_and_changes_no_metadata() -> None:
    case = place(with_position_values(make_sequences([50], [1], sliding_window=20)), Placement())
    before = [case.block_tables.clone(), case.seq_lens.clone(), case.query_start_loc.clone()]
    for _ in range(2):
        output, _ = case.run()
        assert output[0, 0].nonzero().flatten().tolist() == list(range(30, 50))
    after = [case.block_tables, case.seq_lens, case.query_start_loc]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("seq_len", [137, 512, 513, 600, 1024, 1025, 3000])
@pytest.mark.parametrize("window", [None, 1, 100, 512, 513, 1000])
def test_windows_are_exact_on_both_sides_of_a_split_of_the_keys(
    seq_len: int, window: int | None
) -> None:
    made = make_sequences([seq_len], [2], num_heads=1, sliding_window=window, head_dim=8)
    starts = [max(0, seq_len - 1 - j - (window or seq_len) + 1) for j in (1, 0)]
    want = [set(range(starts[0], seq_len - 1)), set(range(starts[1], seq_len))]
    assert seen_keys(made) == want
    check(made)


def test_two_causal_queries_over_five_keys_are_aligned_at_the_end() -> None:
    assert seen_keys(make_sequences([5], [2])) == [set(range(4)), set(range(5))]


@each_dtype
@pytest.mark.parametrize("causal", [True, False])
def test_without_causal_the_window_limits_only_the_past(dtype: torch.dtype, causal: bool) -> None:
    made = make_sequences([9], [4], sliding_window=3, causal=causal, dtype=dtype)
    want = [set(range(p - 2, p + 1 if causal else 9)) for p in (5, 6, 7, 8)]
    assert seen_keys(made) == want


@each_dtype
def test_grouped_heads_with_rows_before_the_first_key_and_a_window(dtype: torch.dtype) -> None:
    made = make_sequences(
        [5], [8], num_heads=8, num_kv_heads=2, sliding_window=3, head_dim=64, dtype=dtype
    )
    output, lse = check(made)
    assert output[:3].eq(0).all()
    assert lse[:3].isneginf().all()
    assert output[3:].ne(0).any(dim=2).all()
    assert seen_keys(made)[3:] == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}]


@pytest.mark.parametrize("window", [3, 40])
def test_a_window_past_the_last_key_without_causal_leaves_a_row_without_keys_alone(
    window: int,
) -> None:
    check(make_sequences([2, 30], [9, 30], sliding_window=window, causal=False))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_alibi_is_the_same_in_decode_and_in_the_last_row_of_a_prefill(dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 2**-8])
    options = {"num_heads": 4, "head_dim": 64, "dtype": dtype, "alibi_slopes": slopes}
    prefill = make_sequences([4000], [3], **options)
    decode = replace(prefill, query=prefill.query[2:], query_lens=(1,))
    output, lse = check(prefill)
    last, last_lse = check(decode)
    assert same_bits(output[2:], last)
    assert same_bits(lse[2:], last_lse)


def test_alibi_adds_nothing_at_the_query_itself() -> None:
    made = make_sequences([9], [4], sliding_window=1)
    biased = made.with_options(alibi_slopes=torch.tensor([0.5, 300.0]))
    for a, b in zip(run(made), run(biased), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("slope", [-0.5, 0.5])
def test_alibi_slopes_of_either_sign_work_with_and_without_causal(slope: float) -> None:
    for causal in (True, False):
        slopes = torch.tensor([slope, 0.0])
        check(make_sequences([100, 700], [100, 2], causal=causal, alibi_slopes=slopes))


@each_dtype
@pytest.mark.parametrize("query_len", [1, 5])
def test_masked_keys_have_no_weight_under_a_soft_cap(dtype: torch.dtype, query_len: int) -> None:
    made = make_sequences([5], [query_len], softcap=30.0, dtype=dtype)
    made = replace(
        made,
        query=torch.full_like(made.query, -20.0),
        keys=(torch.full_like(made.keys[0], 6.0),),
        values=(torch.ones_like(made.values[0]),),
    )
    output, lse = run(made)
    assert largest(output - 1) <= torch.finfo(dtype).eps
    score = 30 * math.tanh(-20 * 6 * 16 / math.sqrt(16) / 30)
    seen = torch.arange(5 - query_len + 1, 6)
    want = (score + seen.double().log())[:, None].expand(-1, 2)
    assert largest(lse.double() - want) <= 1e-5


@pytest.mark.parametrize("softcap", [1e-6, 1e-30, 1e-42, 1e-50])
def test_a_tiny_soft_cap_makes_all_scores_equal_and_is_never_taken_for_off(softcap: float) -> None:
    made = make_sequences([77], softcap=softcap)
    try:
        output, _ = run(made)
    except RuntimeError as refusal:
        output = None
        message = str(refusal)
    if output is None:
        assert softcap < torch.finfo(torch.float32).tiny
        assert "softcap" in message
    else:
        mean = made.values[0].double().mean(0).expand(2, -1)
        assert relative_error(output[0], mean) <= 1e-5


@pytest.mark.parametrize("n", [4, 600, 1300, 5000])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 3.0}], ids=str)
def test_a_sink_counts_once_and_is_neither_scaled_nor_capped(
    n: int, window: int | None, options: dict[str, Any]
) -> None:
    visible = n if window is None else window
    sinks = torch.tensor([math.log(visible), math.log(3 * visible)])
    made = make_sequences([n], sinks=sinks, sliding_window=window, **options)
    made = replace(
        made,
        keys=(torch.zeros_like(made.keys[0]),),
        values=(torch.ones_like(made.values[0]),),
    )
    output, lse = run(made)
    want = torch.tensor([0.5, 0.25]).double()[None, :, None].expand(1, 2, 16)
    assert relative_error(output, want) <= 2e-6
    want_lse = torch.tensor([[math.log(2 * visible), math.log(4 * visible)]]).double()
    assert relative_error(lse, want_lse) <= 2e-6


@pytest.mark.parametrize("seq_lens", [[5], [1300]])
def test_a_sink_of_minus_infinity_is_no_sink(seq_lens: list[int]) -> None:
    made = make_sequences(seq_lens)
    output, lse = run(made.with_options(sinks=torch.full((2,), -math.inf)))
    want, want_lse = run(made)
    assert relative_error(output, want.double()) <= 2e-6
    assert relative_error(lse, want_lse.double()) <= 2e-6
    empty = make_sequences([0], sinks=torch.full((2,), -math.inf))
    output, lse = run(empty)
    assert output.eq(0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_a_sink_far_from_the_scores_keeps_output_and_lse_finite(sink: float) -> None:
    output, lse = check(make_sequences([5, 700], [5, 2], sinks=torch.tensor([sink, 0.0])))
    assert output.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_per_head_of_the_query_s_dtype_are_converted_exactly(dtype: torch.dtype) -> None:
    made = make_sequences([5, 700, 0], [5, 2, 1], dtype=dtype)
    per_head = {
        "alibi_slopes": torch.tensor([0.3, 7.0, 0.1, 7.0])[::2].to(dtype),
        "sinks": torch.tensor([0.7, -1.3]).to(dtype),
    }
    in_float32 = {name: tensor.float() for name, tensor in per_head.items()}
    for got, want in zip(
        run(made.with_options(**per_head)), run(made.with_options(**in_float32)), strict=True
    ):
        assert same_bits(got, want)
    check(made.with_options(**per_head))


def test_two_packed_sequences_without_causal_follow_their_strong_keys() -> None:
    made = make_sequences([7, 30], [7, 30], causal=False, scale=1.0, head_dim=16)
    keys = tuple(torch.zeros_like(keys) for keys in made.keys)
    keys[0][4], keys[1][21] = 20.0, 20.0
    made = replace(made, query=torch.full_like(made.query, 0.25), keys=keys)
    output, _ = run(made)
    for i, strong in ((0, 4), (1, 21)):
        want = made.values[i][strong].double().expand_as(output[made.rows(i)])
        assert relative_error(output[made.rows(i)], want) <= 1e-6


OPTIONS = {
    "scale": {"scale": 0.7},
    "causal": {"causal": False},
    "sliding_window": {"sliding_window": 4},
    "softcap": {"softcap": 1.5},
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "sinks": {"sinks": torch.tensor([1.0, 3.0])},
}


@each_dtype
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_option_is_honoured_by_the_op_itself(
    dtype: torch.dtype, option: str, block_size: int
) -> None:
    made = make_sequences([12, 40], [3, 40], dtype=dtype)
    plain, _ = run(made)
    output, _ = check(made.with_options(**OPTIONS[option]), Placement(block_size=block_size))
    assert not torch.allclose(output, plain, rtol=0.05, atol=0.01)


# Offsets


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of untouched memory, which the system backs only where it is used."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for {shape} of {dtype}: {error}")


def in_low_blocks(case: PagedCase) -> PagedCase:
    """Return the call with its needed blocks copied to a small pool."""
    blocks, places = case.block_tables.long().unique(return_inverse=True)
    return replace(
        case,
        key_cache=case.key_cache[blocks].clone(),
        value_cache=case.value_cache[blocks].clone(),
        block_tables=places.int(),
    )


def call_on_blocks(
    key_cache: Tensor, value_cache: Tensor, blocks: list[int], query_len: int, num_heads: int = 4
) -> PagedCase:
    """Fill the given blocks with values and return a call that uses them in this order."""
    for seed, block in enumerate(blocks):
        for offset, cache in enumerate((key_cache, value_cache)):
            values = normal(tuple(cache.shape[1:]), cache.dtype, 10 * seed + offset)
            cache[block] = values
    return PagedCase(
        query=normal((query_len, num_heads, key_cache.shape[3]), key_cache.dtype, 99),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=torch.tensor([blocks], dtype=torch.int32),
        seq_lens=torch.tensor([len(blocks) * key_cache.shape[1] - 1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
        options={},
    )


def assert_same_as_in_low_blocks(case: PagedCase) -> None:
    for a, b in zip(case.run(), in_low_blocks(case).run(), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("query_len", [1, 5])
def test_block_offsets_beyond_32_bits_are_followed(query_len: int) -> None:
    latent = reserve((7_802, 480, 1, 576), torch.bfloat16)
    assert latent[:7_800].numel() > 2**31
    case = call_on_blocks(latent, latent[..., :512], [7_800, 3, 7_801], query_len)
    assert_same_as_in_low_blocks(case)


@pytest.mark.parametrize("layout", ["article", "keys then values"])
def test_keys_and_values_in_one_buffer_beyond_32_bits_are_followed(layout: str) -> None:
    block = (128, 2, 64)
    num_blocks = 2**31 // (2 * 128 * 2 * 64) + 4
    if layout == "article":
        halves = reserve((num_blocks, 2, *block), torch.float16).unbind(1)
    else:
        halves = reserve((2, num_blocks, *block), torch.float16).unbind(0)
    limit = num_blocks - 4
    assert_same_as_in_low_blocks(call_on_blocks(*halves, [limit - 1, limit + 1, 0, limit + 3], 3))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_of_more_than_2_to_the_31_bytes_are_followed(dim: int) -> None:
    apart = 2**31 + 64
    storage = reserve((2 * apart,), torch.float16)
    strides = [3 * 2 * 2 * 16, 2 * 2 * 16, 2 * 16, 1]
    shape = [2, 3, 2, 16] if dim != 1 else [3, 2, 2, 16]
    shape[dim] = 2
    strides[dim] = apart
    key_cache = storage.as_strided(shape, strides)
    value_cache = storage.as_strided(shape, strides, 16)
    for block in range(shape[0]):
        key_cache[block], value_cache[block] = 0.0, 0.0
    blocks = list(range(shape[0]))[::-1]
    assert_same_as_in_low_blocks(call_on_blocks(key_cache, value_cache, blocks, 2))


def test_query_strides_of_more_than_2_to_the_31_bytes_are_followed() -> None:
    made = make_sequences([20], [2])
    case = place(made, Placement())
    want = case.run()
    storage = reserve((2**30 + 64,), torch.float32)
    for strides in ((2**30, 16, 1), (16, 2**30, 1)):
        query = storage.as_strided((2, 2, 16), strides)
        query.copy_(made.query)
        for a, b in zip(replace(case, query=query).run(), want, strict=True):
            assert same_bits(a, b)


# Layouts


@each_dtype
@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("query_layout", QUERY_LAYOUTS)
@pytest.mark.parametrize("query_lens", [[1, 1], [20, 3]])
def test_every_layout_is_read_in_place_with_the_same_bits(
    dtype: torch.dtype, cache_layout: str, query_layout: str, query_lens: list[int]
) -> None:
    made = make_sequences([20, 70], query_lens, num_heads=6, num_kv_heads=3, dtype=dtype)
    want = run(made)
    got = run(made, Placement(cache_layout=cache_layout, query_layout=query_layout))
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


@each_dtype
def test_latent_attention_reads_values_from_the_front_of_the_keys(dtype: torch.dtype) -> None:
    made = make_sequences([100, 30], [1, 30], num_heads=16, head_dim=576, dtype=dtype)
    made = replace(made, values=tuple(k[..., :512] for k in made.keys), head_dim_v=512)
    case = place(made, Placement(block_size=64))
    shared = replace(case, value_cache=case.key_cache[..., :512])
    output, lse = shared.run()
    assert_accurate(made, output, lse)
    for a, b in zip((output, lse), case.run(), strict=True):
        assert same_bits(a, b)


def test_expanded_caches_and_queries_are_read_in_place() -> None:
    """A stride of 0 is a stride: the same block, token or head, many times."""
    made = make_sequences([8], [3], num_heads=4, num_kv_heads=2)
    case = place(made, Placement(block_size=2))
    for dim in range(3):
        key_cache = case.key_cache.narrow(dim, 0, 1).nan_to_num().expand_as(case.key_cache)
        value_cache = case.value_cache.narrow(dim, 0, 1).nan_to_num().expand_as(case.value_cache)
        query = case.query[:1].expand(3, -1, -1) if dim == 0 else case.query[:, :1].expand(3, 4, -1)
        expanded = replace(case, key_cache=key_cache, value_cache=value_cache, query=query)
        copied = replace(
            case,
            key_cache=key_cache.contiguous(),
            value_cache=value_cache.contiguous(),
            query=query.contiguous(),
        )
        for a, b in zip(expanded.run(), copied.run(), strict=True):
            assert same_bits(a, b)


def test_the_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    made = make_sequences([5], num_heads=1, head_dim=1)
    case = place(made, Placement(block_size=8, spare_blocks=0))
    odd = replace(
        case,
        query=case.query.as_strided((1, 1, 1), (7, 5, 3)),
        key_cache=case.key_cache.as_strided((1, 8, 1, 1), (3, 1, 9, 4)),
        value_cache=case.value_cache.as_strided((1, 8, 1, 1), (3, 1, 9, 4)),
    )
    for a, b in zip(odd.run(), case.run(), strict=True):
        assert same_bits(a, b)


def test_index_tensors_may_be_strided() -> None:
    case = place(make_sequences([20, 30, 5], [2, 1, 3]), Placement(block_size=4))

    def every_other(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -7)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    strided = replace(
        case,
        block_tables=every_other(case.block_tables.t()).t(),
        seq_lens=every_other(case.seq_lens),
        query_start_loc=every_other(case.query_start_loc),
    )
    for a, b in zip(strided.run(), case.run(), strict=True):
        assert same_bits(a, b)


def test_strided_slopes_and_sinks_are_read_by_their_strides() -> None:
    made = make_sequences([20], [3], num_heads=4)
    slopes, sinks = torch.rand(4), torch.randn(4)
    want = run(made.with_options(alibi_slopes=slopes, sinks=sinks))
    strided = {"alibi_slopes": slopes.repeat_interleave(3)[::3], "sinks": sinks[:1].expand(4)}
    got = run(made.with_options(alibi_slopes=strided["alibi_slopes"], sinks=sinks))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    got = run(made.with_options(**strided))
    want = run(made.with_options(alibi_slopes=slopes, sinks=sinks[:1].repeat(4)))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@each_dtype
def test_a_strided_out_receives_the_rows_and_nothing_around_them_changes(
    dtype: torch.dtype,
) -> None:
    case = place(make_sequences([20, 5], [3, 1], num_heads=4, dtype=dtype), Placement())
    want, _ = case.run()
    larger = torch.full((6, 6, 18), 7.0, dtype=dtype)
    out = larger[1:5, 1:5, 1:17]
    torch.ops.paged.attention.out(*case.tensors, out=out)
    assert same_bits(out, want)
    out.fill_(7.0)
    assert larger.eq(7.0).all()


# Log of the denominator


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_is_the_natural_log_in_float32(dtype: torch.dtype) -> None:
    made = make_sequences([4096], [2], num_heads=4, head_dim=64, dtype=dtype)
    _, lse = check(made)
    assert lse.dtype == torch.float32


def test_a_prefix_and_a_suffix_merge_by_their_lse() -> None:
    made = make_sequences([4096 + 64], [64], num_heads=2, head_dim=64)
    prefix = replace(made, keys=(made.keys[0][:4096],), values=(made.values[0][:4096],))
    suffix = replace(made, keys=(made.keys[0][4096:],), values=(made.values[0][4096:],))
    states = (*run(prefix.with_options(causal=False)), *run(suffix))
    merged, merged_lse = torch.ops.paged.merge_states(*states)
    output, lse = run(made)
    assert relative_error(merged, output.double()) <= 1e-6
    assert relative_error(merged_lse, lse.double()) <= 1e-6


# Determinism, threads and memory


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_32_over_50_repeats(
    dtype: torch.dtype,
) -> None:
    made = make_sequences(
        [700 + 13 * i for i in range(32)], num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype
    )
    alone = place(made.select([0]), Placement())
    batch = place(made, Placement())
    output, lse = alone.run()
    for _ in range(50):
        for again, again_lse in (alone.run(), batch.run()):
            assert same_bits(again[:1], output)
            assert same_bits(again_lse[:1], lse)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_one_long_sequence_with_64_heads_is_the_same_for_every_number_of_threads(
    dtype: torch.dtype,
) -> None:
    made = make_sequences([8192], num_heads=64, head_dim=64, dtype=dtype)
    case = place(made, Placement())
    results = []
    for num_threads in (1, 2, 3, 17, 64):
        torch.set_num_threads(num_threads)
        results.append(case.run())
    assert_accurate(made, *results[0])
    assert all(same_bits(results[0][0], output) for output, _ in results)


def test_calls_from_several_threads_at_once_do_not_disturb_each_other() -> None:
    cases = [
        place(make_sequences([300 + i, 40], [1, 40], seed=i), Placement(seed=i)) for i in range(4)
    ]
    want = [case.run() for case in cases]

    def repeat(index: int) -> bool:
        return all(
            same_bits(a, b)
            for _ in range(30)
            for a, b in zip(cases[index].run(), want[index], strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


MEASURE_MEMORY = """
import resource, sys, torch, paged_ops
seq_len, query_len = 131072, int(sys.argv[1])
cache = torch.randn(seq_len // 128, 128, 1, 8)
arguments = (
    torch.randn(query_len, 8, 8), cache, cache,
    torch.arange(seq_len // 128, dtype=torch.int32).unsqueeze(0),
    torch.tensor([seq_len], dtype=torch.int32),
    torch.tensor([0, query_len], dtype=torch.int32),
)
short = (*arguments[:4], torch.tensor([64], dtype=torch.int32), arguments[5])
torch.ops.paged.attention(*short)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.ops.paged.attention(*arguments)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("query_len", [1, 64])
def test_a_long_context_needs_no_memory_for_queries_times_keys(query_len: int) -> None:
    command = [sys.executable, "-c", MEASURE_MEMORY, str(query_len)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    scores_in_kib = 131_072 * 8 * 64 * 4 // 1024
    assert int(result.stdout) < scores_in_kib // 16


# Every variant of the kernel


def check_this_variant() -> None:
    """Hold the ISA variant that this process chose against the reference; prints its name."""
    options = {
        "alibi_slopes": torch.linspace(0.01, 0.5, 8),
        "sinks": torch.linspace(-2.0, 2.0, 8),
        "softcap": 20.0,
        "sliding_window": 600,
    }
    for dtype in DTYPES:
        for head_dim in (33, 128, 576):
            for chosen in ({}, options):
                made = make_sequences(
                    [1, 33, 0, 700],
                    [1, 33, 1, 5],
                    num_heads=8,
                    num_kv_heads=2,
                    head_dim=head_dim,
                    dtype=dtype,
                    **chosen,
                )
                output, lse = check(made, Placement(garbage="mixed"))
                one_by_one = made.split_rows(lambda query_len: list(range(1, query_len)))
                decode, decode_lse = place(one_by_one, Placement(block_size=7)).as_decode().run()
                assert same_bits(output, decode)
                assert same_bits(lse, decode_lse)
    print(paged_ops.backend_info().cpu_isa)


@pytest.mark.parametrize("isa", paged_ops.backend_info().cpu_isas)
def test_every_variant_of_the_kernel_is_right_and_ignores_garbage(isa: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from tests.ops import test_attention as t; t.check_this_variant()"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PAGED_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    if result.stdout.strip() != isa:
        pytest.skip(f"this machine cannot run {isa}")


# The yardstick for half precision


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_within_twice_the_error_of_torch(dtype: torch.dtype) -> None:
    made = make_sequences([300, 64, 7], [1, 64, 7], num_heads=4, head_dim=64, dtype=dtype)
    output, lse = run(made)
    assert torch_error(made) > 0
    assert_within_bound(made, output, lse)


def test_the_reference_and_the_op_agree_in_float32_too() -> None:
    made = make_sequences([40, 9], [3, 9], softcap=4.0, sliding_window=11)
    case = place(made, Placement())
    want, want_lse = reference.attention_with_lse(*case.tensors, **case.options)
    output, lse = case.run()
    assert relative_error(output, want.double()) <= 4e-6
    assert relative_error(lse, want_lse.double()) <= 4e-6
