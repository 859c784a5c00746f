"""The tests of tests/ranks on 2 and on 4 processes of this machine, started by torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_tests_of_several_ranks_pass_under_torchrun(num_ranks: int, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    logs = ("--redirects", "3", "--log-dir", str(tmp_path))
    tests = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/ranks")
    done = subprocess.run(
        [*torchrun, *logs, "--nproc-per-node", str(num_ranks), *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    outputs = [path.read_text() for path in sorted(tmp_path.rglob("stdout.log"))]
    assert done.returncode == 0, done.stderr + "".join(outputs)
    assert [" passed" in output for output in outputs] == [True] * num_ranks
