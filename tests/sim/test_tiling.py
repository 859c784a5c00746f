"""The tiling: functions of shapes, inside the chip's budgets at every corner."""

from __future__ import annotations

from functools import partial

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
) -> host.AttentionTilingData:
    data = host.AttentionTilingData(
        num_tokens=batch if num_tokens is None else num_tokens,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=16,
        max_blocks_per_seq=capacity // 16,
    )
    data.key.head_dim = head_dim
    data.value.head_dim = head_dim if head_dim_v is None else head_dim_v
    return data


def ub_bytes(data: host.AttentionTilingData, dtype: str) -> int:
    element = 4 if dtype == "float32" else 2
    return host.library().attention_ub_bytes(
        data.key.head_dim, data.value.head_dim, element, data.max_rows, data.tile
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_up_to_256_fits_the_unified_buffer(dtype: str, head_dim: int) -> None:
    data = shape(head_dim=head_dim)
    answer = host.plan_attention(data, dtype, wanted="vector")
    assert answer.refusal == b""
    assert answer.kernel.decode() == f"paged_attention_{dtype}"
    assert data.tile in (16, 32, 64)
    assert data.max_rows in (8, 16)
    assert ub_bytes(data, dtype) <= host.library().usable_ub()


@given(
    head_dim=st.integers(1, 40).map(lambda n: 16 * n),
    head_dim_v=st.integers(1, 40).map(lambda n: 16 * n),
    dtype=st.sampled_from(["float16", "float32"]),
)
def test_a_plan_is_the_largest_step_that_fits_or_a_refusal(
    head_dim: int, head_dim_v: int, dtype: str
) -> None:
    data = shape(head_dim=head_dim, head_dim_v=head_dim_v)
    answer = host.plan_attention(data, dtype, wanted="vector")
    usable = host.library().usable_ub()
    if answer.refusal:
        assert b"unified buffer" in answer.refusal
        data.max_rows, data.tile = 8, 16
        assert ub_bytes(data, dtype) > usable
        return
    assert ub_bytes(data, dtype) <= usable
    if (data.max_rows, data.tile) != (16, 64):
        larger = {(16, 32): (16, 64), (8, 32): (16, 32), (16, 16): (8, 32), (8, 16): (16, 16)}
        data.max_rows, data.tile = larger[data.max_rows, data.tile]
        assert ub_bytes(data, dtype) > usable


@pytest.mark.parametrize("head_dim", [1, 8, 72, 100, 2048])
def test_a_head_dim_that_is_no_multiple_of_16_is_refused_with_the_limit(head_dim: int) -> None:
    answer = host.plan_attention(shape(head_dim=head_dim), "float16", wanted="vector")
    assert f"head_dim is {head_dim}, expected a multiple of 16".encode() in answer.refusal


def test_few_long_sequences_are_split_and_many_are_not() -> None:
    few, many = shape(batch=1, capacity=32768), shape(num_tokens=8192)
    assert host.plan_attention(few, "float16", wanted="vector").workspace_bytes > 0
    assert few.split == 1
    assert host.plan_attention(many, "float16", wanted="vector").workspace_bytes == 0
    assert many.split == 0


def test_the_workspace_holds_one_state_per_row_and_piece() -> None:
    data = shape(batch=3, capacity=5000)
    answer = host.plan_attention(data, "float16", wanted="vector")
    assert data.max_pieces == -(-4992 // PIECE)
    assert answer.workspace_bytes == 3 * 32 * data.max_pieces * (128 + 16) * 4


@pytest.mark.parametrize("batch", [1, 64, 4096])
@pytest.mark.parametrize("capacity", [16, 2048, 131072, 2**20])
def test_the_workspace_stays_bounded_whatever_the_table_could_hold(
    batch: int, capacity: int
) -> None:
    answer = host.plan_attention(shape(batch=batch, capacity=capacity), "float16", wanted="vector")
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
    data = shape(batch=batch, num_tokens=num_tokens, capacity=capacity)
    assert 1 <= host.plan_attention(data, "bfloat16", cores, wanted="vector").num_cores <= cores
    assert 1 <= host.plan_attention(data, "bfloat16", cores, "mixed").num_cores <= cores // 2


# The kernel on cube and vector cores


def kernel_of(head_dim: int, head_dim_v: int, dtype: str, wanted: str = "") -> str:
    data = shape(head_dim=head_dim, head_dim_v=head_dim_v)
    answer = host.plan_attention(data, dtype, wanted=wanted)
    assert answer.refusal == b""
    return str(answer.stem.decode())


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
    answer = host.plan_attention(shape(), "float16", wanted="cube")
    assert answer.refusal == b'PAGED_NPU_KERNEL is "cube", expected "vector" or "mixed"'


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
    data = shape(
        batch=batch,
        num_tokens=num_tokens if starts else batch,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
    )
    data.has_query_start_loc = starts
    assert host.plan_attention(data, "float16").stem == b"attention_mixed"


@given(
    head_dim=st.integers(1, 40).map(lambda n: 16 * n),
    head_dim_v=st.integers(1, 40).map(lambda n: 16 * n),
    num_tokens=st.integers(1, 300),
    group=st.integers(1, 64),
    alibi=st.booleans(),
)
def test_a_mixed_plan_fits_every_memory_of_cube_and_vector_cores(
    head_dim: int, head_dim_v: int, num_tokens: int, group: int, alibi: bool
) -> None:
    data = shape(
        num_tokens=num_tokens, num_heads=8 * group, head_dim=head_dim, head_dim_v=head_dim_v
    )
    data.has_query_start_loc = True
    data.has_alibi_slopes = alibi
    answer = host.plan_attention(data, "float16")
    if answer.stem != b"attention_mixed":
        return
    library = host.library()
    assert data.max_rows in (16, 32, 64, 128)
    assert data.tile in (16, 32, 64, 128)
    assert data.part_elements >= 8 * head_dim_v  # rows of output that leave at a time
    ub = partial(library.softmax_ub_bytes, head_dim_v, data.max_rows, data.tile)
    most_buffers = 6 if data.split else 7  # two more are for states
    assert 5 <= data.chunk_buffers <= most_buffers
    assert ub(data.chunk_buffers, alibi, data.split) <= library.usable_ub()
    if data.chunk_buffers < most_buffers:
        assert ub(data.chunk_buffers + 1, alibi, data.split) > library.usable_ub()
    l1 = library.attention_l1_bytes(head_dim, head_dim_v, data.max_rows, data.tile)
    assert l1 <= library.usable_l1()
    half_of_l0, half_of_l0c = 32 * 1024, 64 * 1024
    assert 2 * data.key_columns * max(data.max_rows, data.tile) <= half_of_l0
    assert 2 * data.tile * max(data.max_rows, data.value_columns) <= half_of_l0
    assert 4 * data.max_rows * max(data.tile, head_dim_v) <= half_of_l0c
    assert data.key_columns % 16 == data.value_columns % 16 == 0


def test_the_exchange_holds_five_steps_of_a_short_table_and_no_more() -> None:
    data = shape(batch=3, capacity=200)
    answer = host.plan_attention(data, "float16")
    assert data.exchange_keys == 256
    assert data.exchange_bytes == 5 * 16 * (256 * (4 + 2) + 128 * 4) + 256
    assert answer.workspace_bytes == answer.num_cores * data.exchange_bytes


def test_decode_is_split_on_the_cube_and_prefill_is_not() -> None:
    decode, prefill = shape(batch=1, capacity=32768), shape(batch=1, num_tokens=2048)
    prefill.has_query_start_loc = True
    host.plan_attention(decode, "float16")
    host.plan_attention(prefill, "float16")
    assert decode.split == 1
    assert prefill.split == 0


def test_the_step_depends_on_dtype_and_head_dims_alone() -> None:
    # The bits of a row depend on it, and must not depend on the rest of the batch.
    steps = set()
    for batch, tokens, capacity in ((1, 1, 64), (64, 64, 4096), (2, 4000, 131072)):
        data = shape(batch=batch, num_tokens=tokens, capacity=capacity)
        host.plan_attention(data, "float16", wanted="vector")
        steps.add((data.tile, data.max_rows))
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("Ascend910B1", 48),
        ("Ascend910B2", 48),
        ("Ascend910B3", 40),
        ("Ascend910B4", 40),
        ("Ascend910_9391", 40),
        ("Ascend310P", 0),
    ],
)
def test_the_vector_cores_of_each_chip_are_known(name: str, cores: int) -> None:
    assert host.library().soc_vector_cores(name.encode()) == cores


