"""What the simulated instructions compute, what is counted, and what the cycle model says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.sim.harness import HERE, Kernel, Result, launch, read, update, write

ROUND_MODES = ("NONE", "RINT", "FLOOR", "CEIL", "ROUND", "TRUNC", "ODD")
DIRECTED = ROUND_MODES[1:6]


@cache
def kernel(source: str, name: str) -> Kernel:
    return Kernel(HERE / "kernels" / f"{source}.cpp", name)


def run(name: str, values: np.ndarray, out: np.ndarray, *more: int) -> np.ndarray:
    """Run a kernel of numbers.cpp that keeps every rule, and return what it wrote."""
    result = launch(kernel("numbers", name), 1, read(values, "in"), write(out, "out"), *more)
    assert result.violations == ()
    return out


# ---- Conversions ---------------------------------------------------------------------------------


def all_halves() -> np.ndarray:
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def test_every_half_becomes_its_float() -> None:
    halves = all_halves()
    for part in np.split(halves, 4):
        floats = run("cast_half_float", part, np.zeros(part.size, np.float32), part.size, 0)
        np.testing.assert_array_equal(floats, part.astype(np.float32))


def test_every_bfloat16_becomes_its_float() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    for part, floats in zip(np.split(bits, 4), np.split(expected, 4), strict=True):
        out = run("cast_bfloat_float", part, np.zeros(part.size, np.float32), part.size, 0)
        np.testing.assert_array_equal(out.view(np.uint32), floats.view(np.uint32))


def hard_floats(low: float, high: float) -> np.ndarray:
    """Return floats of all sizes, ties between neighbouring halves and bfloat16s among them."""
    random = np.random.default_rng(7)
    scaled = random.standard_normal(2000) * 2.0 ** random.integers(-30, 17, 2000)
    halves = all_halves()[:0x7C00:37].astype(np.float64)
    ties = (halves[:-1] + halves[1:]) / 2
    bits = np.arange(0x3000, 0x4800, 13, dtype=np.uint32)
    bfloats = (bits << 16).view(np.float32).astype(np.float64)
    more_ties = (bfloats[:-1] + bfloats[1:]) / 2
    values = np.concatenate((scaled, halves, ties, bfloats, more_ties, [0.5, 1.5, 2.5, 0.0]))
    values = np.concatenate((values, -values)).astype(np.float32)
    return values[(values >= low) & (values <= high)]


def neighbours(values: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest grid value <= v and the smallest one >= v, for each v."""
    above = grid[np.searchsorted(grid, values, side="left")]
    below = grid[np.searchsorted(grid, values, side="right") - 1]
    return below, above


def rounded(values: np.ndarray, grid: np.ndarray, even: np.ndarray, mode: str) -> np.ndarray:
    """Round each value to the sorted grid; `even` says which grid values have an even last bit."""
    values = values.astype(np.float64)
    below, above = neighbours(values, grid)
    odd_below = ~even[np.searchsorted(grid, values, side="right") - 1]
    exact = below == above
    middle = (below + above) / 2
    choose_above = {
        "FLOOR": np.zeros_like(exact),
        "CEIL": np.ones_like(exact),
        "TRUNC": values < 0,
        "ROUND": (values > middle) | ((values == middle) & (values > 0)),
        "RINT": (values > middle) | ((values == middle) & odd_below),
        "NONE": (values > middle) | ((values == middle) & odd_below),
        "ODD": ~odd_below,
    }[mode]
    return np.where(exact | ~choose_above, below, above)


def half_grid() -> tuple[np.ndarray, np.ndarray]:
    positive = np.arange(0x7C00, dtype=np.uint16)
    values = positive.view(np.float16).astype(np.float64)
    even = positive % 2 == 0
    return np.concatenate((-values[:0:-1], values)), np.concatenate((even[:0:-1], even))


