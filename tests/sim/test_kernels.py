"""The Ascend kernels on simulated cores: values, rules, counters, and the bits of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_ops import reference
from tests.sim import counting, kernel_calls
from tests.sim.cases import CASES, Case, make_case
from tests.sim.cost import measure
from tests.sim.scalar import count_case, standard_case
from tests.sim.tiling import AttentionTilingData

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half an ulp of the largest output, and the error of the float32 arithmetic itself.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2.0**-11 + 3e-6, torch.bfloat16: 2.0**-8 + 3e-6}
KERNELS = [(dtype, "vector") for dtype in DTYPES] + [(dtype, "mixed") for dtype in DTYPES[1:]]
each_kernel = pytest.mark.parametrize("wanted", ["vector", "mixed"])
# Longer than the pieces of both kernels, with rows that see no key, and one token.
LONG = {"seq_lens": [2100, 20, 0, 1030], "query_lens": [2, 1, 1, 3], "sinks": True}


def run(case: Case, **how: Any) -> kernel_calls.AttentionRun:
    result = kernel_calls.attention(*case.tensors, **case.options, **how)
    assert result.result.violations == ()
    return result


def in_float64(case: Case) -> tuple[Tensor, Tensor]:
    query, key_cache, value_cache, *rest = case.tensors
    return reference.attention_with_lse(
        query.double(), key_cache.double(), value_cache.double(), *rest, **case.options
    )


def assert_close(result: kernel_calls.AttentionRun, expected: tuple[Tensor, Tensor]) -> None:
    output, lse = expected
    error = (result.output.double() - output).abs().max()
    # The cube takes weights of the caches' dtype: they are rounded, as the output is.
    roundings = 2 if result.kernel == "mixed" else 1
    assert error <= roundings * TOLERANCE[result.output.dtype] * max(output.abs().max(), 1e-3)
    finite = torch.isfinite(lse)
    assert torch.equal(torch.isfinite(result.lse), finite)
    assert torch.allclose(result.lse.double()[finite], lse.double()[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "wanted"), KERNELS, ids=str)
def test_attention_is_the_reference_and_keeps_the_rules(
    dtype: torch.dtype, wanted: str, name: str
) -> None:
    case = make_case(dtype, **CASES[name])
    result = run(case, wanted=wanted)
    assert result.kernel == wanted
    assert_close(result, in_float64(case))


@each_kernel
@pytest.mark.parametrize("name", ["prefill", "mixed", "decode, ragged"])
def test_attention_without_lse_gives_the_same_bits(name: str, wanted: str) -> None:
    case = make_case(torch.float16, **CASES[name])
    without = run(case, wanted=wanted, with_lse=False)
    assert torch.equal(without.output, run(case, wanted=wanted).output)


@settings(max_examples=40)
@given(
    kernel=st.sampled_from(KERNELS),
    lengths=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 20)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 192, 256]),
    head_dim_v=st.sampled_from([16, 64, 112, 128]),
    block_size=st.sampled_from([1, 5, 16, 32, 128]),
    causal=st.booleans(),
    sliding_window=st.sampled_from([None, 1, 20, 600]),
    softcap=st.sampled_from([0.0, 5.0]),
    sinks=st.sampled_from([None, True]),
    alibi_slopes=st.sampled_from([None, True]),
    cores=st.sampled_from([3, 40, 48]),
    seed=st.integers(0, 2**16),
)
def test_any_call_is_the_reference_whatever_the_order_of_the_cores(
    kernel: tuple[torch.dtype, str],
    lengths: list[tuple[int, int]],
    cores: int,
    seed: int,
    **shape: Any,
) -> None:
    dtype, wanted = kernel
    seq_lens = [length for length, _ in lengths]
    query_lens = [new for _, new in lengths]
    if sum(query_lens) == 0:
        query_lens[0] = 1
    case = make_case(dtype, seq_lens=seq_lens, query_lens=query_lens, seed=seed, **shape)
    assert_close(run(case, cores=cores, seed=seed, wanted=wanted), in_float64(case))


@each_kernel
@pytest.mark.parametrize("name", ["decode, ragged", "mixed", "all options"])
def test_the_order_of_the_cores_and_their_number_change_no_bit(name: str, wanted: str) -> None:
    case = make_case(torch.float16, **CASES[name])
    first = run(case, wanted=wanted)
    for seed, cores in ((1, 48), (2, 48), (3, 40), (4, 5), (5, 1)):
        again = run(case, seed=seed, cores=cores, wanted=wanted)
        assert torch.equal(first.output, again.output)
        assert torch.equal(first.lse, again.lse)


@each_kernel
@pytest.mark.parametrize("kind", [CASES["window past the first piece"], LONG])
def test_states_folded_in_a_core_and_through_the_workspace_give_the_same_bits(
    kind: dict[str, Any], wanted: str
) -> None:
    def whole(tiling: AttentionTilingData) -> None:
        tiling.split = 0

    case = make_case(torch.float16, **kind)
    split = run(case, wanted=wanted)
    assert split.tiling.split == 1
    assert torch.equal(split.output, run(case, adjust=whole, wanted=wanted).output)


@each_kernel
def test_a_row_has_the_same_bits_in_decode_and_in_prefill(wanted: str) -> None:
    case = make_case(torch.float16, seq_lens=[130], query_lens=[130])
    prefill = run(case, wanted=wanted)
    decode = kernel_calls.attention(case.query[-1:], *case.tensors[1:-1], wanted=wanted)
    assert torch.equal(prefill.output[-1:], decode.output)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("long", [False, True])
def test_a_value_that_a_row_does_not_see_changes_no_bit_of_it_on_the_cube(
    poison: float, window: int | None, long: bool
) -> None:
    lengths = {"seq_lens": [1100], "query_lens": [8]} if long else {"seq_lens": [70, 30]}
    lengths.setdefault("query_lens", [60, 30])
    case = make_case(torch.float16, sliding_window=window, **lengths)
    clean = run(case, wanted="mixed")
    length, new = lengths["seq_lens"][0], lengths["query_lens"][0]
    position = length - new // 2
    case.value_cache[case.block_tables[0, position // 16], position % 16] = poison
    poisoned = run(case, wanted="mixed")
    first = new - new // 2  # the first token that sees it
    last = new if window is None else min(new, first + window)
    others = [t for t in range(len(clean.output)) if not first <= t < last]
    assert torch.equal(clean.output[others], poisoned.output[others])
    assert not poisoned.output[first:last].isfinite().any()


# Pieces spread over the groups; and whole units, with more scores than stay in UB.
@pytest.mark.parametrize(
    ("kind", "split"), [(LONG, 1), ({"seq_lens": [1060], "query_lens": [70]}, 0)]
)
def test_a_hundred_orders_of_the_cores_break_no_rule_and_change_no_bit(
    kind: dict[str, Any], split: int
) -> None:
    case = make_case(torch.float16, num_kv_heads=1, head_dim=32, **kind)
    first = run(case, wanted="mixed")
    assert first.tiling.split == split
    for seed in range(1, 101):
        assert torch.equal(run(case, wanted="mixed", seed=seed).output, first.output)


# More scores than stay in a vector core, with each number of buffers for them.
@pytest.mark.parametrize(
    ("buffers", "kind"),
    [
        (7, {"query_lens": [70, 30]}),
        (6, {"query_lens": [70, 30], "head_dim": 128, "alibi_slopes": True}),
        (5, {"head_dim_v": 512, "alibi_slopes": True}),
    ],
)
def test_scores_that_do_not_stay_are_read_again_and_change_no_bit(
    buffers: int, kind: dict[str, Any]
) -> None:
    # Some rows see nothing of the second piece.
    case = make_case(torch.float16, seq_lens=[1060, 30], num_kv_heads=1, **kind)
    first = run(case, wanted="mixed")
    assert first.tiling.chunk_buffers == buffers
    assert_close(first, in_float64(case))
    for seed, cores in ((1, 2), (2, 4), (3, 48)):
        assert torch.equal(run(case, wanted="mixed", seed=seed, cores=cores).output, first.output)
    last = [0, -1] if case.query_start_loc is None else case.query_start_loc[1:] - 1
    decode = kernel_calls.attention(
        case.query[last], *case.tensors[1:-1], **case.options, wanted="mixed"
    )
    assert torch.equal(decode.output, first.output[last])


# The keys of a unit's bands meet in one piece, begin in the midst of one, and differ at both ends.
@pytest.mark.parametrize(
    "kind",
    [
        {"seq_lens": [1100], "query_lens": [540]},
        {"seq_lens": [700], "query_lens": [600], "sliding_window": 350, "block_size": 24},
        {"seq_lens": [540], "query_lens": [540], "layout": "HND", "causal": False},
    ],
)
def test_two_bands_of_a_unit_have_the_bits_of_units_of_their_own(kind: dict[str, Any]) -> None:
    def apart(tiling: AttentionTilingData) -> None:
        tiling.unit_rows = tiling.max_rows
        tiling.per_unit.multiplier = 2**31 // tiling.max_rows + 1
        tiling.per_unit.shift = 31

    case = make_case(torch.float16, num_kv_heads=1, group=4, head_dim=128, **kind)
    together = run(case, wanted="mixed", cores=2)
    assert together.tiling.unit_rows == 2 * together.tiling.max_rows
    assert_close(together, in_float64(case))
    alone = run(case, wanted="mixed", cores=2, adjust=apart)
    assert torch.equal(together.output, alone.output)
    assert torch.equal(together.lse, alone.lse)
    for name in ("key_cache", "value_cache"):
        read = together.result.counters.traffic[name].read_bytes
        assert read <= 0.6 * alone.result.counters.traffic[name].read_bytes


# Whole tiles and cut ones, blocks that hold tiles and others, rows of the usual width and narrower.
@pytest.mark.parametrize(
    "kind",
    [
        {"seq_lens": [700, 45, 0], "head_dim": 128, "block_size": 128},
        {"seq_lens": [530, 45], "head_dim": 64, "block_size": 24, "sliding_window": 300},
    ],
)
def test_dense_tiles_give_the_bits_of_rows_of_fractals(kind: dict[str, Any]) -> None:
    def in_fractals(tiling: AttentionTilingData) -> None:
        tiling.dense_tiles = 0

    case = make_case(torch.float16, num_kv_heads=1, group=4, layout="HND", **kind)
    dense = run(case, wanted="mixed", cores=2)
    assert dense.tiling.dense_tiles == 1
    assert_close(dense, in_float64(case))
    rows = run(case, wanted="mixed", cores=2, adjust=in_fractals)
    assert torch.equal(dense.output, rows.output)
    assert torch.equal(dense.lse, rows.lse)


@each_kernel
def test_a_sink_that_is_no_number_spoils_the_rows_that_have_weights(wanted: str) -> None:
    case = make_case(torch.float16, seq_lens=[0, 5, 300], sinks=True)
    case.options["sinks"][0] = torch.nan
    result = run(case, wanted=wanted)
    output, lse = in_float64(case)
    assert torch.allclose(result.output.double(), output, atol=2e-3, equal_nan=True)
    assert torch.allclose(result.lse.double(), lse.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_value_between_the_bands_of_a_unit_changes_no_bit_of_the_first_one() -> None:
    # The tokens of a band of 128 rows are 2, so one is whole rows: nothing else tells of them.
    case = make_case(
        torch.float16, seq_lens=[40], query_lens=[40], num_kv_heads=1, group=64, head_dim=64
    )
    clean = run(case, wanted="mixed", cores=2)
    assert clean.tiling.unit_rows == 2 * clean.tiling.max_rows
    case.value_cache[case.block_tables[0, 1], 6] = torch.nan  # key 22, which token 22 sees first
    poisoned = run(case, wanted="mixed", cores=2)
    assert torch.equal(clean.output[:22], poisoned.output[:22])
    assert poisoned.output[22:].isnan().all()


@each_kernel
def test_two_launches_with_one_tiling_follow_lengths_and_tables_changed_in_place(
    wanted: str,
) -> None:
    case = make_case(torch.float16, seq_lens=[600, 40])
    run(case, wanted=wanted)
    case.seq_lens.copy_(torch.tensor([30, 600]))
    case.block_tables.copy_(case.block_tables.flip(0))
    case.block_tables[1, :3] = case.block_tables[1, :3].flip(0)
    assert_close(run(case, wanted=wanted), in_float64(case))


@each_kernel
@pytest.mark.parametrize("bad", [-1, 2**31 - 1, -(2**31)])
def test_no_table_or_length_makes_the_kernel_read_outside_the_cache(bad: int, wanted: str) -> None:
    case = make_case(torch.float16, seq_lens=[600, 40], query_lens=[2, 3])
    case.block_tables.fill_(bad)
    run(case, wanted=wanted)
    case.seq_lens.fill_(bad)
    run(case, wanted=wanted)
    case.query_start_loc[1] = bad
    run(case, wanted=wanted)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 32), (32, 8)])
def test_decode_reads_each_key_and_value_once_and_spreads_the_work(
    num_heads: int, num_kv_heads: int
) -> None:
    group = num_heads // num_kv_heads
    case = make_case(
        torch.float16, seq_lens=[2048] * 16, num_kv_heads=num_kv_heads, group=group, head_dim=128
    )
    counters = run(case, wanted="vector").result.counters
    least = 2 * 16 * 2048 * num_kv_heads * 128 * 2
    assert counters.total.gm_read_bytes <= 1.05 * least
    busiest = max(core.total_cycles for core in counters.cores)
    assert busiest * len(counters.cores) <= 1.10 * sum(c.total_cycles for c in counters.cores)
    if group == 1:
        assert min(core.busy_share("MTE2") for core in counters.cores) >= 0.85


def test_decode_on_the_cube_reads_keys_and_values_once_and_overlaps_its_work() -> None:
    counters = measure("decode-16x2048")
    least = 16 * 2048 * 8 * 128 * 2
    for name in ("key_cache", "value_cache"):
        assert counters.traffic[name].read_bytes <= 1.05 * least
    busiest = max(core.work() for core in counters.cores)
    assert counters.total_cycles <= 1.25 * busiest


def test_prefill_keeps_the_cube_busy_as_far_as_the_scalar_units_let_it() -> None:
    counters = measure("prefill-2048")
    cubes = counters.of_kind(cube=True)
    busy = sum(core.busy_cycles["M"] for core in cubes) / len(cubes)
    # Half of the time: the vector cores' scalar units have most to do.
    assert busy >= 0.47 * counters.total_cycles
    # Units of two bands bring keys and values into L1 once for both.
    for name in ("key_cache", "value_cache"):
        assert counters.traffic[name].read_bytes <= 17 * 2048 * 8 * 128 * 2


# What the scalar units do by themselves bounds a call's time: instructions of a core at most, a
# tenth above what g++ 12 makes of the sources.
@pytest.mark.skipif(not counting.is_possible(), reason="the counters are for x86-64")
@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("prefill-2048", {"cube": 112_000, "vector": 281_000}),
        ("decode-16x2048", {"cube": 47_000, "vector": 55_000}),
    ],
)
def test_a_core_executes_few_scalar_instructions(call: str, most: dict[str, int]) -> None:
    for kind, cores in count_case(standard_case(call)).items():
        assert max(core.instructions for core in cores) <= most[kind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("head_dim", [8, 100, 128])
def test_write_kv_is_the_reference(
    dtype: torch.dtype, slot_dtype: torch.dtype, head_dim: int
) -> None:
    key, value = torch.randn(40, 3, head_dim).to(dtype), torch.randn(40, 3, 72).to(dtype)
    key_cache, value_cache = torch.zeros(9, 16, 3, head_dim), torch.zeros(9, 16, 3, 72)
    caches = [key_cache.to(dtype), value_cache.to(dtype)]
    slots = torch.randperm(9 * 16)[:40].to(slot_dtype)
    slots[3] = -1
    slots[7] = slots[5]
    expected = [cache.clone() for cache in caches]
    reference.write_kv(key, value, *expected, slots)
    result = kernel_calls.write_kv(key, value, *caches, slots, seed=1)
    assert result.violations == ()
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_blocks_reads_every_block_before_it_writes_one(dtype: torch.dtype) -> None:
    caches = [torch.randn(9, 16, 3, 64).to(dtype), torch.randn(9, 16, 3, 40).to(dtype)]
    mapping = torch.tensor([[0, 1], [1, 2], [5, 6], [6, 5], [8, 8], [3, 4]])
    expected = [cache.clone() for cache in caches]
    reference.copy_blocks(*expected, mapping)
    result = kernel_calls.copy_blocks(*caches, mapping, seed=3)
    assert result.violations == ()
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states_is_the_reference(dtype: torch.dtype) -> None:
    outs = [torch.randn(5, 19, 80).to(dtype) for _ in range(2)]
    lses = [3 * torch.randn(5, 19) for _ in range(2)]
    lses[0][0, :7] = lses[1][0, 5:9] = -torch.inf
    outs[0][0, :7] = torch.nan
    out, lse, result = kernel_calls.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert result.violations == ()
    wide = [tensor.double() for tensor in outs]
    expected, expected_lse = reference.merge_states(wide[0], lses[0], wide[1], lses[1])
    error = (out.double() - expected).abs().max()
    assert error <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.allclose(lse, expected_lse.float(), rtol=1e-6, atol=1e-6)
