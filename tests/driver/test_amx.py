"""The kernels for Intel's matrix unit, with the unit emulated in software.

So they are tested on every machine that has the vector instructions beside it, whether or not it
has the unit. Speed, and what the silicon adds differently, are not.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.driver import calls
from tests.driver.build import ROOT, TILES, program
from tests.driver.calls import Call, Results
from tests.driver.suite import CHECKS, Check
from tests.support.sequences import DTYPES

flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not {"avx512_bf16", "avx512vbmi"} <= set(flags.split()),
    reason="no AVX-512 with BF16 and VBMI, which the kernels use beside the matrix unit",
)


@pytest.fixture(scope="module")
def driver() -> Path:
    build = [sys.executable, "-m", "tests.driver.build", TILES, "g++"]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "warning" not in result.stdout
    return program(TILES)


def run(driver: Path, made: list[Call]) -> list[Results]:
    chosen, results = calls.run([str(driver)], made, "amx")
    assert chosen == "amx"
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels(driver: Path, dtype: torch.dtype, check: Check) -> None:
    check(lambda made: run(driver, made), dtype)
