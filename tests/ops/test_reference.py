"""The reference against truths that share no code with it."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_ops import reference
from tests.support.checks import relative_error, visibility
from tests.support.online_attention import attention_by_blocks
from tests.support.quantisation import QUANTISATIONS, Quantisation
from tests.support.sequences import (
    CACHE_LAYOUTS,
    Placement,
    Sequences,
    exact,
    make_sequences,
    place,
)
from tests.support.strategies import placements, sequences
from tests.support.trees import tree_mask


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Keep its many small operations off the thread pool, which only slows them down."""
    torch.set_num_threads(1)


def float64(made: Sequences, placement: Placement | None = None) -> tuple[Tensor, Tensor]:
    case = place(made, placement or Placement())
    return reference.attention_with_lse(*case.tensors, **case.options)


def dense_attention(made: Sequences) -> tuple[Tensor, Tensor]:
    """Compute the whole score matrix of each sequence, and torch's softmax over all of it."""
    made = made.as_read()
    outputs = [made.query.new_zeros(0, made.query.shape[1], made.head_dim_v)]
    lses = [made.query.new_zeros(0, made.query.shape[1])]
    for i in range(len(made.keys)):
        logits = dense_logits(made, i)
        mask = visibility(made.query_lens[i], len(made.keys[i]), made.options)
        logits = logits.masked_fill(~mask, -math.inf)
        sinks = made.options.get("sinks")
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
            logits = torch.cat([logits, column], dim=2)
        weights = torch.softmax(logits, dim=2)[..., : len(made.keys[i])].nan_to_num()
        group = weights.shape[0] // made.num_kv_heads
        values = made.values[i].repeat_interleave(group, dim=1).transpose(0, 1)
        outputs.append((weights @ values).transpose(0, 1))
        lses.append(torch.logsumexp(logits, dim=2).transpose(0, 1))
    return torch.cat(outputs), torch.cat(lses)


def dense_logits(made: Sequences, i: int) -> Tensor:
    """Return the scores ``[num_heads, query_len, seq_len]`` before the mask."""
    query = made.query[made.rows(i)].transpose(0, 1)
    group = query.shape[0] // made.num_kv_heads
    keys = made.keys[i].repeat_interleave(group, dim=1).transpose(0, 1)
    scale = made.options.get("scale")
    logits = query @ keys.mT * (query.shape[2] ** -0.5 if scale is None else scale)
    softcap = made.options.get("softcap", 0.0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    slopes = made.options.get("alibi_slopes")
    if slopes is not None:
        position = torch.arange(query.shape[1]) + keys.shape[1] - query.shape[1]
        distance = torch.arange(keys.shape[1]) - position[:, None]
        logits = logits + slopes.double()[:, None, None] * distance
    return logits


def one_hot_positions(seq_len: int, query_len: int, **options: Any) -> Tensor:
    """Attend with equal scores and values that are one-hot in the position.

    Returns ``[query_len, seq_len]``: the weight of every key.
    """
    made = make_sequences(
        [seq_len], [query_len], num_heads=1, head_dim=8, head_dim_v=seq_len, dtype=torch.float64
    )
    values = torch.eye(seq_len, dtype=torch.float64).unsqueeze(1)
    made = Sequences(
        made.query, (query_len,), (torch.zeros_like(made.keys[0]),), (values,), 1, seq_len, options
    )
    output, _ = float64(made, Placement(block_size=2))
    return output[:, 0]


def test_the_examples_in_its_documentation_run() -> None:
    assert doctest.testmod(reference).failed == 0


@given(sequences(dtypes=(torch.float64,)), placements())
def test_it_equals_a_dense_softmax_with_an_explicit_mask(
    made: Sequences, placement: Placement
) -> None:
    output, lse = float64(made, placement)
    want, want_lse = dense_attention(made)
    torch.testing.assert_close(output, want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-11)


@given(sequences(dtypes=(torch.float64,), max_batch=2), placements())
def test_the_online_form_gives_the_same(made: Sequences, placement: Placement) -> None:
    case = place(made, placement)
    output, lse = attention_by_blocks(*case.tensors, **case.options)
    want, want_lse = reference.attention_with_lse(*case.tensors, **case.options)
    torch.testing.assert_close(output, want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (8, 1), (7, 7)])
