"""Scalar instructions are counted, and counting them changes nothing."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sim import build, counting, kernel_calls
from tests.sim.cases import CASES, make_case
from tests.sim.counting import CoreCount, Instrumenter
from tests.sim.harness import HERE, Kernel, count, launch
from tests.sim.kernel_calls import OP_KERNEL
from tests.sim.scalar import by_line, count_case, standard_case

pytestmark = pytest.mark.skipif(not counting.is_possible(), reason="the counters are for x86-64")

# Adds the words of a number of 128 bits to another one, n times: the carry lives across a label
# and a jump. 5 instructions a round, 4 around the rounds.
LONG_SUM = """
	.text
	.globl	long_sum
long_sum:
	.file 1 "/kernel/sum.h"
	.loc 1 7
	movq	%rsi, %rcx
	xorl	%eax, %eax
	xorl	%edx, %edx
.L1:
	.loc 1 8
	addq	%rdi, %rax
.L2:
	adcq	$1, %rdx
	leaq	-1(%rcx), %rcx
	jrcxz	.L3
	jmp	.L1
.L3:
	.loc 1 9
	movq	%rdx, %rax
	ret
"""


def test_a_counter_counts_each_instruction_and_keeps_the_flags(tmp_path: Path) -> None:
    instrumenter = Instrumenter([Path("/kernel")])
    (tmp_path / "sum.s").write_text(instrumenter.run(LONG_SUM))
    build.run((build.CXX, "-shared", tmp_path / "sum.s", "-o", tmp_path / "sum.so"))
    library = ctypes.CDLL(str(tmp_path / "sum.so"))
    library.long_sum.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
    # 10 sums of 2^63 carry 5 times, beside the 10 ones.
    assert library.long_sum(2**63, 10) == 15
    total = ctypes.c_uint64.in_dll(library, "sim_counted_total")
    assert total.value == 3 + 10 * 5 - 1 + 2
    lines = [set(segment) for segment in instrumenter.segments]
    assert lines[0] == {"sum.h:7"}
    assert lines[-1] == {"sum.h:9"}


def test_a_call_of_what_is_not_counted_is_refused() -> None:
    own = "here:\n\tcall\thidden\n\tcall\tother\nhidden:\n\tret\n\t.set\tother,hidden\n"
    assert "call\tother" in Instrumenter([]).run(own)
    with pytest.raises(ValueError, match="nobody counts the instructions of memcpy"):
        Instrumenter([]).run(own + "\tcall\tmemcpy@PLT\n")


def rounds(n: int) -> CoreCount:
    (core,) = count(Kernel(HERE / "kernels" / "scalar.cpp", "rounds"), 1, n)
    return core


def test_what_lies_between_two_instructions_is_counted_there() -> None:
    one, two, three = rounds(1000), rounds(2000), rounds(3000)
    each = (two.instructions - one.instructions) // 1000
    assert 3 <= each <= 4
    assert three.instructions == one.instructions + 2000 * each
    first, second = (one.trace & 0xFFFFFFFF).astype(np.int64)
    assert 1000 * each <= second - first <= 1000 * each + 8
    assert set(one.trace >> 32) == {5}


def test_a_call_is_counted_by_core_and_line() -> None:
    kinds = count_case(standard_case("decode-16x2048"))
    assert {kind: len(cores) for kind, cores in kinds.items()} == {"cube": 24, "vector": 48}
    for cores in kinds.values():
        lines = by_line(cores)
        assert sum(lines.values()) == sum(core.instructions for core in cores)
        assert "?" not in lines
        for place in lines:
            file, _, line = place.rpartition(":")
            assert 1 <= int(line) <= len((OP_KERNEL / file).read_text().splitlines())


@pytest.mark.parametrize("wanted", ["mixed", "vector"])
@pytest.mark.parametrize("name", CASES)
def test_a_launch_issues_what_was_counted(name: str, wanted: str) -> None:
    case = make_case(torch.float16, **CASES[name])
    how = partial(launch, counted=True)
    run = kernel_calls.attention(*case.tensors, **case.options, wanted=wanted, how=how)
    assert run.result.violations == ()
    for core, counted in zip(run.result.counters.cores, run.result.scalar, strict=True):
        assert core.scalar_instructions == counted.instructions > 0
        # Only scalar accesses to GM add to that.
        assert core.busy_cycles["S"] >= counted.instructions
