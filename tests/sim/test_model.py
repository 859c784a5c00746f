"""The cycle model: what each instruction takes, as docs/simulated-device.md states it."""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np
import pytest

from tests.sim import counting
from tests.sim.harness import HERE, CoreCounters, Kernel, Result, configured, launch, read, write

HERTZ = 1.8e9
counted = pytest.mark.skipif(not counting.is_possible(), reason="the counters are for x86-64")


@cache
def kernel(name: str, source: str = "model") -> Kernel:
    return Kernel(HERE / "kernels" / f"{source}.cpp", name)


def only_core(result: Result) -> CoreCounters:
    assert result.violations == ()
    (core,) = result.counters.cores
    return core


def to_l1(rows: int, width: int, stride: int) -> int:
    halves = np.zeros(rows * stride, np.float16)
    core = only_core(launch(kernel("rows_to_l1"), 1, read(halves), rows, width, stride))
    assert core.hbm_bytes == 2 * rows * width
    return core.busy_cycles["MTE2"]


# The rows' bytes, and what 24 cores together then read in a second.
@pytest.mark.parametrize(("row_bytes", "speed"), [(128, 1.065e12), (256, 1.27e12), (512, 1.41e12)])
def test_a_row_to_l1_takes_a_start_and_its_bytes_side_by_side_or_not(
    row_bytes: int, speed: float
) -> None:
    rows, width = 256, row_bytes // 2
    cycles = to_l1(rows, width, stride=width)
    assert cycles == 24 + ceil(rows * (1.7 + row_bytes / 35.5))
    assert cycles == to_l1(rows, width, stride=4 * width)
    assert 24 * HERTZ * row_bytes * rows / cycles == pytest.approx(speed, rel=0.05)


def to_ub(rows: int, row_bytes: int, gap: int, *, offset: int = 0, times: int = 1) -> CoreCounters:
    memory = np.zeros(offset + rows * (row_bytes + gap), np.uint8)
    sizes = (rows, row_bytes, gap, offset, times)
    return only_core(launch(kernel("rows_to_ub"), 1, read(memory), *sizes))


@pytest.mark.parametrize(("row_bytes", "speed"), [(128, 1.37e12), (2048, 1.49e12)])
def test_rows_to_ub_come_at_the_published_speed(row_bytes: int, speed: float) -> None:
    rows = 131072 // row_bytes
    cycles = to_ub(rows, row_bytes, gap=2048).busy_cycles["MTE2"]
    assert cycles == 24 + ceil(rows * (0.7 + row_bytes / 17.3))
    assert 48 * HERTZ * row_bytes * rows / cycles == pytest.approx(speed, rel=0.02)


def test_what_l2_holds_comes_faster() -> None:
    once, twice = (to_ub(16, 4096, gap=0, times=times) for times in (1, 2))
    assert once.hbm_bytes == twice.hbm_bytes
    again = twice.busy_cycles["MTE2"] - once.busy_cycles["MTE2"]
    assert again == 24 + ceil(16 * 0.7 + 65536 / 55)


def test_rows_off_a_line_of_512_bytes_take_up_to_twice_as_long() -> None:
    on, off, far = (
        to_ub(64, 512, gap=512, offset=offset).busy_cycles["MTE2"] - 24 for offset in (0, 256, 512)
    )
    assert on == far == ceil(64 * (0.7 + 512 / 17.3))
    assert off == ceil(64 * (0.7 + 2 * 512 / 17.3))
    long = [to_ub(1, 65536, 0, offset=offset).busy_cycles["MTE2"] for offset in (0, 256)]
    assert 1 < long[1] / long[0] < 1.01


def from_ub(rows: int, row_bytes: int, gap: int, offset: int = 0) -> int:
    out = np.zeros(offset + rows * (row_bytes + gap), np.uint8)
    sizes = (rows, row_bytes, gap, offset)
    core = only_core(launch(kernel("rows_from_ub"), 1, write(out), *sizes))
    return core.busy_cycles["MTE3"] - 24


def test_writes_leave_for_l2_and_their_starts_hide_unless_they_are_short() -> None:
    assert from_ub(32, 2048, gap=0) == ceil(65536 / 43)
    assert from_ub(64, 128, gap=384) == 64 * 4
    assert from_ub(64, 512, gap=512, offset=256) == ceil(64 * 2 * 512 / 43)


def fixpipe(offset: int) -> int:
    out = np.zeros(offset + 65536, np.uint8)
    result = launch(kernel("results_to_gm"), 1, write(out), offset)
    return only_core(result).busy_cycles["FIX"] - 24


def test_64_kb_of_scores_leave_in_762_cycles_and_off_a_line_in_twice_that() -> None:
    assert fixpipe(0) == ceil(65536 / 86) == 763
    assert fixpipe(256) == ceil(2 * 65536 / 86)


def test_sources_in_one_group_of_banks_take_twice_as_long() -> None:
    def add(offset: int) -> tuple[int, int]:
        core = only_core(launch(kernel("sums_in_ub"), 1, 100, offset))
        return core.busy_cycles["V"], core.bank_conflicts

    apart, none = add(32 * 1024 + 256)
    assert none == 0
    assert add(32 * 1024) == add(32 * 1024 + 32) == (apart + 100, 100)
    assert add(0) == (apart, 0)  # one block for both


def test_a_reduction_within_a_repeat_takes_five_cycles() -> None:
    some, more = (
        only_core(launch(kernel("sums_of_repeats"), 1, repeats)).busy_cycles["V"]
        for repeats in (100, 200)
    )
    assert more - some == 5 * 100


def test_another_clock_changes_the_cores_and_not_gm() -> None:
    usual = to_ub(64, 2048, gap=0)
    with configured(clock_mhz=1500):
        slow = to_ub(64, 2048, gap=0)
        start = launch(kernel("sums_in_ub"), 1, 1, 256).counters
    cycles = 64 * (0.7 + 2048 / 17.3)
    assert usual.busy_cycles["MTE2"] == 24 + ceil(cycles)
    assert slow.busy_cycles["MTE2"] == 24 + ceil(cycles * 1500 / 1800)
    assert start.total_cycles == 5 * 1500 + start.cores[0].total_cycles


@counted
def test_counted_scalar_instructions_take_their_time() -> None:
    def rounds(n: int, *, how: bool = True) -> CoreCounters:
        return only_core(launch(kernel("rounds", "scalar"), 1, n, counted=how))

    some, more = rounds(1000), rounds(3000)
    extra = more.scalar_instructions - some.scalar_instructions
    assert extra in (3 * 2000, 4 * 2000)
    assert more.total_cycles - some.total_cycles == extra
    assert some.busy_cycles["S"] == some.scalar_instructions == some.total_cycles
    without = rounds(1000, how=False)
    assert (without.scalar_instructions, without.busy_cycles["S"]) == (0, 2 * 2)


@counted
def test_a_launch_that_goes_another_way_than_the_count_is_reported() -> None:
    (violation,) = launch(kernel("goes_by_the_clock"), 1, counted=True).violations
    assert "scalar: the core issued other instructions" in violation
    assert launch(kernel("goes_by_the_clock"), 1).violations == ()