@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_scaled_dot_product_attention(
    num_heads: int, num_kv_heads: int, causal: bool
) -> None:
    made = make_sequences(
        [37], [11], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=torch.float64
    ).with_options(causal=causal)
    mask = visibility(11, 37, {"causal": causal})
    want = scaled_dot_product_attention(
        made.query.transpose(0, 1),
        made.keys[0].repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1),
        made.values[0].repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1),
        attn_mask=mask,
    ).transpose(0, 1)
    torch.testing.assert_close(float64(made)[0], want)


def test_a_window_of_3_sees_exactly_3_keys_its_own_included() -> None:
    weights = one_hot_positions(6, 6, sliding_window=3)
    want = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 0],
            [0, 0, 0, 1, 1, 1],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(weights, want / want.sum(1, keepdim=True))


def test_a_window_of_1_sees_only_its_own_key() -> None:
    torch.testing.assert_close(
        one_hot_positions(4, 4, sliding_window=1), torch.eye(4, dtype=torch.float64)
    )


def test_without_causal_the_window_limits_only_how_far_back_a_query_sees() -> None:
    weights = one_hot_positions(5, 2, sliding_window=2, causal=False)
    want = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(weights, want / want.sum(1, keepdim=True))


def test_two_causal_queries_over_five_keys_are_aligned_at_the_end() -> None:
    weights = one_hot_positions(5, 2)
    want = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(weights, want / want.sum(1, keepdim=True))


def test_a_sink_of_log_n_halves_the_output_of_n_equal_keys() -> None:
    sink = torch.tensor([math.log(9)])
    assert one_hot_positions(9, 1, sinks=sink).sum().item() == pytest.approx(0.5)


def test_a_sink_is_neither_scaled_nor_capped() -> None:
    sink = torch.tensor([math.log(9)])
    weights = one_hot_positions(9, 1, sinks=sink, scale=7.0, softcap=1.0)
    assert weights.sum().item() == pytest.approx(0.5)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    made = make_sequences([5, 0], [2, 1], num_heads=1, dtype=torch.float64)
    with_sink = float64(made.with_options(sinks=torch.tensor([-math.inf])))
    without = float64(made)
    torch.testing.assert_close(with_sink, without)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_rows_without_keys_are_zero_with_lse_minus_infinity_or_the_sink(by_blocks: bool) -> None:
    function = attention_by_blocks if by_blocks else reference.attention_with_lse
    case = place(make_sequences([3, 0], [5, 1], num_heads=1), Placement(block_size=2))
    output, lse = function(*case.tensors)
    assert output[[0, 1, 5]].eq(0).all()
    assert lse[[0, 1, 5]].isneginf().all()
    assert output[2:5].ne(0).all()
    assert lse[2:5].isfinite().all()
    output, lse = function(*case.tensors, sinks=torch.tensor([0.75]))
    assert output[[0, 1, 5]].eq(0).all()
    assert lse[[0, 1, 5]].eq(0.75).all()


def test_softcap_comes_after_scale_and_before_alibi_and_mask() -> None:
    """Query 1, keys 40 and 80, scale 0.5, cap 10, slope 3: 20 and 40, capped, then -3 and 0."""
    made = Sequences(
        torch.ones(1, 1, 1, dtype=torch.float64),
        (1,),
        (torch.tensor([40.0, 80.0], dtype=torch.float64).view(2, 1, 1),),
        (torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1),),
        1,
        1,
        {"scale": 0.5, "softcap": 10.0, "alibi_slopes": torch.tensor([3.0])},
    )
    first, second = 10 * math.tanh(2) - 3, 10 * math.tanh(4)
    output, lse = float64(made)
    total = math.exp(first) + math.exp(second)
    assert output.item() == pytest.approx(math.exp(second) / total)
    assert lse.item() == pytest.approx(math.log(total))


def test_alibi_is_zero_at_the_query_itself() -> None:
    made = make_sequences([9], [4], num_heads=2, dtype=torch.float64, sliding_window=1)
    _, plain = float64(made)
    _, biased = float64(made.with_options(alibi_slopes=torch.tensor([0.5, 3.0])))
    assert torch.equal(plain, biased)


def test_alibi_falls_by_the_slope_for_each_position_of_distance() -> None:
    weights = one_hot_positions(4, 1, alibi_slopes=torch.tensor([0.5]))[0]
    torch.testing.assert_close(weights.log().diff(), torch.full((3,), 0.5, dtype=torch.float64))


