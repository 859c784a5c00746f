"""Every op under every ISA variant that this machine runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import paged_ops
from paged_ops.self_test import self_test
from tests.driver.build import ROOT
from tests.driver.calls import Call, Results
from tests.driver.suite import CHECKS
from tests.support.sequences import DTYPES


def by_op(made: list[Call]) -> list[Results]:
    return [call.by_op() for call in made]


def check_this_variant() -> None:
    """Hold each op against the reference, if this machine runs the variant that is asked for."""
    isa = paged_ops.backend_info().cpu_isa
    print(isa)
    if isa != os.environ["PAGED_CPU_ISA"]:
        return
    torch.set_num_threads(1)  # the cases are small
    failed = [finding.name for finding in self_test() if not finding.passed]
    assert not failed, failed
    for check in CHECKS:
        for dtype in DTYPES:
            check(by_op, dtype)


@pytest.mark.parametrize("isa", paged_ops.backend_info().cpu_isas)
def test_every_op_is_right_under_every_variant(isa: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from tests.ops import test_isas as t; t.check_this_variant()"],
        cwd=ROOT,
        env={**os.environ, "PAGED_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    if result.stdout.strip() != isa:
        pytest.skip(f"this machine cannot run {isa}")
