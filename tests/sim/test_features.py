"""int8 caches, tree masks, latent caches and gather_kv on simulated vector cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_ops import reference
from tests.sim import kernel_calls
from tests.sim.cases import CASES, Case, make_case, quantised
from tests.support.checks import same_bits
from tests.support.trees import tree_mask

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half an ulp of the largest output, and the error of the float32 arithmetic itself.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2.0**-11 + 3e-6, torch.bfloat16: 2.0**-8 + 3e-6}
GRANULARITIES = ["token", "token, heads dense", "head", "tensor"]


def run(case: Case, **how: Any) -> kernel_calls.AttentionRun:
    result = kernel_calls.attention(*case.tensors, **case.options, **how)
    assert result.result.violations == ()
    assert result.kernel == "vector"
    return result


def in_float64(case: Case) -> tuple[Tensor, Tensor]:
    query, *rest = case.tensors
    if case.key_cache.dtype != torch.int8:
        rest[:2] = [cache.double() for cache in rest[:2]]
    return reference.attention_with_lse(query.double(), *rest, **case.options)


def assert_close(result: kernel_calls.AttentionRun, expected: tuple[Tensor, Tensor]) -> None:
    output, lse = expected
    error = (result.output.double() - output).abs().max()
    assert error <= TOLERANCE[result.output.dtype] * max(output.abs().max(), 1e-3)
    finite = torch.isfinite(lse)
    assert torch.equal(torch.isfinite(result.lse), finite)
    assert torch.allclose(result.lse.double()[finite], lse.double()[finite], rtol=1e-5, atol=1e-5)


# int8 caches


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_int8_is_the_reference_and_keeps_the_rules(
    dtype: torch.dtype, name: str
) -> None:
    case = quantised(make_case(dtype, **CASES[name]), "token")
    assert_close(run(case), in_float64(case))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["decode, ragged", "window", "mixed", "block 3", "several tokens"])
def test_scales_of_every_granularity_and_stride_are_read(name: str, granularity: str) -> None:
    case = quantised(make_case(torch.float16, **CASES[name]), granularity)
    assert_close(run(case), in_float64(case))


@pytest.mark.parametrize("granularity", ["head", "tensor"])
def test_one_scale_gives_the_bits_of_the_same_scale_for_each_token(granularity: str) -> None:
    case = quantised(make_case(torch.float16, **CASES["mixed"]), granularity)
    shape = case.key_cache.shape[:3]
    scales = {
        name: case.options[name].expand(shape).contiguous() for name in ("key_scale", "value_scale")
    }
    each = replace(case, options=case.options | scales)
    for got, want in zip(outputs(run(each)), outputs(run(case)), strict=True):
        assert same_bits(got, want)


def outputs(result: kernel_calls.AttentionRun) -> tuple[Tensor, Tensor]:
    return result.output, result.lse


def test_a_scale_that_is_not_a_number_spoils_no_row_that_does_not_see_it() -> None:
    case = quantised(make_case(torch.float16, seq_lens=[90], query_lens=[40]), "token")
    clean = run(case)
    block = case.block_tables[0, 70 // 16]
    for name in ("key_scale", "value_scale"):
        case.options[name][block, 70 % 16] = torch.nan
    output = run(case).output
    assert same_bits(output[:20], clean.output[:20])
    assert output[20:].isnan().all()


# Tree masks


def with_tree(case: Case, seed: int = 0) -> Case:
    """Return the case with a random tree over the new tokens of each sequence."""
    starts = case.query_start_loc
    lengths = [1] * len(case.seq_lens) if starts is None else starts.diff().tolist()
    return replace(case, options=case.options | {"tree_mask": tree_mask(lengths, seed)})


@pytest.mark.parametrize("store", ["plain", "int8"])
@pytest.mark.parametrize(
    "kind",
    [
        # A tree of one tile, of many, of several in bands, and one without context.
        {"seq_lens": [530, 33, 70], "query_lens": [9, 33, 1]},
        {"seq_lens": [700], "query_lens": [160], "num_kv_heads": 1},
        {"seq_lens": [600, 40], "query_lens": [37, 40], "group": 5, "causal": False},
        {"seq_lens": [20, 5], "query_lens": [25, 0], "softcap": 3.0, "sinks": True},
        {"seq_lens": [70], "query_lens": [20], "head_dim": 256, "num_kv_heads": 1},
    ],
)
def test_a_tree_is_the_reference_and_keeps_the_rules(kind: dict[str, Any], store: str) -> None:
    for seed, dtype in enumerate(DTYPES):
        case = with_tree(make_case(dtype, seed=seed, **kind), seed)
        if store == "int8":
            case = quantised(case, "token")
        assert_close(run(case), in_float64(case))


def test_what_the_tree_hides_changes_no_bit_whatever_it_holds() -> None:
    made = with_tree(make_case(torch.float16, seq_lens=[600], query_lens=[40], causal=False))
    clean = run(made)
    for token in (3, 21):
        sees = made.options["tree_mask"][:, token]
        slot = (made.block_tables[0, (560 + token) // 16], (560 + token) % 16)
        keys, values = made.key_cache.clone(), made.value_cache.clone()
        keys[slot], values[slot] = torch.nan, torch.inf
        poisoned = run(replace(made, key_cache=keys, value_cache=values)).output
        assert same_bits(poisoned[~sees], clean.output[~sees])
        assert not poisoned[sees].isfinite().any()


def test_the_triangle_is_the_causal_mask_bit_by_bit() -> None:
    case = make_case(torch.float32, seq_lens=[600, 40], query_lens=[40, 40], head_dim=32)
    mask = torch.ones(40, 40, dtype=torch.bool).tril().repeat(2, 1)
    for causal in (True, False):
        tree = replace(case, options={"tree_mask": mask, "causal": causal})
        for got, want in zip(outputs(run(tree)), outputs(run(case)), strict=True):
            assert same_bits(got, want)


def test_a_row_under_a_tree_has_the_same_bits_in_any_batch_on_any_cores() -> None:
    case = with_tree(make_case(torch.float16, seq_lens=[1100, 50], query_lens=[33, 50]))
    both = run(case)
    for seed, cores in ((1, 48), (2, 5), (3, 1)):
        assert same_bits(run(case, seed=seed, cores=cores).output, both.output)
    alone = Case(
        case.query[:33],
        case.key_cache,
        case.value_cache,
        case.block_tables[:1],
        case.seq_lens[:1],
        case.query_start_loc[:2],
        {"tree_mask": case.options["tree_mask"][:33, :33].contiguous()},
    )
    assert same_bits(run(alone).output, both.output[:33])


@pytest.mark.parametrize("columns", [1, 30, 64])
def test_no_mask_with_too_few_columns_is_read_outside_itself(columns: int) -> None:
    case = make_case(torch.float16, seq_lens=[600, 130], query_lens=[70, 130])
    mask = torch.ones(200, columns, dtype=torch.bool)
    run(replace(case, options={"tree_mask": mask}))
    case.seq_lens.fill_(2**31 - 1)
    case.query_start_loc[1] = -5
    run(replace(case, options={"tree_mask": mask}))


# Multi-head latent attention: V is the begin of each row of K


@pytest.mark.parametrize(
    ("dtype", "store", "head_dim", "head_dim_v"),
    [
        (torch.float32, "plain", 80, 64),
        (torch.float16, "plain", 576, 512),
        (torch.bfloat16, "int8", 576, 512),
        (torch.float16, "int8", 64, 64),
    ],
)
def test_latent_rows_serve_as_keys_and_values_and_come_in_once(
    dtype: torch.dtype, store: str, head_dim: int, head_dim_v: int
) -> None:
    kind = {"seq_lens": [600, 33], "num_kv_heads": 1, "group": 16, "head_dim": head_dim}
    made = make_case(dtype, **kind)
    if store == "int8":
        made = quantised(made, "token")
        made.options["value_scale"] = made.options["key_scale"]
    latent = replace(made, value_cache=made.key_cache[..., :head_dim_v])
    result = run(latent, wanted="vector")
    assert result.tiling.values_are_keys == 1
    assert_close(result, in_float64(latent))
    read = result.result.counters.traffic["key_cache"].read_bytes
    bands = 16 // result.tiling.max_rows
    assert read == bands * 633 * head_dim * made.key_cache.element_size()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_latent_row_gives_the_bits_of_two_caches(dtype: torch.dtype) -> None:
    made = make_case(dtype, seq_lens=[600, 33], query_lens=[3, 33], num_kv_heads=1)
    latent = replace(made, value_cache=made.key_cache[..., :32])
    apart = replace(made, value_cache=made.key_cache[..., :32].contiguous())
    for got, want in zip(
        outputs(run(latent, wanted="vector")), outputs(run(apart, wanted="vector")), strict=True
    ):
        assert same_bits(got, want)


# gather_kv


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["block 3", "mixed", "strided cache, block 32"])
def test_gather_kv_is_the_reference(dtype: torch.dtype, kind: str) -> None:
    case = make_case(torch.float32 if dtype == torch.int8 else dtype, **CASES[kind])
    granularities = GRANULARITIES if dtype == torch.int8 else ["none"]
    for granularity in granularities:
        made = quantised(case, granularity) if dtype == torch.int8 else case
        scales = {name: made.options[name] for name in made.options if name.endswith("_scale")}
        arguments = (made.key_cache, made.value_cache, made.block_tables, made.seq_lens)
        want = reference.gather_kv(*arguments, **scales)
        for seed, cores in ((1, 48), (2, 3)):
            key, value, result = kernel_calls.gather_kv(
                *arguments, num_tokens=int(made.seq_lens.sum()), **scales, seed=seed, cores=cores
            )
            assert result.violations == ()
            assert same_bits(key, want[0])
            assert same_bits(value, want[1])


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, -(2**31)])
def test_no_table_or_length_makes_gather_kv_leave_its_tensors(bad: int) -> None:
    case = make_case(torch.float16, seq_lens=[60, 40])
    arguments = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    case.block_tables.fill_(bad)
    assert kernel_calls.gather_kv(*arguments, num_tokens=100)[2].violations == ()
    case.seq_lens.fill_(bad)
    assert kernel_calls.gather_kv(*arguments, num_tokens=100)[2].violations == ()


# Writing and copying int8 caches


def int8_pool(
    granularity: str, num_kv_heads: int, head_dim: int, head_dim_v: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return caches of zeros and scales, NaN where they are written."""
    shape = (9, 16, num_kv_heads)
    caches = [torch.zeros(*shape, width, dtype=torch.int8) for width in (head_dim, head_dim_v)]
    if granularity == "token":
        scales = [torch.full((9, num_kv_heads, 16), torch.nan).transpose(1, 2) for _ in range(2)]
    elif granularity == "token, heads dense":
        scales = [torch.full(shape, torch.nan) for _ in range(2)]
    else:
        each = 0.01 + torch.arange(num_kv_heads) / 100
        scales = [each if granularity == "head" else each[0].clone() for _ in range(2)]
    return caches, {"key_scale": scales[0], "value_scale": scales[1]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 64), (33, 200), (1, 16)])
