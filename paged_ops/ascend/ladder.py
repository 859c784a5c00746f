"""All steps, one after another."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import paged_ops
from paged_ops.ascend import cann
from paged_ops.ascend.finding import Finding
from paged_ops.ascend.processes import Ended, run
from paged_ops.ascend.report import Row
from paged_ops.ascend.steps import STEPS, Step

ROOT = Path(paged_ops.__file__).parents[1]
START = 120.0
"""Seconds that a process may take beside what the device may: to import torch, to be killed."""

BUILD_LIMIT = 3600.0
TESTS_LIMIT = 7200.0
OP_TESTS = tuple(
    f"tests/ops/test_{name}.py"
    for name in ("write_kv", "copy_blocks", "merge_states", "attention", "bad_input")
)
NEEDED = ("device", "arguments")
"""Steps without which no later one can be right."""


def climb(limit: float, tests: tuple[str, ...], compares: bool) -> Iterator[Row]:
    """Run all steps.

    Parameters
    ----------
    limit
        Seconds that the device may take for one step.
    tests
        Files of op tests; they run where the tests of the source tree are. None of them: none run.
    compares
        Whether to time attention beside torch_npu's own.

    Yields
    ------
    Row
        Each step when it has ended.
    """
    yield _timed("build", "the build of the kernels", build)
    missing = None
    for step in STEPS:
        if missing is None:
            row = try_step(step, limit)
            yield row
            if step.name in NEEDED and not row.finding.passed:
                missing = step.name
        else:
            said = f'"{missing}" didn\'t pass'
            finding = Finding("not run", said, "Without it no later step can be right.")
            yield Row(step.name, step.shows, finding, 0.0)
    if missing is None:
        if tests:
            shows = "all that the tests of the ops ask"
            yield _timed("op tests", shows, lambda: op_tests(tests))
        if compares:
            yield _timed("benchmark", "times of attention", benchmark)


def try_step(step: Step, limit: float) -> Row:
    """Run a step in a process of its own."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "finding.json"
        command = [sys.executable, "-m", "paged_ops.ascend.run_step"]
        ended = run(
            [*command, step.name, str(limit), str(file)],
            limit + START,
            variables={"PAGED_NPU_KERNEL": step.kernel},
        )
        if file.exists():
            finding = Finding(**json.loads(file.read_text()))
        else:
            finding = without_answer(ended, limit, step.if_hung)
    return Row(step.name, step.shows, finding, time.monotonic() - start, ended.output)


def without_answer(ended: Ended, limit: float, if_hung: str) -> Finding:
    """Explain a process that left no finding."""
    if ended.code is None:
        return Finding("hung", f"killed after {limit + START:.0f} s", if_hung)
    return Finding(
        "died",
        f"its process ended with {ended.code} and said nothing",
        "The runtime or torch_npu took the process down: the end of its output, and CANN's log in "
        "~/ascend/log, may say why.",
    )


def _timed(name: str, shows: str, find: Callable[[], tuple[Finding, str]]) -> Row:
    start = time.monotonic()
    finding, log = find()
    return Row(name, shows, finding, time.monotonic() - start, log)


def build() -> tuple[Finding, str]:
    """Look at the build, and make it where there are sources and a CANN but no kernels."""
    said = paged_ops.backend_info().npu
    if elsewhere := os.environ.get("PAGED_KERNELS"):
        return Finding("passed", f"PAGED_KERNELS names other kernels: {elsewhere}"), ""
    if said.startswith("built for "):
        return Finding("passed", said), ""
    reason = cann.why_not()
    if reason is not None:
        return Finding("error", said, f"Kernels can't be compiled here: {reason}."), ""
    if not (ROOT / "setup.py").exists():
        return Finding(
            "error",
            said,
            "This package was installed without kernels. Install it from the sources where "
            "ASCEND_HOME_PATH is set: pip install --no-build-isolation .",
        ), ""
    ended = run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        BUILD_LIMIT,
        variables={"VERBOSE": "1"},
        folder=ROOT,
    )
    said = paged_ops.backend_info().npu
    if ended.code == 0 and said.startswith("built for "):
        return Finding("passed", said), ended.output
    return Finding(
        "error",
        f"setup.py build_ext ended with {ended.code}",
        "The compiler's message, or what an object lacks, is at the end of the output. A source or "
        "an option that the compiler refuses is the first thing to report.",
    ), ended.output


def op_tests(files: tuple[str, ...]) -> tuple[Finding, str]:
    """Run the op tests on the device, where they and pytest are."""
    if not (ROOT / "tests" / "npu_plugin.py").exists() or find_spec("pytest") is None:
        return Finding("not run", "the tests of the source tree, or pytest, aren't here"), ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.npu_plugin", *files]
    ended = run(command, TESTS_LIMIT, folder=ROOT)
    lines = ended.output.strip().splitlines() or [""]
    said = next((line for line in reversed(lines) if " passed" in line or " failed" in line), "")
    if ended.code == 0:
        return Finding("passed", said), ended.output
    if ended.code is None:
        return Finding("hung", f"killed after {TESTS_LIMIT:.0f} s"), ended.output
    return Finding(
        "wrong",
        said or f"pytest ended with {ended.code}",
        "Each failed test says what it expected. Where small steps pass and these don't, a shape "
        "or an option is the difference.",
    ), ended.output


def benchmark() -> tuple[Finding, str]:
    """Time attention beside torch_npu's own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        command = [sys.executable, "-m", "paged_ops.ascend.versus", str(file)]
        ended = run(command, BUILD_LIMIT)
        if ended.code == 0 and file.exists():
            return Finding("passed", file.read_text().rstrip()), ended.output
    return without_answer(ended, BUILD_LIMIT, ""), ended.output
