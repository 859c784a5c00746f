"""The cube core's instructions compute what they are documented to, and faults are noticed."""

from __future__ import annotations

import re
from functools import cache
from math import ceil

import numpy as np
import pytest

from tests.sim.harness import HERE, Kernel, Part, Result, launch, read, write

SHAPES = [(16, 16, 16), (128, 128, 128), (2, 16, 48), (5, 48, 64), (33, 80, 40), (64, 16, 200)]


@cache
def kernel(name: str) -> Kernel:
    return Kernel(HERE / "kernels" / "matmul.cpp", name)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cut float32 values to bfloat16, as its bits."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def product(name: str, m: int, n: int, k: int, dtype: str, out: type = np.float32) -> np.ndarray:
    """Run a kernel and compare it with numpy; return what it wrote."""
    turned = name.endswith("turned")
    a, b = random(m, k), random(n, k)
    if dtype == "bfloat16":
        a, b = (from_bfloat16(as_bfloat16(x)) for x in (a, b))
    elif dtype == "half":
        a, b = (x.astype(np.float16).astype(np.float32) for x in (a, b))
    stored = [a, np.ascontiguousarray(b.T) if turned else b]
    if dtype == "bfloat16":
        stored = [as_bfloat16(x) for x in stored]
    elif dtype == "half":
        stored = [x.astype(np.float16) for x in stored]
    c = np.zeros((m, n), dtype=out)
    result = launch(kernel(name), 1, read(stored[0]), read(stored[1]), write(c), m, n, k)
    assert result.violations == ()
    wide = from_bfloat16(c) if out == np.uint16 else c.astype(np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    tolerance = {np.float32: 1e-5, np.float16: 2.0**-10, np.uint16: 2.0**-8}[out]
    assert np.abs(wide - expected).max() <= tolerance * np.abs(expected).max()
    return c


@pytest.mark.parametrize("dtype", ["half", "bfloat16", "float"])
@pytest.mark.parametrize("side", ["straight", "turned"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_product_is_that_of_the_matrices(dtype: str, side: str, m: int, n: int, k: int) -> None:
    product(f"{dtype}_{side}", m, n, k, dtype)


@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (128, 128, 128), (48, 80, 144)])
def test_rows_that_lie_in_l1_as_in_gm_are_loaded_as_images(
    dtype: str, m: int, n: int, k: int
) -> None:
    dense = product(f"{dtype}_dense_turned", m, n, k, dtype)
    assert (dense == product(f"{dtype}_turned", m, n, k, dtype)).all()


@pytest.mark.parametrize(("to", "out"), [("half", np.float16), ("bfloat16", np.uint16)])
def test_fixpipe_rounds_to_the_type_of_the_output(to: str, out: type) -> None:
    product(f"half_to_{to}", 33, 48, 64, "half", out)


def test_a_single_row_is_read_as_a_vector() -> None:
    a, b = random(1, 256).astype(np.float16), random(48, 256).astype(np.float16)
    c = np.zeros((1, 48), dtype=np.float32)
    assert launch(kernel("half_vector"), 1, a, b, write(c), 48).violations == ()
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(c - expected).max() <= 1e-5 * np.abs(expected).max()


def doubled(groups: int, seed: int = 0) -> tuple[np.ndarray, Result]:
    n, k = 48, 64
    a, b = (random(rows, k).astype(np.float16) for rows in (16 * groups, n))
    c, out = (np.zeros((16 * groups, n), dtype=np.float32) for _ in range(2))
    arguments = (read(a), read(b), write(c, "workspace"), write(out, "out"), n, k)
    result = launch(kernel("doubled_product"), groups, *arguments, seed=seed)
    expected = 2 * (a.astype(np.float64) @ b.astype(np.float64).T)
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()
    return out, result


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_kernel_hands_results_from_cube_to_vector_cores(seed: int) -> None:
    out, result = doubled(24, seed)

    assert result.violations == ()
    assert (out == doubled(24)[0]).all()
    assert sum(core.is_cube for core in result.counters.cores) == 24
    assert len(result.counters.cores) == 72


def test_traffic_is_counted_by_tensor_and_by_memory() -> None:
    _, result = doubled(3)

    traffic = result.counters.traffic
    total = result.counters.total
    n, k = 48, 64
    c_bytes = 3 * 16 * n * 4
    assert traffic["arg0"].read_bytes == 3 * 16 * k * 2
    assert traffic["arg1"].read_bytes == 3 * n * k * 2
    assert traffic["arg1"].hbm_bytes == n * k * 2  # the other groups find it in L2
    assert traffic["workspace"].written_bytes == traffic["workspace"].read_bytes == c_bytes
    assert traffic["workspace"].hbm_bytes == 0
    assert traffic["out"].written_bytes == c_bytes
    assert total.gm_l1_bytes == 3 * (16 + n) * k * 2
    assert total.l1_l0a_bytes == 3 * 16 * k * 2
    assert total.l1_l0b_bytes == 3 * n * k * 2
    assert total.l0c_gm_bytes == total.gm_read_bytes == total.gm_written_bytes == c_bytes
    assert total.mmad_steps == 3 * (n // 16) * (k // 16)


def test_named_parts_are_counted_apart_and_have_bounds_of_their_own() -> None:
    n, k = 48, 64
    a, b = (np.ones((rows, k), dtype=np.float16) for rows in (16, n))
    c, out = (np.zeros((16, n), dtype=np.float32) for _ in range(2))
    whole, half = 16 * n * 4, 8 * n * 4
    results = [
        launch(
            kernel("doubled_product"),
            1,
            a,
            b,
            write(c, "c", [Part("S", 0, size)]),
            write(out),
            n,
            k,
        )
        for size in (whole, half)
    ]

    assert results[0].violations == ()
    assert results[0].counters.traffic["S"].written_bytes == whole
    assert "of S, which has [0, 1536)" in results[1].violations[0]


def test_work_that_overlaps_takes_less_than_its_sum() -> None:
    """The flag of the cube core waits for its last pipe, and the vector cores wait for the flag."""
    counters = doubled(1)[1].counters
    (cube,) = counters.of_kind(cube=True)
    for vector in counters.of_kind(cube=False):
        assert vector.total_cycles > cube.busy_cycles["MTE2"] + cube.busy_cycles["FIX"]
    start = 5 * 1800  # microseconds, MHz
    assert counters.total_cycles == start + max(core.total_cycles for core in counters.cores)
    assert cube.work() == max(cube.busy_cycles.values())


PIPELINED = HERE / "kernels" / "pipelined.cpp"
FAULTS = re.search(r"enum Fault \{(.*?)kNumFaults", PIPELINED.read_text(), re.DOTALL)
NAMES = re.findall(r"^  k(\w+),", FAULTS[1] if FAULTS else "", re.MULTILINE)


@cache
def pipelined_kernel() -> Kernel:
    return Kernel(PIPELINED, "pipelined")


@cache
def pipelined_problem() -> tuple[np.ndarray, ...]:
    """Return a, b and v for three groups, and what comes out."""
    a, b, v = (random(count, 64).astype(np.float16) for count in (96, 160, 161))
    v = v[:160]
    scores = (a.astype(np.float32) @ b.astype(np.float32).T) * np.float32(0.5)
    return a, b, v, scores.astype(np.float16).astype(np.float64) @ v.astype(np.float64)


def pipelined(fault: str, seed: int) -> str:
    """Run the kernel with two tiles in flight; say what is wrong with it, "" if nothing is."""
    a, b, v, expected = pipelined_problem()
    workspace = np.zeros(3 * 2 * 32 * 32 * 6, dtype=np.uint8)
    out = np.zeros((96, 64), dtype=np.float32)
    tensors = (read(a), read(b), read(v), write(workspace, "workspace"), write(out))
    result = launch(pipelined_kernel(), 3, *tensors, NAMES.index(fault), seed=seed)
    if result.violations:
        return result.violations[0]
    same = np.allclose(out, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    return "" if same else "wrong result"


def test_a_kernel_with_two_tiles_in_flight_keeps_the_rules_in_any_order_of_the_cores() -> None:
    assert [pipelined("None", seed) for seed in range(100)] == [""] * 100


@pytest.mark.parametrize("fault", NAMES[1:])
def test_a_single_fault_is_noticed_in_any_order_of_the_cores(fault: str) -> None:
    assert all(pipelined(fault, seed) for seed in range(5))


@pytest.mark.parametrize(("dtype", "steps"), [("half", 8 * 8 * 8), ("float", 8 * 8 * 32)])
def test_cycles_are_those_of_the_documented_model(dtype: str, steps: int) -> None:
    a = np.ones((128, 128), dtype=np.float16 if dtype == "half" else np.float32)
    c = np.zeros((128, 128), dtype=np.float32)
    result = launch(
        kernel(f"{dtype}_straight"), 1, read(a), read(a.copy()), write(c), *a.shape, 128
    )

    (core,) = result.counters.cores
    loads = 8 + 128 * a.itemsize // 32  # one for each row of fractals of a, and depth of b
    assert core.busy_cycles["M"] == 8 + steps
    assert core.busy_cycles["MTE1"] == 4 * loads + a.nbytes // 256 + a.nbytes // 128
    assert core.busy_cycles["MTE2"] == 2 * (24 + ceil(128 * 1.7 + a.nbytes / 35.5))
    assert core.busy_cycles["FIX"] == 24 + ceil(c.nbytes / 86)
    assert core.total_cycles > sum(core.busy_cycles[p] for p in ("MTE2", "MTE1", "M", "FIX"))


def test_the_second_reader_of_a_line_finds_it_in_l2() -> None:
    """Both groups read all of b; only the first one takes it from HBM."""
    first, second = doubled(2)[1].counters.of_kind(cube=True)
    assert {first.hbm_bytes, second.hbm_bytes} == {16 * 64 * 2, (16 + 48) * 64 * 2}
    assert first.gm_l1_bytes == second.gm_l1_bytes
    late, early = sorted((first, second), key=lambda core: core.hbm_bytes)
    assert late.busy_cycles["MTE2"] < early.busy_cycles["MTE2"]
