"""Break the simulated device on purpose, in one place at a time, and see that its tests notice.

``python -m tests.sim.device_mutations`` makes the mutants in a copy of the tests, one after the
other, builds the device and runs the tests of its rules or of its model there. The exit code is the
number of mutants that none of them noticed: a rule that isn't enforced, a cost that nobody pays.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.sim.build import ROOT
from tests.support.mutants import WORDS, Mutant, apply, chosen

SIMULATOR = Path("tests/sim/ascendc")
_PIPE, _DEVICE, _CORE = "src/pipe.cpp", "src/device.cpp", "src/core.cpp"
_TRANSFER, _LANES, _MODEL = "src/transfer.cpp", "src/lanes.cpp", "src/model.h"
_COUNTED = "include/ascendc_sim/counted.h"

# By the tests that notice: a module of tests/sim, and which of its tests.
MUTANTS: dict[tuple[str, str], tuple[Mutant, ...]] = {
    ("test_rules", "pipes or state_their_type"): (
        Mutant(
            "a cube core's TPipe sets no flags",
            _PIPE,
            "if (core.place.kind == Kind::kCube) SetPipeEvents(core, site);",
            "",
        ),
        Mutant(
            "a cube core's TPipe doesn't wait for its flags",
            _PIPE,
            '    if (!flag.set) {\n      Report(site, "event-wait",\n             "the TPipe',
            '    if (false) {\n      Report(site, "event-wait",\n             "the TPipe',
        ),
        Mutant(
            "a cube core's TPipe holds one id less",
            _MODEL,
            "kPipeEvents = 3;",
            "kPipeEvents = 2;",
        ),
        Mutant(
            "the ids of a TPipe are given to others",
            _PIPE,
            "    core.taken[event] = static_cast<uint8_t>(core.taken[event] | (1 << id));\n"
            "    core.flags",
            "    core.flags",
        ),
        Mutant(
            "no kernel needs to state its type",
            _DEVICE,
            "if (core.kernel_type < 0) {",
            "if (false) {",
        ),
    ),
    ("test_model", ""): (
        Mutant("a row costs its bytes alone", _TRANSFER, "starts_ + bytes_;", "bytes_;"),
        Mutant(
            "rows side by side come as one",
            _TRANSFER,
            "start * static_cast<double>(rows);",
            "start;",
        ),
        Mutant("lines of GM don't matter", _TRANSFER, "* LineFactor(address, bytes);", "* 1.0;"),
        Mutant("a line of GM has 256 bytes", _MODEL, "kGmLine = 512;", "kGmLine = 256;"),
        Mutant(
            "writes are as fast as reads",
            _TRANSFER,
            "(write_ ? kL2WriteOfCube : kL2ReadOfCube)",
            "kL2ReadOfCube",
        ),
        Mutant(
            "what L2 holds comes from HBM",
            _TRANSFER,
            "from_hbm / hbm + std::max(moved - from_hbm, 0.0) / l2",
            "moved / hbm",
        ),
        Mutant("short writes are free of starts", _TRANSFER, "std::max(starts_, bytes_)", "bytes_"),
        Mutant(
            "a vector core reads as fast as a cube core",
            _TRANSFER,
            "cube ? kHbmReadOfCube : kHbmReadOfVector",
            "kHbmReadOfCube",
        ),
        Mutant(
            "GM follows the cores' clock",
            _TRANSFER,
            "std::ceil(GmCycles(cycles))",
            "std::ceil(cycles)",
        ),
        Mutant("banks of UB don't collide", _LANES, "conflicts += shared;", ""),
        Mutant(
            "a block collides with itself", _LANES, "other >= 0 && other != block", "other >= 0"
        ),
        Mutant("there are 8 groups of banks", _MODEL, "kBankGroups = 16;", "kBankGroups = 8;"),
        Mutant(
            "a reduction costs as much as an addition",
            _MODEL,
            "kWholeReduceCycles = 5;",
            "kWholeReduceCycles = 1;",
        ),
        Mutant(
            "a launch starts at once",
            _DEVICE,
            "std::max(d.counters.total_cycles, launch + end)",
            "std::max(d.counters.total_cycles, end)",
        ),
        Mutant(
            "counted scalar instructions take no time",
            _CORE,
            "(up_to - core.trace.done) * kScalarCycles",
            "0",
        ),
        Mutant(
            "a launch may go another way than the count",
            _DEVICE,
            "if (core.trace.differs) {",
            "if (false) {",
        ),
    ),
    ("test_cube", "images"): (
        Mutant(
            "the filter of an image stands still",
            "src/load.cpp",
            "row % places_w_ * shape_.stride_w +",
            "row % places_w_ +",
        ),
        Mutant(
            "rows of an image lie in L0B as in L0A",
            "src/load.cpp",
            "row % kSide, to_b);",
            "row % kSide, false);",
        ),
    ),
    ("test_counting", "between_two_instructions or issues_what_was_counted"): (
        Mutant(
            "a barrier is counted twice",
            _COUNTED,
            "{ SIM_EVENT(5, 1); }",
            "{ SIM_EVENT(5, 1); SIM_EVENT(5, 1); }",
        ),
        Mutant(
            "a queue's call isn't issued where it is counted",
            _COUNTED,
            "SIM_COUNTED LocalView QueueDeque(int id, Site) {\n  SIM_EVENT(2, 0);",
            "SIM_COUNTED LocalView QueueDeque(int id, Site) {",
        ),
        Mutant(
            "lengths read as nothing where instructions are counted",
            _COUNTED,
            "  __builtin_memcpy(out, reinterpret_cast<const void*>(view.addr), "
            "static_cast<size_t>(bytes));",
            "  __builtin_memset(out, 0, static_cast<size_t>(bytes));",
        ),
    ),
}


def failures(tests: tuple[str, str], folder: Path) -> str:
    """Run tests in a copy; return the first line of their verdict, "" if they pass."""
    module, which = tests
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--no-header", f"tests/sim/{module}.py", *(["-k", which] if which else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split("::")[-1].split(" - ")[0] if failed else f"exit code {done.returncode}"


def judge(tests: tuple[str, str], mutant: Mutant, folder: Path) -> str:
    """Say which test noticed a mutant, or "" if none did; `folder` is as it was afterwards."""
    path = folder / SIMULATOR / mutant.file
    text = path.read_text(encoding="utf-8")
    apply(mutant, folder / SIMULATOR)
    try:
        return failures(tests, folder)
    finally:
        path.write_text(text, encoding="utf-8")


def copy_of_the_sources(folder: Path) -> None:
    for name in ("tests", "op_kernel", "op_host", "paged_ops"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def main() -> None:
    """Judge every mutant, or those that are named, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.device_mutations")
    parser.add_argument("words", nargs="*", help=WORDS)
    wanted = chosen(MUTANTS, parser.parse_args().words)
    missed = 0
    print("| mutant of the simulated device | noticed by |\n|---|---|")
    # One copy for all, so that each mutant builds only what it changes.
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        copy_of_the_sources(folder)
        for tests, mutants in wanted.items():
            if verdict := failures(tests, folder):
                sys.exit(f"{tests[0]} as it is: {verdict}")
            for mutant in mutants:
                verdict = judge(tests, mutant, folder)
                missed += not verdict
                print(f"| {mutant.fault} | {verdict or 'NOTHING'} |", flush=True)
    total = sum(map(len, wanted.values()))
    print(f"\n{total - missed} of {total} noticed")
    sys.exit(missed)


if __name__ == "__main__":
    main()