def bfloat_grid() -> tuple[np.ndarray, np.ndarray]:
    positive = np.arange(0x7F80, dtype=np.uint32)
    values = (positive << 16).view(np.float32).astype(np.float64)
    even = positive % 2 == 0
    return np.concatenate((-values[:0:-1], values)), np.concatenate((even[:0:-1], even))


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_float_becomes_half_in_every_rounding_mode(mode: str) -> None:
    values = hard_floats(-65504, 65504)
    out = np.zeros(values.size, np.float16)
    run("cast_float_half", values, out, values.size, ROUND_MODES.index(mode))

    np.testing.assert_array_equal(out.astype(np.float64), rounded(values, *half_grid(), mode))


@pytest.mark.parametrize("mode", DIRECTED)
def test_float_becomes_bfloat16_in_every_rounding_mode(mode: str) -> None:
    values = hard_floats(-1e38, 1e38)
    out = np.zeros(values.size, np.uint16)
    run("cast_float_bfloat", values, out, values.size, ROUND_MODES.index(mode))

    floats = (out.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(floats.astype(np.float64), rounded(values, *bfloat_grid(), mode))


def test_float_becomes_half_like_numpy_where_it_is_infinite_or_nan() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 1e30, -1e30], np.float32)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    out = run("cast_float_half", values, np.zeros(8, np.float16), 8, 1)

    np.testing.assert_array_equal(out, expected)


def round_away(values: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(values) + 0.5), values)


INTEGER_ROUNDING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "RINT": np.rint,
    "FLOOR": np.floor,
    "CEIL": np.ceil,
    "ROUND": round_away,
    "TRUNC": np.trunc,
}


@pytest.mark.parametrize("mode", DIRECTED)
@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("cast_float_int32", np.float32, np.int32),
        ("cast_float_int16", np.float32, np.int16),
        ("cast_float_float", np.float32, np.float32),
        ("cast_half_int32", np.float16, np.int32),
        ("cast_half_int8", np.float16, np.int8),
    ],
)
def test_floats_become_integers_in_every_rounding_mode(
    name: str, source: type, target: type, mode: str
) -> None:
    large = [1e5, -1e5, 70000, -70000] if source is np.float32 else [60000, -60000]
    values = np.concatenate((np.arange(-1600, 1600) / 8, large)).astype(source)
    exact = INTEGER_ROUNDING[mode](values.astype(np.float64))
    if np.issubdtype(target, np.integer):
        exact = np.clip(exact, np.iinfo(target).min, np.iinfo(target).max)
    out = run(name, values, np.zeros(values.size, target), values.size, ROUND_MODES.index(mode))

    np.testing.assert_array_equal(out, exact.astype(target))


@pytest.mark.parametrize("mode", ["NONE", *DIRECTED])
def test_int32_becomes_float_in_every_rounding_mode(mode: str) -> None:
    base = np.array([0, 1, 2**24 + 1, 2**24 + 3, 2**30 + 33, 2**30 + 32, 2**31 - 1], np.int64)
    values = np.concatenate((base, -base)).astype(np.int32)
    around = np.abs(values.astype(np.float64)).astype(np.float32).view(np.uint32)
    steps = np.arange(-2, 3)
    bits = np.unique(np.maximum(around[:, None].astype(np.int64) + steps, 0)).astype(np.uint32)
    floats = bits.view(np.float32).astype(np.float64)
    grid = np.concatenate((-floats[:0:-1], floats))
    even = np.concatenate((bits[:0:-1] % 2 == 0, bits % 2 == 0))
    out = np.zeros(values.size, np.float32)
    run("cast_int32_float", values, out, values.size, ROUND_MODES.index(mode))

    np.testing.assert_array_equal(out.astype(np.float64), rounded(values, grid, even, mode))


def test_integers_are_narrowed_with_saturation_and_widened_exactly() -> None:
    wide = np.array([0, 1, -1, 32767, 32768, -32768, -32769, 2**31 - 1], np.int32)
    narrow = run("cast_int32_int16", wide, np.zeros(8, np.int16), 8, 0)
    np.testing.assert_array_equal(narrow, np.clip(wide, -32768, 32767).astype(np.int16))

    bytes_ = np.arange(256, dtype=np.uint8)
    halves = run("cast_uint8_half", bytes_, np.zeros(256, np.float16), 256, 0)
    np.testing.assert_array_equal(halves, bytes_.astype(np.float16))


