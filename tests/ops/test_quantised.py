"""Quantised caches: what write_kv stores, what the other ops make of it, and what is refused.

The properties of attention hold over quantised pools as over others, in
`test_attention_properties`; here is what only they have.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from paged_ops import reference
from tests.support.checks import assert_accurate, relative_error, same_bits
from tests.support.quantisation import CACHE_DTYPES, QUANTISATIONS, Quantisation
from tests.support.sequences import (
    DTYPES,
    Placement,
    Sequences,
    exact,
    make_caches,
    make_sequences,
    normal,
    place,
    run,
)
from tests.support.trees import tree_mask

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS = 6, 4, 3

each_store = pytest.mark.parametrize("store", QUANTISATIONS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def empty_pool(
    store: Quantisation, head_dim: int, head_dim_v: int, layout: str = "NHD"
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return caches of zeros and their scales, NaN where write_kv has to write them."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS)
    caches = make_caches(layout, shape, head_dim, head_dim_v, store.dtype)
    for cache in caches:
        cache.view(torch.uint8).zero_()
    if store.granularity == "none":
        return *caches, {}
    if store.granularity == "token":
        scales = torch.full((2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE), math.nan).transpose(2, 3)
    else:
        scales = torch.stack([store.fixed_scale(NUM_KV_HEADS)] * 2)
    return *caches, {"key_scale": scales[0], "value_scale": scales[1]}


def rows(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return new keys and values, with some rows of zeros and of large numbers."""
    num_tokens = NUM_BLOCKS * BLOCK_SIZE - 3
    key = normal((num_tokens, NUM_KV_HEADS, head_dim), dtype, seed)
    value = normal((num_tokens, NUM_KV_HEADS, head_dim_v), dtype, seed + 1)
    key[3], value[5, 1] = 0.0, 0.0
    key[7] *= 1000.0
    return key, value


def flat(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8).flatten(0, 1)


# write_kv


@each_store
@each_dtype
@pytest.mark.parametrize("head_dims", [(64, 64), (33, 47), (1, 130)], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND", "slice"])
def test_write_kv_stores_the_nearest_elements_and_its_own_scales(
    store: Quantisation, dtype: torch.dtype, head_dims: tuple[int, int], layout: str
) -> None:
    key, value = rows(dtype, *head_dims)
    key_cache, value_cache, scales = empty_pool(store, *head_dims, layout)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[: len(key)]
    fixed = {name: scale.clone() for name, scale in scales.items()}
    paged_ops.write_kv(key, value, key_cache, value_cache, slots, **scales)
    for cache, name, new in (
        (key_cache, "key_scale", key),
        (value_cache, "value_scale", value),
    ):
        elements, row_scales = store.stored(new)
        assert torch.equal(flat(cache)[slots], elements.view(torch.uint8))
        if store.granularity == "token":
            assert same_bits(scales[name].flatten(0, 1)[slots], row_scales)
        elif scales:
            assert same_bits(scales[name], fixed[name])
    missing = sorted(set(range(NUM_BLOCKS * BLOCK_SIZE)) - set(slots.tolist()))
    assert not flat(key_cache)[missing].any()
    assert not flat(value_cache)[missing].any()


@each_store
@each_dtype
def test_write_kv_and_gather_kv_equal_the_reference(
    store: Quantisation, dtype: torch.dtype
) -> None:
    key, value = rows(dtype, 20, 36)
    slots = torch.arange(len(key)).flip(0)
    slots[2] = -1
    pools = [empty_pool(store, 20, 36) for _ in range(2)]
    paged_ops.write_kv(key, value, *pools[0][:2], slots, **pools[0][2])
    reference.write_kv(key, value, *pools[1][:2], slots, **pools[1][2])
    for a, b in zip(pools[0][:2], pools[1][:2], strict=True):
        assert same_bits(a, b)
    for name, scale in pools[0][2].items():
        assert same_bits(scale, pools[1][2][name])
    table = torch.tensor([[4, 1, 2], [0, -9, 99]], dtype=torch.int32)
    lens = torch.tensor([11, 3], dtype=torch.int32)
    scales = {name: scale.nan_to_num(1.0) for name, scale in pools[0][2].items()}
    got = paged_ops.gather_kv(*pools[0][:2], table, lens, **scales)
    want = reference.gather_kv(*pools[1][:2], table, lens, **scales)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert same_bits(a, b)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_every_element_is_read_as_torch_reads_it(cache_dtype: torch.dtype) -> None:
    elements = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256).view(cache_dtype)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    one = torch.ones(())
    key, _ = paged_ops.gather_kv(elements, elements, table, lens, key_scale=one, value_scale=one)
    assert torch.equal(key.flatten().nan_to_num(1e9), elements.flatten().float().nan_to_num(1e9))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES[1:], ids=str)