def test_write_kv_quantises_as_the_reference_does(
    dtype: torch.dtype, granularity: str, head_dim: int, head_dim_v: int
) -> None:
    key = (3 * torch.randn(40, 3, head_dim)).to(dtype)
    value = torch.randn(40, 3, head_dim_v).to(dtype)
    key[3], value[5, 1] = 0.0, 0.0
    key[7, 1, 0], key[9, 2, -1], value[11, 0, 0] = torch.nan, torch.inf, -torch.inf
    slots = torch.randperm(9 * 16)[:40]
    slots[4], slots[8] = -1, slots[6]
    pools = [int8_pool(granularity, 3, head_dim, head_dim_v) for _ in range(2)]
    reference.write_kv(key, value, *pools[0][0], slots, **pools[0][1])
    caches, scales = pools[1]
    result = kernel_calls.write_kv(key, value, *caches, slots, **scales, seed=1)
    assert result.violations == ()
    for cache, want in zip(caches, pools[0][0], strict=True):
        assert torch.equal(cache, want)
    for name, scale in scales.items():
        torch.testing.assert_close(scale, pools[0][1][name], rtol=0, atol=0, equal_nan=True)


def test_every_float_between_two_elements_becomes_the_nearer_one() -> None:
    # Ratios close to a half: to half precision first, and then to an integer, they would round up.
    ratios = torch.arange(-128, 128)[:, None] + 0.5 + torch.tensor([-1e-4, -1e-5, 0.0, 1e-5, 1e-4])
    key = ratios.reshape(40, 1, 32).float()
    caches, _ = int8_pool("tensor", 1, 32, 32)
    want = [cache.clone() for cache in caches]
    one = torch.ones(())
    slots = torch.arange(40)
    reference.write_kv(key, key, *want, slots, key_scale=one, value_scale=one)
    result = kernel_calls.write_kv(key, key, *caches, slots, key_scale=one, value_scale=one)
    assert result.violations == ()
    assert torch.equal(caches[0], want[0])