@given(sequences(dtypes=(torch.float64,)), placements(), placements())
def test_garbage_and_placement_do_not_reach_the_output(
    made: Sequences, first: Placement, second: Placement
) -> None:
    a, b = float64(made, first), float64(made, second)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_float32_input_is_computed_in_float32_and_half_input_returns_half() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = place(make_sequences([20], [3], dtype=dtype), Placement())
        output, lse = reference.attention_with_lse(*case.tensors)
        assert (output.dtype, lse.dtype) == (dtype, torch.float32)
        wide, _ = float64(make_sequences([20], [3], dtype=dtype))
        assert relative_error(output, wide.double()) <= torch.finfo(dtype).eps


@given(st.integers(0, 2**16), st.integers(0, 40))
def test_merging_two_parts_of_the_keys_gives_the_whole(seed: int, cut: int) -> None:
    whole = make_sequences(
        [40], [3], num_heads=4, num_kv_heads=2, dtype=torch.float64, seed=seed, causal=False
    )
    parts = [
        Sequences(whole.query, (3,), (keys,), (values,), 2, 16, {"causal": False})
        for keys, values in (
            (whole.keys[0][:cut], whole.values[0][:cut]),
            (whole.keys[0][cut:], whole.values[0][cut:]),
        )
    ]
    merged = reference.merge_states(*float64(parts[0]), *float64(parts[1]))
    torch.testing.assert_close(merged, float64(whole))


def test_merging_ignores_what_an_empty_state_holds() -> None:
    nothing = torch.full((2, 1, 4), math.nan), torch.full((2, 1), -math.inf)
    state = torch.randn(2, 1, 4), torch.randn(2, 1)
    torch.testing.assert_close(reference.merge_states(*state, *nothing), state)
    torch.testing.assert_close(reference.merge_states(*nothing, *state), state)
    out, lse = reference.merge_states(*nothing, *nothing)
    assert out.eq(0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_what_is_written_comes_back_when_gathered(layout: str) -> None:
    made = make_sequences([7, 0, 13], num_heads=2, num_kv_heads=2, dtype=torch.float64)
    case = place(made, Placement(block_size=4, cache_layout=layout))
    key, value = torch.cat(made.keys), torch.cat(made.values)
    slots = [
        int(case.block_tables[i, position // 4]) * 4 + position % 4
        for i, length in enumerate(made.seq_lens)
        for position in range(length)
    ]
    for cache in (case.key_cache, case.value_cache):
        cache.fill_(math.nan)
    reference.write_kv(key, value, case.key_cache, case.value_cache, torch.tensor(slots))
    got = reference.gather_kv(
        case.key_cache, case.value_cache, case.block_tables, case.seq_lens, num_tokens=20
    )
    torch.testing.assert_close(got, (key, value), rtol=0, atol=0)


def test_gathering_refuses_a_wrong_number_of_tokens() -> None:
    cache, table = torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_tokens is 3"):
        reference.gather_kv(cache, cache, table, torch.tensor([2]), num_tokens=3)


def test_an_int8_cache_without_scales_is_refused() -> None:
    case = place(make_sequences([3], quantisation=Quantisation(torch.int8, "head")), Placement())
    with pytest.raises(ValueError, match="int8"):
        reference.attention(*case.tensors)


@pytest.mark.parametrize("store", QUANTISATIONS, ids=str)
def test_both_forms_read_quantised_caches_as_what_they_stand_for(store: Quantisation) -> None:
    made = make_sequences([21, 4], [3, 4], num_heads=4, num_kv_heads=2, quantisation=store)
    made = made.with_options(tree_mask=tree_mask([3, 4]))
    case = place(replace(made, query=made.query.double()), Placement(block_size=4))
    for form in (reference.attention_with_lse, attention_by_blocks):
        for got, want in zip(form(*case.tensors, **case.options), exact(made), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_copying_blocks_reads_before_it_writes_even_where_values_are_a_view_of_keys() -> None:
    key_cache = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 1, 1, 2)
    reference.copy_blocks(key_cache, key_cache[..., :1], torch.tensor([[0, 1], [1, 2], [2, 0]]))
    assert key_cache[:, 0, 0].tolist() == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0], [3.0, 3.0]]