def test_every_float16_becomes_the_float8_that_torch_makes_of_it(cache_dtype: torch.dtype) -> None:
    new = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(1, 1, -1)
    cache = torch.zeros(1, 1, 1, new.numel(), dtype=cache_dtype)
    paged_ops.write_kv(new, new, cache, cache.clone(), torch.tensor([0]))
    largest = torch.finfo(cache_dtype).max
    want = new.float().clamp(-largest, largest).to(cache_dtype)
    assert torch.equal(
        cache.float().nan_to_num(1e9).flatten(), want.float().nan_to_num(1e9).flatten()
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_a_row_that_is_not_finite_reads_as_nan_and_harms_no_other(
    cache_dtype: torch.dtype, bad: float
) -> None:
    store = Quantisation(cache_dtype, "token")
    key, value = rows(torch.float32, 24, 24)
    key_cache, value_cache, scales = empty_pool(store, 24, 24)
    key[4, 1, 7] = bad
    paged_ops.write_kv(key, value, key_cache, value_cache, torch.arange(len(key)), **scales)
    assert scales["key_scale"].flatten(0, 1)[4].isnan().tolist() == [False, True, False]
    assert not scales["value_scale"].flatten(0, 1)[: len(key)].isnan().any()


@pytest.mark.parametrize("granularity", ["head", "tensor"])
def test_what_a_fixed_scale_cannot_hold_becomes_the_largest_element(granularity: str) -> None:
    for cache_dtype in CACHE_DTYPES:
        store = Quantisation(cache_dtype, granularity)
        key_cache, value_cache, scales = empty_pool(store, 4, 4)
        key = torch.tensor([1e9, -1e9, math.inf, -math.inf]).expand(1, NUM_KV_HEADS, 4).contiguous()
        paged_ops.write_kv(key, key, key_cache, value_cache, torch.tensor([0]), **scales)
        low = -128.0 if cache_dtype == torch.int8 else -store.largest
        assert key_cache[0, 0, 0].float().tolist() == [store.largest, low, store.largest, low]


@each_store
def test_a_slot_given_twice_keeps_the_last_row_and_its_scale(store: Quantisation) -> None:
    key, value = rows(torch.bfloat16, 16, 16)
    key_cache, value_cache, scales = empty_pool(store, 16, 16)
    slots = torch.full((len(key),), 5)
    paged_ops.write_kv(key, value, key_cache, value_cache, slots, **scales)
    elements, row_scales = store.stored(key[-1:])
    assert torch.equal(flat(key_cache)[5], elements.view(torch.uint8)[0])
    if store.granularity == "token":
        assert same_bits(scales["key_scale"].flatten(0, 1)[5], row_scales[0])


# copy_blocks


@each_store
def test_copy_blocks_takes_the_scales_along(store: Quantisation) -> None:
    key, value = rows(torch.float32, 16, 24)
    key_cache, value_cache, scales = empty_pool(store, 16, 24)
    paged_ops.write_kv(key, value, key_cache, value_cache, torch.arange(len(key)), **scales)
    tensors = [key_cache.view(torch.uint8), value_cache.view(torch.uint8)]
    tensors += [s.view(torch.int32) for s in scales.values() if s.dim() == 3]
    want = [tensor.clone() for tensor in tensors]
    for tensor in want:
        tensor[[1, 0, 5]] = tensor[[0, 1, 2]].clone()
    mapping = torch.tensor([[0, 1], [1, 0], [2, 5]])
    paged_ops.copy_blocks(key_cache, value_cache, mapping, **scales)
    assert all(torch.equal(t, w) for t, w in zip(tensors, want, strict=True))


# Attention


def test_an_int8_cache_with_scales_of_max_over_127_is_within_two_percent() -> None:
    # Magnitude 4: a scale of 1 would leave a handful of steps.
    made = make_sequences([700], num_heads=4, num_kv_heads=2, head_dim=64)
    keys, values = (made.keys[0] * 4,), (made.values[0] * 4,)
    made = replace(made, query=made.query / 4, keys=keys, values=values)
    want, _ = exact(made)
    key_cache = torch.zeros(44, 16, 2, 64, dtype=torch.int8)
    value_cache = key_cache.clone()
    for scale in (
        {name: rows.abs().max() / 127 for name, rows in largest_rows(made)},
        {name: rows.abs().amax(dim=(0, 2)) / 127 for name, rows in largest_rows(made)},
        {name: torch.zeros(44, 16, 2) for name, _ in largest_rows(made)},
    ):
        slots = torch.arange(700)
        paged_ops.write_kv(made.keys[0], made.values[0], key_cache, value_cache, slots, **scale)
        table, lens = torch.arange(44, dtype=torch.int32)[None], torch.tensor([700]).int()
        output = paged_ops.attention(made.query, key_cache, value_cache, table, lens, **scale)
        assert relative_error(output, want) < 0.02


def largest_rows(made: Sequences) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    return ("key_scale", made.keys[0]), ("value_scale", made.values[0])


@each_store
@each_dtype
def test_decode_and_prefill_over_many_pieces_add_no_error_of_their_own(
    store: Quantisation, dtype: torch.dtype
) -> None:
    made = make_sequences(
        [1100, 37, 0, 530],
        [1, 37, 1, 40],
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        dtype=dtype,
        quantisation=store,
    )
    assert_accurate(made, *run(made, Placement(block_size=16, cache_layout="HND")))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "scale": {"scale": -0.3},
    "window": {"sliding_window": 20},
    "softcap": {"softcap": 1.5},
    "ALiBi": {"alibi_slopes": torch.linspace(0.01, 0.3, 6)},
    "sinks": {"sinks": torch.linspace(-2.0, 3.0, 6)},
    "tree": {"tree_mask": None},
    "tree and softcap, sinks": {
        "tree_mask": None,
        "softcap": 5.0,
        "sinks": torch.linspace(-2.0, 3.0, 6),
    },
    "tree and window": {"tree_mask": None, "sliding_window": 20},
    "tree and ALiBi": {"tree_mask": None, "alibi_slopes": torch.linspace(0.01, 0.3, 6)},
}
REFUSED = {"tree and window": "sliding_window", "tree and ALiBi": "alibi_slopes"}
PHASES = {
    "decode": ([700, 33, 1], [1, 1, 1]),
    "prefill": ([45, 1], [45, 1]),
    "chunk": ([600, 50], [20, 7]),
    "mixed": ([700, 40, 0, 60], [1, 40, 1, 9]),
}