def test_a_scale_of_zero_or_nan_gives_zeros() -> None:
    caches, _ = int8_pool("head", 3, 32, 32)
    scales = torch.tensor([0.0, torch.nan, 0.5])
    key = torch.randn(4, 3, 32) * 10
    kernel_calls.write_kv(key, key, *caches, torch.arange(4), key_scale=scales, value_scale=scales)
    assert not caches[0][:, :, :2].any()
    assert caches[0][0, :4, 2].any()


def test_a_latent_row_is_written_once_with_one_scale() -> None:
    rows = torch.randn(20, 1, 96).half()
    cache = torch.zeros(9, 16, 1, 96, dtype=torch.int8)
    scale = torch.full((9, 16, 1), torch.nan)
    want, want_scale = cache.clone(), scale.clone()
    slots = torch.randperm(9 * 16)[:20]
    arguments = (rows, rows[..., :64], cache, cache[..., :64], slots)
    reference.write_kv(
        rows,
        rows[..., :64],
        want,
        want[..., :64],
        slots,
        key_scale=want_scale,
        value_scale=want_scale,
    )
    result = kernel_calls.write_kv(*arguments, key_scale=scale, value_scale=scale)
    assert result.violations == ()
    assert torch.equal(cache, want)
    assert same_bits(scale, want_scale)
    assert result.counters.total.gm_read_bytes < 2 * rows.nbytes


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("head_dim", [64, 33])
def test_copy_blocks_takes_int8_rows_and_their_scales_along(
    granularity: str, head_dim: int
) -> None:
    caches, scales = int8_pool(granularity, 3, head_dim, 48)
    for cache in caches:
        cache.random_(-128, 128)
    for scale in scales.values():
        scale.uniform_()
    mapping = torch.tensor([[0, 1], [1, 2], [5, 6], [6, 5], [8, 8], [3, 4]])
    want = [tensor.clone() for tensor in (*caches, *scales.values())]
    reference.copy_blocks(want[0], want[1], mapping, key_scale=want[2], value_scale=want[3])
    result = kernel_calls.copy_blocks(*caches, mapping, **scales, seed=3)
    assert result.violations == ()
    for got, expected in zip((*caches, *scales.values()), want, strict=True):
        assert same_bits(got, expected)
