"""The programs of docs/examples: each runs, and prints what shows its point."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import npu_environment as environment

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
LONGEST = 79  # lines of an example that is read whole


def run_here(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example in this process, which has imported torch already; return what it prints."""
    torch.set_num_threads(1)  # its products are too small to share
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def run_apart(name: str) -> str:
    """Run an example in a process of its own; return what it prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_from_scratch_finds_prefixes_and_survives_a_full_pool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps, found, preemptions = map(
        int, re.findall(r"\d+", run_here("engine_from_scratch", capsys))
    )
    assert found > 0
    assert preemptions > 0
    assert steps < 5 * 27  # tokens of all the answers


def test_a_shared_prefix_is_computed_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    printed = run_here("shared_prefix", capsys)
    found = re.search(r"tokens computed: (\d+), without sharing (\d+)", printed)
    assert found is not None
    assert int(found[1]) < int(found[2]) / 2


def test_a_tree_of_candidates_saves_calls_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    printed = run_here("tree_speculation", capsys)
    found = re.search(r"(\d+) tokens in (\d+) calls of the model", printed)
    assert found is not None
    assert int(found[2]) < int(found[1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_one_compiled_graph_serves_every_batch() -> None:
    printed = run_apart("compiled_decode")
    assert "graphs compiled: 1\n" in printed
    assert " 1 requests" in printed


def test_a_quantised_cache_is_smaller_and_about_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    printed = run_here("quantised_cache", capsys)
    size = {
        match[1]: int(match[2])
        for match in re.finditer(r"^(.*?) +(\d+) +\d+\.\d+ +\d+\.\d+$", printed, re.M)
    }
    per_head, per_token = size["int8, per head"], size["int8, per token and head"]
    assert per_head < per_token < size["bfloat16, model as well"] < size["float32"]


def test_a_request_goes_on_in_another_process() -> None:
    pytest.importorskip("safetensors")
    printed = run_apart("two_ranks")
    assert "rank 0: 14 tokens computed and sent, 0 blocks kept\n" in printed
    assert "32 tokens, the same as in one process\n" in printed


@pytest.mark.skipif(
    not environment.is_simulated(), reason=environment.why_not() or "the NPU here is a real one"
)
def test_the_example_for_npu_tensors_runs_on_the_simulated_device() -> None:
    assert "34 rows on " in run_apart("npu")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_example_is_short_and_has_its_place_in_the_manual(path: Path) -> None:
    assert f"(examples/{path.name})" in (ROOT / "docs" / "examples.md").read_text("utf-8")
    if path.stem != "serve":
        assert len(path.read_text("utf-8").splitlines()) <= LONGEST
