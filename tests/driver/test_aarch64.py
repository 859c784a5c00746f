"""The aarch64 kernels: cross-compiled, run under an emulator, held against the reference."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.driver import calls
from tests.driver.build import ROOT, folder, program
from tests.driver.calls import Call, Results
from tests.driver.suite import CHECKS, Check
from tests.support.checks import assert_accurate
from tests.support.sequences import DTYPES, Placement, make_sequences, place

MACHINE = "aarch64"
TOOLS = "aarch64-linux-gnu-"
QEMU = "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian's cross compiler has those of the machine
ISAS = ("generic", "neon", "neonbf16")

missing = [tool for tool in (TOOLS + "g++", QEMU) if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(missing),
    reason=f"no {' and no '.join(missing)}: Debian has them in g++-aarch64-linux-gnu and qemu-user",
)
each_isa = pytest.mark.parametrize("isa", ISAS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def driver() -> Path:
    build = [sys.executable, "-m", "tests.driver.build", MACHINE, TOOLS + "g++"]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "warning" not in result.stdout
    return program(MACHINE)


def emulated(driver: Path, cpu: str) -> list[str]:
    """Return the command that runs the driver on an emulated processor."""
    return [QEMU, "-L", LIBRARIES, "-cpu", cpu, str(driver)]


def run(driver: Path, made: list[Call], isa: str) -> list[Results]:
    """Make the calls on a processor that has everything."""
    chosen, results = calls.run(emulated(driver, "max"), made, isa)
    assert chosen == isa
    return results


@each_isa
@each_dtype
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels(driver: Path, isa: str, dtype: torch.dtype, check: Check) -> None:
    check(lambda made: run(driver, made, isa), dtype)


def subnormal(dtype: torch.dtype) -> Tensor:
    """Return every subnormal number of a 16-bit dtype, and the numbers around them."""
    bits = torch.arange(0, 2048, dtype=torch.int16)
    return torch.cat([bits, bits - 2**15]).view(dtype)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_values_come_out_as_they_went_in(driver: Path, isa: str, dtype: torch.dtype) -> None:
    # One key has the weight 1, so the output is the value, by way of float32.
    values = subnormal(dtype).view(1, 1, -1)
    made = make_sequences((1,), num_heads=1, head_dim=4, head_dim_v=values.numel(), dtype=dtype)
    made = replace(made, values=(values,))
    [(output, _)] = run(driver, [calls.attention(place(made, Placement()))], isa)
    assert torch.equal(output, values)


@pytest.mark.parametrize(
    ("cpu", "isa"), [("cortex-a53", "generic"), ("cortex-a76", "neon"), ("max", "neonbf16")]
)
def test_the_best_variant_that_the_machine_runs_is_chosen(driver: Path, cpu: str, isa: str) -> None:
    made = make_sequences((40,), dtype=torch.bfloat16)
    call = calls.attention(place(made, Placement()))
    chosen, [result] = calls.run(emulated(driver, cpu), [call], "neonbf16")
    assert chosen == isa
    assert_accurate(made, *result)


def objects() -> dict[str, Path]:
    """Return the object file of attention for each variant."""
    return {isa: folder(MACHINE) / f"cpu.attention.isa.{isa}.o" for isa in ISAS}


def test_the_variants_differ_in_the_instructions_they_use(driver: Path) -> None:
    text = {
        isa: subprocess.check_output([TOOLS + "objdump", "-d", str(path)], text=True)
        for isa, path in objects().items()
    }
    assert "bfmmla" in text["neonbf16"]
    assert "bfcvtn" in text["neonbf16"]
    for isa in ("generic", "neon"):
        assert "bfmmla" not in text[isa]
    assert "fmla" in text["neon"]
    assert "fmla" not in text["generic"]


def test_a_variant_exports_nothing_that_another_could_replace(driver: Path) -> None:
    for path in objects().values():
        symbols = subprocess.check_output([TOOLS + "nm", str(path)], text=True).splitlines()
        assert [line for line in symbols if line.split()[-2] in "WVu"] == []