@pytest.mark.parametrize("store", [None, *QUANTISATIONS], ids=str)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("option", OPTIONS)
@each_dtype
def test_each_option_is_honoured_or_refused_over_each_cache_in_each_phase(
    dtype: torch.dtype, option: str, phase: str, store: Quantisation | None
) -> None:
    seq_lens, query_lens = PHASES[phase]
    made = make_sequences(
        seq_lens,
        query_lens,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        dtype=dtype,
        quantisation=store,
        **OPTIONS[option],
    )
    if "tree_mask" in made.options:
        made = made.with_options(tree_mask=tree_mask(query_lens))
    case = place(made, Placement(block_size=8, cache_layout="HND"))
    if option in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[option]):
            case.run()
        return
    output, lse = case.run()
    assert_accurate(made, output, lse)
    # One query token sees the same with and without a mask over the new tokens.
    changes_nothing = option == "plain" or (phase == "decode" and option in ("not causal", "tree"))
    without, _ = run(replace(made, options={}))
    assert same_bits(without, output) == changes_nothing


@each_store
def test_scales_by_position_and_by_name_with_and_without_lse_give_the_same(
    store: Quantisation,
) -> None:
    made = make_sequences([70, 9], num_heads=4, num_kv_heads=2, quantisation=store)
    case = place(made, Placement())
    output, _ = case.run()
    assert same_bits(paged_ops.attention(*case.tensors, **case.options), output)
    out = torch.empty_like(output)
    paged_ops.attention(*case.tensors, **case.options, out=out)
    assert same_bits(out, output)
    assert same_bits(paged_ops.attention_with_lse(*case.tensors, **case.options)[0], output)