# ---- Arithmetic ----------------------------------------------------------------------------------


def positive(count: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(3).uniform(0.01, 4, count).astype(dtype)


def signed(count: int, dtype: type = np.float32) -> np.ndarray:
    values = np.random.default_rng(4).uniform(-4, 4, count)
    return (
        values.astype(dtype) if np.issubdtype(dtype, np.floating) else (values * 1000).astype(dtype)
    )


@pytest.mark.parametrize("count", [1, 7, 64, 65, 300, 2048])
@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("exp_float", signed, np.exp),
        ("ln_float", positive, np.log),
        ("sqrt_float", positive, np.sqrt),
        ("rsqrt_float", positive, lambda x: 1 / np.sqrt(x)),
        ("reciprocal_float", positive, lambda x: 1 / x),
        ("relu_float", signed, lambda x: np.maximum(x, 0)),
        ("adds_float", signed, lambda x: x + np.float32(1.5)),
        ("mins_float", signed, lambda x: np.minimum(x, np.float32(0.25))),
    ],
)
def test_unary_instructions_compute_like_numpy(
    name: str,
    values: Callable[[int], np.ndarray],
    expected: Callable[[np.ndarray], np.ndarray],
    count: int,
) -> None:
    x = values(count)

    np.testing.assert_allclose(run(name, x, np.zeros_like(x), count), expected(x), rtol=3e-7)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("add_float", np.float32, np.add),
        ("add_half", np.float16, np.add),
        ("sub_int32", np.int32, np.subtract),
        ("mul_half", np.float16, np.multiply),
        ("mul_int16", np.int16, np.multiply),
        ("div_float", np.float32, np.divide),
        ("max_float", np.float32, np.maximum),
        ("min_half", np.float16, np.minimum),
        ("and_int16", np.int16, np.bitwise_and),
        ("or_int16", np.int16, np.bitwise_or),
    ],
)
def test_binary_instructions_give_the_bits_of_numpy(
    name: str, dtype: type, expected: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    count = 400
    values = signed(2 * count, dtype)
    out = run(name, values, np.zeros(count, dtype), count)

    np.testing.assert_array_equal(out, expected(values[:count], values[count:]))


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("muls_half", np.float16, lambda x: x * np.float16(0.3)),
        ("abs_half", np.float16, np.abs),
        ("maxs_int32", np.int32, lambda x: np.maximum(x, 7)),
        ("shift_left_int32", np.int32, lambda x: x << 3),
        ("shift_right_int16", np.int16, lambda x: x >> 2),
        ("not_int16", np.int16, np.invert),
    ],
)
def test_other_types_give_the_bits_of_numpy(
    name: str, dtype: type, expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    values = signed(333, dtype)

    np.testing.assert_array_equal(run(name, values, np.zeros_like(values), 333), expected(values))


def test_half_functions_are_rounded_from_float() -> None:
    x = signed(200, np.float16)
    expected = np.exp(x.astype(np.float32)).astype(np.float16)

    np.testing.assert_allclose(run("exp_half", x, np.zeros_like(x), 200), expected, rtol=1e-3)


def test_axpy_and_mul_add_dst_add_to_what_is_there() -> None:
    x = signed(100, np.float16)
    out = run("axpy_half_to_float", x, np.zeros(100, np.float32), 100)
    np.testing.assert_array_equal(out, x.astype(np.float32) * 3 + 1)

    y = signed(128)
    out = run("mul_add_dst_float", y, np.zeros(64, np.float32), 64)
    np.testing.assert_array_equal(out, y[:64] * y[64:] + 2)


# ---- Reductions and others -----------------------------------------------------------------------


def tree_sum(values: np.ndarray) -> np.ndarray:
    """Sum the last dimension as the hardware does: neighbours pairwise, again and again."""
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


def test_row_sums_are_trees_of_neighbours() -> None:
    values = signed(10 * 64)
    out = run("row_sums", values, np.zeros(10, np.float32), 10)

    np.testing.assert_array_equal(out, tree_sum(values.reshape(10, 64)))


def test_block_and_pair_sums() -> None:
    values = signed(6 * 64)
    blocks = run("block_sums", values, np.zeros(48, np.float32), 6)
    np.testing.assert_array_equal(blocks, tree_sum(values.reshape(48, 8)))

    pairs = run("pair_sums", values, np.zeros(192, np.float32), 6)
    np.testing.assert_array_equal(pairs, tree_sum(values.reshape(192, 2)))


def test_row_maxima_come_with_the_first_index_among_the_masked_lanes() -> None:
    values = np.round(signed(8 * 64))
    out = run("row_maxima", values, np.zeros(16, np.float32), 8).reshape(8, 2)
    rows = values.reshape(8, 64)[:, :50]

    np.testing.assert_array_equal(out[:, 0], rows.max(axis=1))
    np.testing.assert_array_equal(out[:, 1].view(np.uint32), rows.argmax(axis=1))


def test_a_sum_of_halves_rounds_every_partial_sum() -> None:
    values = signed(512, np.float16)
    out = run("sum_of_halves", values, np.zeros(1, np.float16), 512)

    np.testing.assert_array_equal(out[0], tree_sum(tree_sum(values.reshape(4, 128))))


def test_the_maximum_of_a_tensor_comes_with_its_index() -> None:
    values = signed(1000)
    out = run("maximum_and_index", values, np.zeros(2, np.float32), 1000)

    assert out[0] == values.max()
    assert out[1:].view(np.uint32)[0] == values.argmax()


def test_masked_lanes_keep_the_old_destination() -> None:
    values = signed(512)
    expected = np.full((4, 2, 64), -1, np.float32)
    expected[:, 0, ::2] = np.abs(values.reshape(4, 2, 64)[:, 0, ::2])
    out = run("masked_abs", values, np.zeros(512, np.float32), 512)

    np.testing.assert_array_equal(out, expected.reshape(-1))


def test_the_mask_register_counts_elements_or_selects_lanes() -> None:
    values = signed(256)
    expected = np.full(256, -1, np.float32)
    expected[:100] = np.abs(values[:100])
    counted = run("counted_abs", values, np.zeros(256, np.float32), 256)
    np.testing.assert_array_equal(counted, expected)

    lanes = np.full((4, 64), -1, np.float32)
    lanes[:, :5] = np.abs(values.reshape(4, 64)[:, :5])
    selected = run("register_masked_abs", values, np.zeros(256, np.float32), 256)
    np.testing.assert_array_equal(selected, lanes.reshape(-1))


def test_a_source_block_stride_of_zero_repeats_one_block() -> None:
    values = signed(520)
    out = run("add_spread_values", values, np.zeros(512, np.float32))

    np.testing.assert_array_equal(
        out.reshape(8, 64), values[:512].reshape(8, 64) + values[512:, None]
    )


def test_compare_and_select() -> None:
    values = np.round(signed(256))
    out = run("keep_positive", values, np.zeros(256, np.float32), 256)
    np.testing.assert_array_equal(out, np.where(values > 0, values, -2))

    halves = signed(512, np.float16)
    out = run("larger_half", halves, np.zeros(256, np.float16), 256)
    np.testing.assert_array_equal(out, np.maximum(halves[:256], halves[256:]))


def test_gather_reads_by_byte_offsets() -> None:
    values = signed(300)

    np.testing.assert_array_equal(
        run("reversed", values, np.zeros(300, np.float32), 300), values[::-1]
    )


def test_transpose() -> None:
    values = signed(256, np.float16)
    out = run("transposed_16x16", values, np.zeros(256, np.float16))

    np.testing.assert_array_equal(out.reshape(16, 16), values.reshape(16, 16).T)


def test_padded_pieces_start_new_blocks_and_fill_their_tails() -> None:
    values = signed(64)
    out = run("padded_pieces", values, np.zeros(64, np.float32)).reshape(4, 16)
    expected = np.full((4, 16), -1, np.float32)
    expected[:, :8] = 2.5
    for piece in range(4):
        expected[piece, 1:6] = values[7 * piece : 7 * piece + 5]

    np.testing.assert_array_equal(out, expected)


# ---- Whole kernels, counters, cycles -------------------------------------------------------------


def softmax(seed: int = 0, cores: int = 5) -> tuple[np.ndarray, np.ndarray, Result]:
    x = signed(37 * 64).reshape(37, 64)
    y = np.zeros_like(x)
    result = launch(kernel("correct", "softmax_rows"), cores, x, write(y), 37, seed=seed)
    return x, y, result


def test_softmax_with_flags_keeps_every_rule() -> None:
    x, y, result = softmax()
    weights = np.exp(x - x.max(axis=1, keepdims=True))

    assert result.violations == ()
    np.testing.assert_allclose(y, weights / weights.sum(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_in_two_phases_waits_for_all_cores(seed: int) -> None:
    x = np.random.default_rng(1).integers(-9, 9, 48 * 640).astype(np.float32)
    y = np.zeros(1, np.float32)
    partial = write(np.zeros(48, np.float32), "partial")
    sum_kernel = kernel("correct", "sum_in_two_phases")
    result = launch(sum_kernel, 48, x, partial, write(y), x.size, seed=seed)

    assert result.violations == ()
    assert y[0] == x.sum()


def test_the_same_seed_gives_the_same_counters_and_every_seed_the_same_work() -> None:
    _, first, result = softmax(seed=1)
    _, again, same = softmax(seed=1)
    _, other, shuffled = softmax(seed=2)

    assert result == same
    assert result.counters == shuffled.counters
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, other)


def add(cores: int, tiles: int) -> Result:
    x = np.ones(cores * tiles * 256, np.float32)
    z = write(np.zeros_like(x))
    return launch(kernel("correct", "add_queues"), cores, x, x, z, x.size)


def test_bytes_and_instructions_are_counted() -> None:
    counters = add(cores=4, tiles=3).counters

    assert counters.total.gm_read_bytes == 2 * 4 * 3 * 1024
    assert counters.total.gm_written_bytes == 4 * 3 * 1024
    assert counters.total.copy_calls == 3 * 4 * 3
    assert counters.total.vector_instructions == 4 * 3
    assert counters.total.vector_repeats == 4 * 3 * 4
    assert [core.gm_read_bytes for core in counters.cores] == [2 * 3 * 1024] * 4
    start = 5 * 1800  # microseconds, MHz
    assert counters.total_cycles == start + max(core.total_cycles for core in counters.cores)


def test_scalar_accesses_to_global_memory_are_counted() -> None:
    out = update(np.zeros(1024, np.float32))
    set_values = kernel("cores", "set_values_are_written_back_kept")
    counters = launch(set_values, 2, np.zeros(1024, np.float32), out).counters

    assert counters.total.scalar_gm_writes == 2
    assert counters.total.scalar_gm_reads == 0


def test_double_buffering_hides_all_but_the_longest_pipe() -> None:
    long, short = (add(cores=1, tiles=tiles).counters.cores[0] for tiles in (64, 32))
    per_tile = (long.total_cycles - short.total_cycles) / 32
    reading = long.busy_cycles["MTE2"] / 64

    # Two buffers a queue can't hide the whole latency of copies as small as 1 KB.
    assert reading < per_tile < 5 * reading
    assert long.busy_share("MTE2") > long.busy_share("V")


def test_twice_the_bytes_cost_twice_the_time_of_the_copy_pipe() -> None:
    once, twice = (add(cores=1, tiles=tiles).counters.cores[0] for tiles in (8, 16))

    assert twice.busy_cycles["MTE2"] == 2 * once.busy_cycles["MTE2"]