def test_a_chip_has_two_vector_cores_for_each_cube_core() -> None:
    assert host.library().soc_cube_cores(b"Ascend910B2") == 24
    assert host.library().soc_cube_cores(b"Ascend910B4") == 20
    assert host.library().soc_cube_cores(b"Ascend310P") == 0


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [8, 128, 576, 20000])
def test_copies_move_as_many_vectors_as_two_buffers_hold(element_size: int, head_dim: int) -> None:
    data = host.WriteKvTilingData(num_tokens=100, num_kv_heads=5000)
    data.key.head_dim = data.value.head_dim = head_dim
    answer = host.plan("write_kv", data, element_size)
    pitch = -(-head_dim * element_size // 32) * 32
    assert answer.refusal == b""
    assert 1 <= data.heads_per_copy <= 4095
    assert 2 * data.heads_per_copy * pitch <= host.library().usable_ub()
    assert answer.num_cores == 48


def test_a_vector_larger_than_a_buffer_is_refused() -> None:
    data = host.CopyBlocksTilingData(num_copies=1, num_kv_heads=1, block_size=16)
    data.key.head_dim = data.value.head_dim = 10**6
    assert b"head_dim is 1000000" in host.plan("copy_blocks", data, 4).refusal


@pytest.mark.parametrize(("dtype", "widest"), [("float16", 704), ("float32", 464)])
def test_merging_is_refused_beyond_what_the_unified_buffer_holds(dtype: str, widest: int) -> None:
    fits = host.MergeStatesTilingData(num_tokens=1, num_heads=1, head_dim=widest)
    assert host.plan("merge_states", fits, dtype).refusal == b""
    beyond = host.MergeStatesTilingData(num_tokens=1, num_heads=1, head_dim=widest + 16)
    refusal = host.plan("merge_states", beyond, dtype).refusal
    assert f"expected a multiple of 16 from 16 to {widest}".encode() in refusal