@given(
    st.sampled_from([q for q in QUANTISATIONS if q.granularity != "token"]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**16),
)
def test_one_scale_for_all_equals_the_same_scale_given_for_each_token(
    store: Quantisation, dtype: torch.dtype, seed: int
) -> None:
    made = make_sequences(
        [600, 31],
        [3, 1],
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        seed=seed,
        quantisation=store,
    )
    case = place(made, Placement(seed=seed))
    shape = case.key_cache.shape[:3]
    each = {
        name: case.options.get(name, torch.ones(())).expand(shape).contiguous()
        for name in ("key_scale", "value_scale")
    }
    for got, want in zip(case.run(**each), case.run(), strict=True):
        assert same_bits(got, want)


# Integer products: what can't be cut into digits, and how exact digits are


def int8_case(
    query_len: int, head_dim: int = 40, num_heads: int = 6
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return queries, caches with an index of one sequence of 70 tokens, and its scales."""
    query = normal((query_len, num_heads, head_dim), torch.float32, 1)
    caches = [
        torch.randint(-127, 128, (5, 16, 2, head_dim), dtype=torch.int8, generator=generator(i))
        for i in (2, 3)
    ]
    index = [
        torch.tensor([[3, 0, 4, 1, 2]], dtype=torch.int32),
        torch.tensor([70], dtype=torch.int32),
        torch.tensor([0, query_len], dtype=torch.int32),
    ]
    scales = {
        name: torch.rand(5, 16, 2, generator=generator(i)) / 64
        for i, name in enumerate(("key_scale", "value_scale"), 4)
    }
    return query, [*caches, *index], scales


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# An infinite scale of a key isn't here: it joins a dot product, of which it makes an infinity,
# where the reference sums infinities of both signs.
UNCUT = [
    *(("query", bad) for bad in (math.inf, -math.inf, math.nan)),
    *(("key_scale", bad) for bad in (math.nan, -0.02)),
    *(("value_scale", bad) for bad in (math.inf, -math.inf, math.nan, -0.02, -0.0)),
]


@pytest.mark.parametrize("query_len", [1, 3, 7, 50])
@pytest.mark.parametrize(("where", "bad"), UNCUT, ids=str)
def test_what_no_digits_can_hold_goes_through_the_arithmetic_as_usual(
    where: str, bad: float, query_len: int
) -> None:
    query, tensors, scales = int8_case(query_len)
    clean = paged_ops.attention_with_lse(query, *tensors, **scales)
    if where == "query":
        query[-1, 2, 5] = bad
    else:
        scales[where][2, 5, 0] = bad  # of the last token, head 0: the last row alone sees it
    output, lse = paged_ops.attention_with_lse(query, *tensors, **scales)
    want, want_lse = reference.attention_with_lse(query.double(), *tensors, **scales)
    torch.testing.assert_close(output.double(), want, rtol=0, atol=4e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=0, atol=4e-6, equal_nan=True)
    for got, before in zip((output, lse), clean, strict=True):
        assert same_bits(got[:-1], before[:-1])
        assert same_bits(got[-1, 3:], before[-1, 3:])


@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1.0, 1e15])
def test_queries_of_any_magnitude_lose_no_more_than_float32_does(magnitude: float) -> None:
    query, tensors, scales = int8_case(3, head_dim=200)
    query[0] *= torch.logspace(-6, 0, 200)  # magnitudes that differ within a row
    options = {**scales, "scale": 0.05 / magnitude}
    output, lse = paged_ops.attention_with_lse(query * magnitude, *tensors, **options)
    options["scale"] = 0.05
    want, want_lse = reference.attention_with_lse(query.double(), *tensors, **options)
    assert relative_error(output, want) <= 4e-6
    assert relative_error(lse, want_lse) <= 4e-6


@given(st.integers(0, 2**16), st.floats(-12.0, 12.0), st.sampled_from([1, 2, 5, 6, 17, 33]))
def test_many_light_keys_beside_a_heavy_one_are_not_lost(
    seed: int, lead: float, num_heads: int
) -> None:
    # All light keys have the same value, so that what each loses would add up.
    query = normal((1, num_heads, 32), torch.float32, seed)
    key_cache = torch.randint(-9, 10, (16, 32, 1, 32), dtype=torch.int8, generator=generator(seed))
    value_cache = torch.full((16, 32, 1, 32), 127, dtype=torch.int8)
    heavy = seed % 512
    query[..., 0], key_cache[..., 0] = lead, 0
    key_cache[heavy // 32, heavy % 32, 0, 0] = 127
    value_cache[heavy // 32, heavy % 32] = -3
    table, lens = torch.arange(16, dtype=torch.int32)[None], torch.tensor([512]).int()
    scales = {name: torch.tensor(1 / 127) for name in ("key_scale", "value_scale")}
    output = paged_ops.attention(query, key_cache, value_cache, table, lens, scale=1.0, **scales)
    want = reference.attention(
        query.double(), key_cache, value_cache, table, lens, scale=1.0, **scales
    )
    assert (output - want).abs().max() <= 4e-6  # of the largest value, 1


@pytest.mark.parametrize("num_heads", [1, 5, 6, 16, 17, 40])
def test_a_row_over_int8_has_the_same_bits_with_any_number_of_others(num_heads: int) -> None:
    query, tensors, scales = int8_case(1, head_dim=80, num_heads=2 * num_heads)
    output, lse = paged_ops.attention_with_lse(query, *tensors, **scales)
    for head in {0, num_heads - 1, num_heads}:
        mine = slice(head // num_heads, head // num_heads + 1)
        alone = [t[:, :, mine] for t in tensors[:2]] + tensors[2:]
        scale = {name: t[..., mine] for name, t in scales.items()}
        got = paged_ops.attention_with_lse(query[:, head : head + 1], *alone, **scale)
        assert same_bits(got[0], output[:, head : head + 1])
        assert same_bits(got[1], lse[:, head : head + 1])


# Multi-head latent attention: V is the begin of each row of K


def latent_pool(store: Quantisation, tokens: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return a pool of latent rows, its scales, and the rows as attention reads them."""
    latent = normal((tokens, 1, 576), torch.bfloat16, 3)
    cache = torch.zeros(-(-tokens // 16), 16, 1, 576, dtype=store.dtype)
    scales = {}
    if store.granularity != "none":
        scale = store.fixed_scale(1)
        if store.granularity == "token":
            scale = torch.full(cache.shape[:3], math.nan)
        scales = {"key_scale": scale, "value_scale": scale}
    paged_ops.write_kv(
        latent, latent[..., :512], cache, cache[..., :512], torch.arange(tokens), **scales
    )
    return cache, scales, store.as_read(latent)


@each_store
@pytest.mark.parametrize("num_heads", [16, 128])
def test_latent_rows_are_written_once_and_serve_keys_and_values(
    store: Quantisation, num_heads: int
) -> None:
    cache, scales, latent = latent_pool(store, 600)
    query = normal((2, num_heads, 576), torch.bfloat16, 5, 0.2)
    table = torch.arange(len(cache), dtype=torch.int32).expand(2, -1)
    lens = torch.tensor([600, 530], dtype=torch.int32)
    output, lse = paged_ops.attention_with_lse(
        query, cache, cache[..., :512], table, lens, **scales
    )
    for i, length in enumerate(lens.tolist()):
        scores = query[i].double() @ latent[:length, 0].T * 576**-0.5
        want = scores.softmax(1) @ latent[:length, 0, :512]
        assert relative_error(output[i], want) <= 2**-8
        assert relative_error(lse[i], scores.logsumexp(1)) <= 2e-6


def test_a_latent_row_is_refused_where_it_would_be_written_twice() -> None:
    store = Quantisation(torch.int8, "token")
    cache, scales, _ = latent_pool(store, 20)
    before = cache.clone(), scales["key_scale"].clone()
    latent = normal((1, 1, 576), torch.bfloat16, 0)
    slots = torch.tensor([0])
    other = {**scales, "value_scale": scales["key_scale"].clone()}
    for value, value_cache, given_scales, what in (
        (latent[..., :512].clone(), cache[..., :512], scales, "value is no view of key"),
        (latent[..., 64:], cache[..., 64:], scales, "value_cache starts within"),
        (latent[..., :512], cache[..., :512], other, "value_scale is another tensor"),
    ):
        with pytest.raises(RuntimeError, match=what):
            paged_ops.write_kv(latent, value, cache, value_cache, slots, **given_scales)
    assert same_bits(cache, before[0])
    assert same_bits(scales["key_scale"], before[1])
