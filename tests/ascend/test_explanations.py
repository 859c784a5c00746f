"""What the first runs on an NPU are told: of arguments, of differences, of errors."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch

from paged_ops.ascend import echo, ladder, report, runtime
from paged_ops.ascend.comparison import compare
from paged_ops.ascend.echo import Answers
from paged_ops.ascend.finding import Finding
from paged_ops.ascend.processes import Ended, run

HEADER = Path(__file__).resolve().parents[2] / "op_kernel" / "echo_arguments_tiling_data.h"
BASE = 0x12C040000000


# The kernel that writes back its arguments


def answered(cores: int = 6, buffer: int = echo.TARGET) -> Answers:
    """Return what so many cores write if all is well, in that buffer."""
    answers = Answers(echo.new_buffers(), BASE, cores)
    for core in range(cores):
        words = [echo.MARK, core, cores, *answers.addresses(), BASE + 2**20]
        words += [echo.WORD, echo.WORD + 1, echo.WORD + 2]
        answers.records[buffer, core, : len(words)] = torch.tensor(words)
    return answers


def test_the_sizes_of_the_answer_are_those_of_the_kernel() -> None:
    constants = dict(re.findall(r"constexpr int64_t k(\w+) = (\w+);", HEADER.read_text()))
    assert int(constants["EchoBuffers"]) == echo.BUFFERS
    assert int(constants["EchoMostCores"]) == echo.MOST_CORES
    assert int(constants["EchoWords"]) == echo.WORDS
    assert int(constants["EchoMark"], 16) == echo.MARK


def test_arguments_in_their_places_pass() -> None:
    assert echo.explain(answered()) == Finding("passed", "6 cores answered, 6 were launched")


def test_arguments_that_arrive_one_place_later_are_called_that() -> None:
    finding = echo.explain(answered(buffer=1))
    assert finding.outcome == "wrong"
    assert finding.said == "the answer is in buffer 2, expected 3"
    assert finding.explanation.startswith("Every argument arrives one place later")
    assert "built in cce mode" in finding.explanation
    assert "-x asc --aicore-only" in finding.explanation


@pytest.mark.parametrize(("buffer", "shift"), [(0, "+2"), (3, "-1")])
def test_arguments_in_other_places_are_said_to_be_there(buffer: int, shift: str) -> None:
    assert f"({shift})" in echo.explain(answered(buffer=buffer)).explanation


def test_an_answer_in_two_buffers_is_said_to_be_in_both() -> None:
    answers = answered()
    answers.records[0] = answers.records[2]
    finding = echo.explain(answers)
    assert "buffer 1, 3" in finding.said
    assert "several ways" in finding.explanation


def test_no_answer_is_said_to_be_none() -> None:
    finding = echo.explain(Answers(echo.new_buffers(), BASE, 6))
    assert (finding.outcome, finding.said) == ("wrong", "no core answered")


@pytest.mark.parametrize("cores", [3, 5, 7, 12])
def test_other_cores_than_were_launched_point_to_the_kernel_s_type(cores: int) -> None:
    finding = echo.explain(answered(cores)._replace(launched=6))
    assert f"{cores} cores answered, 6 were launched" in finding.said
    assert "Its type" in finding.explanation


def test_a_wrong_pointer_and_a_wrong_tiling_are_told_apart() -> None:
    pointer, tiling = answered(), answered()
    pointer.records[2, 3, 4] += 64
    tiling.records[2, 3, 9] = 0
    assert "core 3 was given 0x12c040000000, " in echo.explain(pointer).said
    assert "Pointers don't arrive" in echo.explain(pointer).explanation
    assert "core 3 read [1000, 0, 1002]" in echo.explain(tiling).said
    assert "the tiling doesn't" in echo.explain(tiling).explanation


# Differences

NOTHING = torch.full((8, 4), torch.nan)
WANT = torch.arange(1.0, 33.0).view(8, 4)


@pytest.mark.parametrize("bound", [0.0, 1e-3])
def test_the_same_values_pass(bound: float) -> None:
    assert compare(WANT.clone(), WANT, NOTHING, bound).passed


def test_a_difference_up_to_the_bound_passes_and_one_beyond_it_is_nearly_right() -> None:
    assert compare(WANT * 1.0009, WANT, NOTHING, 1e-3).passed
    finding = compare(WANT * 1.004, WANT, NOTHING, 1e-3)
    assert not finding.passed
    assert "may be too tight" in finding.explanation
    assert "may be too tight" not in compare(WANT * 1.009, WANT, NOTHING, 1e-3).explanation


def test_a_result_that_was_never_written_is_said_to_be_that() -> None:
    finding = compare(NOTHING, WANT, NOTHING, 1e-3)
    assert "32 of 32 elements are wrong, in rows 0 to 7 of 8" in finding.said
    assert "nothing was written" in finding.explanation


def test_rows_that_were_never_written_are_named() -> None:
    got = WANT.clone()
    got[[2, 3, 6]] = torch.nan
    assert "Rows 2 to 3, 6 were never written" in compare(got, WANT, NOTHING, 0).explanation


def test_what_was_to_be_written_here_and_there_and_was_not_is_said_to_be_that() -> None:
    before = torch.zeros(8, 4)
    want = before.clone()
    want[:, 2] = 1.0
    assert "nothing was written" in compare(before.clone(), want, before, 0).explanation


def test_rows_that_should_not_have_been_written_are_named() -> None:
    before = torch.zeros(8, 4)
    want = before.clone()
    want[1] = 1.0
    got = want.clone()
    got[5, 2] = 1.0
    assert "Rows 5 were changed" in compare(got, want, before, 0).explanation


def test_an_element_that_is_due_and_the_same_by_chance_is_not_a_row_that_had_to_stay() -> None:
    before = torch.zeros(8, 4)
    want = torch.ones(8, 4)
    want[3, 1] = 0.0
    assert "with wrong values" in compare(want + 2, want, before, 0).explanation


def test_nan_among_written_values_points_to_synchronisation() -> None:
    got = WANT.clone()
    got[2, 1] = torch.nan
    assert "read before it was written" in compare(got, WANT, torch.zeros(8, 4), 1e-3).explanation


def test_wrong_values_are_called_wrong() -> None:
    assert "with wrong values" in compare(WANT.flip(0), WANT, NOTHING, 1e-3).explanation


def test_infinities_in_their_places_pass_and_elsewhere_do_not() -> None:
    want = WANT.clone()
    want[0, 0] = -torch.inf
    assert compare(want.clone(), want, NOTHING, 1e-3).passed
    assert not compare(WANT, want, NOTHING, 1e-3).passed


# Errors, processes, the report


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("aclrtLaunchKernelWithConfig returned 507035: ...", "A vector core stopped"),
        ("error code is 507015", "A cube core stopped"),
        ("aclrtBinaryGetFunction returned 507027", "no function of that name"),
        ("there is no NPU kernel at /a/b.o: build", "built without kernels"),
        ("No module named 'torch_npu'", "torch_npu isn't installed"),
        ("returned 5070351", ""),
        ("something else", ""),
    ],
)
def test_the_runtime_s_errors_are_explained(said: str, meant: str) -> None:
    meaning = runtime.meaning(said)
    assert meant in meaning
    assert bool(meaning) == bool(meant)


def test_a_program_that_takes_too_long_is_killed_with_what_it_started() -> None:
    code = "import os, time; os.fork(); print('there', flush=True); time.sleep(60)"
    start = time.monotonic()
    ended = run([sys.executable, "-c", code], 2)
    assert time.monotonic() - start < 30  # its child has its output open
    assert ended.code is None
    assert "there" in ended.output


def test_a_program_that_is_not_there_is_said_not_to_be() -> None:
    assert run(["no-such-program"], 1).code == 127


def test_a_process_that_dies_is_told_from_one_that_hangs() -> None:
    code = "import os; os.kill(os.getpid(), 11)"
    ended = run([sys.executable, "-c", code], 30)
    assert ended.code == -11
    assert ladder.without_answer(ended, 60, "why").outcome == "died"
    hung = ladder.without_answer(Ended(None, ""), 60, "why")
    assert (hung.outcome, hung.explanation) == ("hung", "why")


def test_a_report_can_be_read_by_people_and_programs() -> None:
    about = report.machine()
    row = report.Row("write_kv", "copies work", Finding("wrong", "said", "why " * 60), 1.5, "log")
    text = report.text(about, [row])
    assert re.search(r"^write_kv +wrong +1\.5$", text, re.M)
    assert re.search(r"^  \| log$", text, re.M)
    assert max(map(len, text.split("npu-smi info")[0].splitlines()[8:])) < 300
    data = report.read(text)
    assert data["torch"] == torch.__version__
    assert data["steps"][0]["explanation"] == "why " * 60
