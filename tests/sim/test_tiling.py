"""The tiling: functions of shapes, inside the chip's budgets at every corner."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim import tiling as host

PIECE = 512
HEAD_DIMS = range(16, 257, 16)


def shape(
    *,
    batch: int = 16,
    num_tokens: int | None = None,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    capacity: int = 2048,
    dtype: str = "float16",
    starts: bool = False,
    alibi: bool = False,
) -> Any:
    return host.AttentionShape(
        dtype=host.DTYPES.index(dtype),
        pool=pool(dtype, num_kv_heads, head_dim, head_dim_v),
        num_tokens=batch if num_tokens is None else num_tokens,
        batch=batch,
        num_heads=num_heads,
        max_blocks_per_seq=capacity // 16,
        has_query_start_loc=starts,
        has_alibi_slopes=alibi,
    )


def pool(dtype: str, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None) -> Any:
    return host.Pool(
        dtype=host.DTYPES.index(dtype),
        block_size=16,
        num_kv_heads=num_kv_heads,
        key=host.Cache(data=2**40, head_dim=head_dim),
        value=host.Cache(data=2**41, head_dim=head_dim if head_dim_v is None else head_dim_v),
    )


def plan(cores: int = 48, wanted: str = "", **call: Any) -> host.Plan:
    """Plan a call of attention."""
    return host.plan("attention", shape(**call), cores, wanted)


def ub_bytes(tiling: Any, dtype: str) -> int:
    element = 4 if dtype == "float32" else 2
    return host.library().attention_ub_bytes(
        tiling.key.head_dim, tiling.value.head_dim, element, tiling.max_rows, tiling.tile
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_up_to_256_fits_the_unified_buffer(dtype: str, head_dim: int) -> None:
    answer = plan(wanted="vector", head_dim=head_dim, dtype=dtype)
    assert answer.refusal == ""
    assert answer.kernel == f"paged_attention_{dtype}"
    assert answer.tiling.tile in (16, 32, 64)
    assert answer.tiling.max_rows in (8, 16)
    assert ub_bytes(answer.tiling, dtype) <= host.library().usable_ub()


@given(
    head_dim=st.integers(1, 40).map(lambda n: 16 * n),
    head_dim_v=st.integers(1, 40).map(lambda n: 16 * n),
    dtype=st.sampled_from(["float16", "float32"]),
)
def test_a_plan_is_the_largest_step_that_fits_or_a_refusal(
    head_dim: int, head_dim_v: int, dtype: str
) -> None:
    answer = plan(wanted="vector", head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    element = 4 if dtype == "float32" else 2
    step_bytes = partial(host.library().attention_ub_bytes, head_dim, head_dim_v, element)
    usable = host.library().usable_ub()
    if answer.refusal:
        assert "unified buffer" in answer.refusal
        assert step_bytes(8, 16) > usable
        return
    step = (answer.tiling.max_rows, answer.tiling.tile)
    assert step_bytes(*step) <= usable
    if step != (16, 64):
        larger = {(16, 32): (16, 64), (8, 32): (16, 32), (16, 16): (8, 32), (8, 16): (16, 16)}
        assert step_bytes(*larger[step]) > usable


@pytest.mark.parametrize("head_dim", [1, 8, 72, 100, 2048])
def test_a_head_dim_that_is_no_multiple_of_16_is_refused_with_the_limit(head_dim: int) -> None:
    answer = plan(wanted="vector", head_dim=head_dim)
    assert f"head_dim is {head_dim}, expected a multiple of 16" in answer.refusal


def test_few_long_sequences_are_split_and_many_are_not() -> None:
    few = plan(wanted="vector", batch=1, capacity=32768)
    many = plan(wanted="vector", num_tokens=8192)
    assert few.workspace_bytes > 0
    assert few.tiling.split == 1
    assert many.workspace_bytes == 0
    assert many.tiling.split == 0


def test_the_workspace_holds_one_state_per_row_and_piece() -> None:
    answer = plan(wanted="vector", batch=3, capacity=5000)
    assert answer.tiling.max_pieces == -(-4992 // PIECE)
    assert answer.workspace_bytes == 3 * 32 * answer.tiling.max_pieces * (128 + 16) * 4


@pytest.mark.parametrize("batch", [1, 64, 4096])
@pytest.mark.parametrize("capacity", [16, 2048, 131072, 2**20])
def test_the_workspace_stays_bounded_whatever_the_table_could_hold(
    batch: int, capacity: int
) -> None:
    answer = plan(wanted="vector", batch=batch, capacity=capacity)
    assert answer.workspace_bytes <= 256 * 2**20


@given(
    batch=st.integers(0, 300),
    num_tokens=st.integers(0, 5000),
    cores=st.sampled_from([40, 48]),
    capacity=st.integers(0, 10**6),
)
def test_no_launch_has_more_blocks_than_the_chip_has_cores_nor_none(
    batch: int, num_tokens: int, cores: int, capacity: int
) -> None:
    data = shape(batch=batch, num_tokens=num_tokens, capacity=capacity, dtype="bfloat16")
    assert 1 <= host.plan("attention", data, cores, "vector").num_cores <= cores
    assert 1 <= host.plan("attention", data, cores, "mixed").num_cores <= cores // 2


# The kernel on cube and vector cores


def kernel_of(head_dim: int, head_dim_v: int, dtype: str, wanted: str = "") -> str:
    answer = plan(wanted=wanted, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    assert answer.refusal == ""
    return answer.stem


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 512])
def test_16_bit_caches_take_the_mixed_kernel_and_the_vector_one_on_request(
    dtype: str, head_dim: int
) -> None:
    assert kernel_of(head_dim, head_dim, dtype) == "attention_mixed"
    assert kernel_of(head_dim, head_dim, dtype, "mixed") == "attention_mixed"
    if head_dim <= 256:
        assert kernel_of(head_dim, head_dim, dtype, "vector") == "attention"


def test_a_latent_cache_of_576_and_512_takes_the_mixed_kernel() -> None:
    assert kernel_of(576, 512, "bfloat16") == "attention_mixed"


@pytest.mark.parametrize("wanted", ["", "mixed"])
def test_float32_takes_the_vector_kernel(wanted: str) -> None:
    assert kernel_of(128, 128, "float32", wanted) == "attention"


def test_a_kernel_of_another_name_is_refused() -> None:
    answer = plan(wanted="cube")
    assert answer.refusal == 'PAGED_NPU_KERNEL is "cube", expected "vector" or "mixed"'


@given(
    batch=st.integers(1, 64),
    num_tokens=st.integers(1, 5000),
    num_kv_heads=st.integers(1, 8),
    group=st.integers(1, 64),
    starts=st.booleans(),
)
def test_the_choice_depends_on_dtype_and_head_dims_alone(
    batch: int, num_tokens: int, num_kv_heads: int, group: int, starts: bool
) -> None:
    # A row has the same bits in decode and in prefill, in any batch, only if one kernel serves all.
    answer = plan(
        batch=batch,
        num_tokens=num_tokens if starts else batch,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        starts=starts,
    )
    assert answer.stem == "attention_mixed"


@given(
    head_dim=st.integers(1, 40).map(lambda n: 16 * n),
    head_dim_v=st.integers(1, 40).map(lambda n: 16 * n),
    num_tokens=st.integers(1, 300) | st.integers(1, 5000),
    group=st.integers(1, 64),
    alibi=st.booleans(),
)
def test_a_mixed_plan_fits_every_memory_of_cube_and_vector_cores(
    head_dim: int, head_dim_v: int, num_tokens: int, group: int, alibi: bool
) -> None:
    answer = plan(
        num_tokens=num_tokens,
        num_heads=8 * group,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        starts=True,
        alibi=alibi,
    )
    if answer.stem != "attention_mixed":
        return
    data = answer.tiling
    library = host.library()
    assert data.max_rows in (16, 32, 64, 128)
    assert data.tile in (16, 32, 64, 128)
    assert data.part_elements >= 8 * head_dim_v  # rows of output that leave at a time
    bands = data.unit_rows // data.max_rows
    assert data.unit_rows == bands * data.max_rows
    assert bands in (1, 2)
    ub = partial(library.softmax_ub_bytes, head_dim_v, data.max_rows, data.tile, bands)
    assert 5 <= data.chunk_buffers <= 7
    assert ub(data.chunk_buffers, alibi, data.split) <= library.usable_ub()
    if data.chunk_buffers < 7:
        assert ub(data.chunk_buffers + 1, alibi, data.split) > library.usable_ub()
    l1 = library.attention_l1_bytes(head_dim, head_dim_v, data.max_rows, data.tile, bands)
    assert l1 <= library.usable_l1()
    half_of_l0, half_of_l0c = 32 * 1024, 64 * 1024
    assert 2 * data.key_columns * max(data.max_rows, data.tile) <= half_of_l0
    assert 2 * data.tile * max(data.max_rows, data.value_columns) <= half_of_l0
    assert 4 * data.max_rows * max(data.tile, head_dim_v) <= half_of_l0c
    assert data.key_columns % 16 == data.value_columns % 16 == 0


def test_the_exchange_holds_five_steps_of_a_short_table_and_no_more() -> None:
    answer = plan(batch=3, capacity=200)
    assert answer.tiling.exchange_keys == 256
    assert answer.tiling.exchange_bytes == 5 * 16 * (256 * (4 + 2) + 128 * 4) + 512
    assert answer.workspace_bytes == answer.num_cores * answer.tiling.exchange_bytes


@given(
    head_dim_v=st.integers(1, 32).map(lambda n: 16 * n),
    num_tokens=st.integers(1, 300),
    capacity=st.integers(1, 1000),
)
def test_what_the_cores_of_a_group_exchange_begins_at_lines_of_512_bytes(
    head_dim_v: int, num_tokens: int, capacity: int
) -> None:
    data = plan(num_tokens=num_tokens, head_dim_v=head_dim_v, capacity=capacity, starts=True).tiling
    pairs = data.max_rows * data.exchange_keys
    assert data.exchange_bytes % 512 == 0
    assert pairs * 4 % 512 == pairs * 2 % 512 == data.max_rows * head_dim_v * 4 % 512 == 0


def test_units_have_two_bands_where_there_are_enough_for_all_groups() -> None:
    many = plan(batch=1, num_tokens=2048, starts=True)
    few = plan(batch=1, num_tokens=1024, starts=True)
    wide = plan(batch=1, num_tokens=2048, starts=True, head_dim=256)
    assert many.tiling.unit_rows == 2 * many.tiling.max_rows
    assert few.tiling.unit_rows == few.tiling.max_rows
    assert wide.tiling.unit_rows == wide.tiling.max_rows


@given(
    divisor=st.integers(1, 4096),
    quotient=st.integers(0, 2**31),
    beside=st.sampled_from([-1, 0, 1]),
)
def test_a_number_is_divided_exactly_by_a_multiplication(
    divisor: int, quotient: int, beside: int
) -> None:
    call = shape(num_heads=8 * divisor)
    made = host.plan("attention", call).tiling.per_kv_head
    n = min(max(quotient * divisor + beside, 0), 2**31 - 1)
    assert n * made.multiplier < 2**63
    assert n * made.multiplier >> made.shift == n // divisor


def test_decode_is_split_on_the_cube_and_prefill_is_not() -> None:
    assert plan(batch=1, capacity=32768).tiling.split == 1
    assert plan(batch=1, num_tokens=2048, starts=True).tiling.split == 0


def test_tiles_are_dense_where_the_cache_is_and_bands_are_narrow() -> None:
    narrow = shape(batch=4)
    for cache in (narrow.pool.key, narrow.pool.value):
        cache.token_stride = 128
    assert host.plan("attention", narrow, 48, "").tiling.dense_tiles == 1
    narrow.pool.value.token_stride = 8 * 128
    assert host.plan("attention", narrow, 48, "").tiling.dense_tiles == 0
    wide = shape(batch=1, num_tokens=2048, starts=True)
    for cache in (wide.pool.key, wide.pool.value):
        cache.token_stride = 128
    assert host.plan("attention", wide, 48, "").tiling.dense_tiles == 0


def test_the_step_depends_on_dtype_and_head_dims_alone() -> None:
    # The bits of a row depend on it, and must not depend on the rest of the batch.
    steps = set()
    for batch, tokens, capacity in ((1, 1, 64), (64, 64, 4096), (2, 4000, 131072)):
        answer = plan(wanted="vector", batch=batch, num_tokens=tokens, capacity=capacity)
        steps.add((answer.tiling.tile, answer.tiling.max_rows))
    assert len(steps) == 1


@pytest.mark.parametrize(("dtype", "element_size"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("head_dim", [8, 128, 576, 20000])
def test_copies_move_as_many_vectors_as_two_buffers_hold(
    dtype: str, element_size: int, head_dim: int
) -> None:
    call = host.WriteKvShape(pool=pool(dtype, 5000, head_dim), num_tokens=100)
    answer = host.plan("write_kv", call)
    pitch = -(-head_dim * element_size // 32) * 32
    assert answer.refusal == ""
    assert answer.kernel == f"paged_write_kv_{8 * element_size}bit"
    assert 1 <= answer.tiling.heads_per_copy <= 4095
    assert 2 * answer.tiling.heads_per_copy * pitch <= host.library().usable_ub()
    assert answer.num_cores == 48


def test_a_vector_larger_than_a_buffer_is_refused() -> None:
    call = host.CopyBlocksShape(pool=pool("float32", 1, 10**6), num_copies=1)
    assert "head_dim is 1000000" in host.plan("copy_blocks", call).refusal


@pytest.mark.parametrize(("dtype", "widest"), [("float16", 704), ("float32", 464)])
def test_merging_is_refused_beyond_what_the_unified_buffer_holds(dtype: str, widest: int) -> None:
    def refusal(head_dim: int) -> str:
        call = host.MergeStatesParams(host.DTYPES.index(dtype), 1, 1, head_dim)
        return host.plan("merge_states", call).refusal

    assert refusal(widest) == ""
    assert f"expected a multiple of 16 from 16 to {widest}" in refusal(widest + 16)


# From the shape to what the kernels read


def numbers(struct: ctypes.Structure, path: str = "") -> dict[str, tuple[Any, str]]:
    """Return the struct and the name by which each number of it is set, by its dotted name."""
    found: dict[str, tuple[Any, str]] = {}
    for name, kind in struct._fields_:
        if issubclass(kind, ctypes.Structure):
            found |= numbers(getattr(struct, name), f"{path}{name}.")
        else:
            found[f"{path}{name}"] = (struct, name)
    return found


# How the shapes call what the tiling calls by another name, at the begin of a dotted name.
IN_THE_SHAPE = {
    "num_kv_heads": "pool.num_kv_heads",
    "num_blocks": "pool.num_blocks",
    "block_size": "pool.block_size",
    "table_row_stride": "block_tables.row_stride",
    "table_column_stride": "block_tables.column_stride",
    "has_lse": "lse",
    "key": "pool.key",
    "value": "pool.value",
    "key_rows": "key",
    "value_rows": "value",
    "key_scale": "pool.key.scales",
    "value_scale": "pool.value.scales",
    "chooses_key_scales": "pool.key.scales.are_per_token",
    "chooses_value_scales": "pool.value.scales.are_per_token",
    "tree_columns": "tree_mask.num_columns",
    "tree_token_stride": "tree_mask.token_stride",
}
_DIVISOR = ("multiplier", "shift")
DECIDED = (
    *("tile", "max_rows", "unit_rows", "split", "max_pieces", "dense_tiles"),
    *("key_columns", "value_columns"),
    *("chunk_buffers", "part_elements", "exchange_keys", "exchange_bytes", "heads_per_kv_head"),
    *(f"{by}.{part}" for by in ("per_kv_head", "per_block", "per_unit") for part in _DIVISOR),
    *("heads_per_copy", "tokens_per_copy", "values_are_keys", "scales_at"),
    *("key_scale.head_dim", "value_scale.head_dim"),
)


@pytest.mark.parametrize("op", list(host.STRUCTS))
def test_the_tiling_has_every_number_of_the_shape_in_its_place(op: str) -> None:
    call = getattr(host, host.STRUCTS[op][0])()
    said = numbers(call)
    flags = [name for name, place in said.items() if isinstance(getattr(*place), bool)]
    for number, name in enumerate(said.keys() - flags, 101):
        setattr(*said[name], 16 * number)  # head_dim is a multiple
    for name in {"dtype", "pool.dtype"} & set(said):
        setattr(*said[name], host.DTYPES.index("float32"))
    if op == "attention":
        call.pool.key.head_dim, call.pool.value.head_dim = 128, 64
    if op == "merge_states":
        call.head_dim = 128
    for flag in [*flags, None]:
        for name in flags:
            setattr(*said[name], name == flag)
        answer = host.plan(op, call)
        assert answer.refusal == ""
        for name, place in numbers(answer.tiling).items():
            if name in DECIDED:
                continue
            first, dot, rest = name.partition(".")
            value = getattr(*said[IN_THE_SHAPE.get(first, first) + dot + rest])
            if op == "copy_blocks" and first in ("key_scale", "value_scale"):
                # Only scales per token are copied.
                value *= getattr(*said[f"{IN_THE_SHAPE[first]}.are_per_token"])
            assert getattr(*place) == (1 if name == "has_lse" else value), name


def test_a_struct_lies_in_memory_as_the_compiler_laid_it() -> None:
    for name, described in host.described_structs().items():
        made = getattr(host, name)
        assert ctypes.sizeof(made) == described["size"]
        for field, _, offset, size in described["fields"]:
            assert (getattr(made, field).offset, getattr(made, field).size) == (offset, size)


def swap_names(fields: list[Any]) -> None:
    fields[0][:3], fields[1][:3] = fields[1][:3], fields[0][:3]


SPOILED = {
    "two fields that changed places": swap_names,
    "a field left out": lambda fields: fields.pop(1),
    "a field of another size": lambda fields: fields[0].__setitem__(1, "bool"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("name", ["AttentionTilingData", "AttentionShape", "Pool"])
def test_a_struct_that_is_mirrored_wrongly_is_noticed(
    name: str, spoil: Callable[[list[Any]], Any]
) -> None:
    described = copy.deepcopy(host.described_structs())
    spoil(described[name]["fields"])
    with pytest.raises(AssertionError, match=name):
        host.make_structs(described)


# Quantised and latent caches, tree masks


def quantised_plan(
    head_dim: int,
    head_dim_v: int,
    *,
    dtype: str = "bfloat16",
    cache_dtype: str = "int8",
    latent: bool = False,
    tree: bool = False,
    wanted: str = "",
) -> host.Plan:
    call = shape(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    call.pool.dtype = host.DTYPES.index(cache_dtype)
    if latent:
        call.pool.value.data = call.pool.key.data
    if tree:
        call.tree_mask = host.TreeMask(1, 16, 1, 16)
    return host.plan("attention", call, wanted=wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_int8_caches_and_tree_masks_take_the_vector_kernel_whatever_is_wanted(dtype: str) -> None:
    for wanted in ("", "mixed", "vector"):
        int8 = quantised_plan(128, 128, dtype=dtype, wanted=wanted)
        assert int8.kernel == f"paged_attention_{dtype}_int8"
        tree = quantised_plan(128, 128, dtype=dtype, cache_dtype=dtype, tree=True, wanted=wanted)
        assert tree.kernel == f"paged_attention_{dtype}"


@pytest.mark.parametrize("cache_dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 576])
def test_neither_a_latent_cache_nor_a_mask_changes_a_step(head_dim: int, cache_dtype: str) -> None:
    head_dim_v = min(head_dim, 512)

    def step(**kind: bool) -> tuple[int, int]:
        kind = {"cache_dtype": cache_dtype, "wanted": "vector", **kind}
        answer = quantised_plan(head_dim, head_dim_v, **kind)
        return answer.refusal or (answer.tiling.max_rows, answer.tiling.tile)

    with_mask = step(latent=True, tree=True)
    assert with_mask == step(latent=True)
    apart = step()
    assert isinstance(with_mask, tuple)
    assert apart == with_mask or "unified buffer" in apart


def test_float8_has_no_kernel_and_wide_int8_rows_are_refused() -> None:
    for op, call in (
        ("write_kv", host.WriteKvShape(pool=pool("float16", 8, 2048))),
        ("gather_kv", host.GatherKvShape(pool=pool("float16", 8, 2048))),
    ):
        call.pool.dtype = host.DTYPES.index("int8")
        assert "head_dim is 2048, expected at most 1984" in host.plan(op, call).refusal
        call.pool.dtype, call.pool.key.head_dim, call.pool.value.head_dim = 4, 64, 64
        assert "a 910B has no float8" in host.plan(op, call).refusal
