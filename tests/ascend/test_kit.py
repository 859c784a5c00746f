"""The first runs on an NPU, on the simulated one: all well, and with a fault at each step.

``python -m tests.npu_environment -m pytest tests/ascend/test_kit.py`` runs these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged_ops.ascend import ladder, report
from paged_ops.ascend.finding import Finding
from paged_ops.ascend.steps import STEPS
from tests import npu_environment as environment

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
BY_NAME = {step.name: step for step in STEPS}

pytestmark = [
    pytest.mark.skipif(
        not environment.is_simulated(), reason=environment.why_not() or "the NPU here is a real one"
    ),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def tried(name: str, limit: float = LIMIT) -> Finding:
    return ladder.try_step(BY_NAME[name], limit).finding


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with copies of the kernels' objects, from which they are loaded."""
    for path in environment.KERNELS.glob("*.o"):
        shutil.copy(path, tmp_path)
    monkeypatch.setenv("PAGED_KERNELS", str(tmp_path))
    return tmp_path


def test_where_all_is_well_each_step_passes_and_the_report_says_so(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    command = [sys.executable, "-m", "paged_ops.ascend", "--report", str(file), "--no-benchmark"]
    tests = ["--op-tests", "tests/ops/test_copy_blocks.py"]
    done = subprocess.run([*command, *tests], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    data = report.read(file.read_text())
    names = ["build", *BY_NAME, "op tests"]
    assert [step["name"] for step in data["steps"]] == names
    assert all(step["outcome"] == "passed" for step in data["steps"])
    assert data["torch_npu"].startswith("2.13.0")
    said = {step["name"]: step["said"] for step in data["steps"]}
    assert said["device"] == "Ascend910B1, 2 devices"
    assert said["arguments"] == "48 cores answered, 48 were launched"
    assert " passed" in said["op tests"]
    assert data["variables"]["PAGED_KERNELS"] == str(environment.KERNELS)


def test_arguments_that_arrive_one_place_later_end_the_climb_and_are_called_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGED_SIM_FAULT", "shifted:")
    rows = {row.name: row.finding for row in ladder.climb(LIMIT, ("tests/ops",), True)}
    assert rows["arguments"].said == "the answer is in buffer 2, expected 3"
    assert rows["arguments"].explanation.startswith("Every argument arrives one place later")
    assert "built in cce mode" in rows["arguments"].explanation
    after = [*BY_NAME][[*BY_NAME].index("arguments") + 1 :]
    assert [*rows] == ["build", *BY_NAME]  # neither op tests nor a benchmark
    assert {rows[name].outcome for name in after} == {"not run"}


@pytest.mark.parametrize(
    ("name", "kernel", "why"),
    [
        ("arguments", "paged_echo", "it isn't the one that runs"),
        ("write_kv", "paged_write_kv", "No core waits for another one here"),
        ("copy_blocks", "paged_copy_blocks", "Cores wait for each other"),
        ("merge_states", "paged_merge_states", "No core waits for another one here"),
        ("attention on vector cores", "paged_attention_float16", "No core waits for another one"),
        ("attention split over vector cores", "paged_attention_float16", "Cores wait for each"),
        ("attention on one group", "paged_attention_mixed", "each other's flags"),
        ("attention on all groups", "paged_attention_mixed", "One group alone was tried"),
    ],
)
def test_a_kernel_that_hangs_is_noticed_in_time_and_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: str, why: str
) -> None:
    # Without torch_npu's cache of memory, freeing a tensor waits for the device, without a limit.
    monkeypatch.delenv("PYTORCH_NO_NPU_MEMORY_CACHING")
    monkeypatch.setenv("PAGED_SIM_FAULT", f"hung:{kernel}")
    finding = tried(name, 1.0)
    assert finding.outcome == "hung"
    assert "not done in 1 s; simulated device: aclrtSynchronizeDeviceWithTimeout" in finding.said
    assert why in finding.explanation


def test_a_step_whose_process_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_SIM_FAULT", "hung:paged_write_kv")  # see above
    monkeypatch.setattr(ladder, "START", -10_000.0 + 15)
    finding = tried("write_kv", 10_000.0)
    assert (finding.outcome, finding.said) == ("hung", "killed after 15 s")
    assert "No core waits for another one here" in finding.explanation


@pytest.mark.parametrize(
    ("name", "kernel", "why"),
    [
        ("arguments", "paged_echo", "no core ran the kernel's code"),
        ("write_kv", "paged_write_kv", "nothing was written"),
        ("copy_blocks", "paged_copy_blocks", "nothing was written"),
        ("merge_states", "paged_merge_states", "nothing was written"),
        ("attention on vector cores", "paged_attention_float16", "nothing was written"),
        ("attention split over vector cores", "paged_attention_float16", "nothing was written"),
        ("attention on one group", "paged_attention_mixed", "nothing was written"),
        ("attention on all groups", "paged_attention_mixed", "nothing was written"),
    ],
)
def test_a_kernel_that_does_nothing_is_noticed_and_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: str, why: str
) -> None:
    monkeypatch.setenv("PAGED_SIM_FAULT", f"idle:{kernel}")
    finding = tried(name)
    assert finding.outcome == "wrong"
    assert why in finding.explanation


WRONG = {
    # The neighbour's rows.
    " rows[from + head * row_layout.head_stride]": (
        " rows[from - token % 2 * row_layout.token_stride + head * row_layout.head_stride]",
        "wrong values",
    ),
    # A slot further.
    "slot = SlotOf(token);": (
        "slot = SlotOf(token) ^ 1;",
        "were changed, which the kernel shouldn't touch",
    ),
}


@pytest.mark.parametrize("place", WRONG)
def test_a_kernel_that_writes_something_else_is_noticed_and_explained(
    kernels: Path, place: str
) -> None:
    from tests.sim.harness import build_kernel

    replacement, why = WRONG[place]
    op_kernel = ROOT / "op_kernel"
    source = kernels / "write_kv.cpp"
    text = (op_kernel / "write_kv.cpp").read_text()
    assert text.count(place) == 1
    source.write_text(text.replace(place, replacement))
    built = build_kernel(source, includes=(op_kernel,))
    environment.mark(built, kernels / "write_kv.o", on_groups=False)
    finding = tried("write_kv")
    assert finding.outcome == "wrong"
    assert why in finding.explanation


def test_a_kernel_that_breaks_a_rule_is_an_error_with_the_runtime_s_text(kernels: Path) -> None:
    from tests.sim.harness import build_kernel

    op_kernel = ROOT / "op_kernel"
    source = kernels / "merge_states.cpp"
    text = (op_kernel / "merge_states.cpp").read_text()
    assert text.count("out_a_.SetGlobalBuffer((__gm__ T*)out_a);") == 1
    # Where the keys' lengths end, nothing is mapped on a device either.
    source.write_text(text.replace("(__gm__ T*)out_a)", "(__gm__ T*)out_a + (1 << 20))"))
    built = build_kernel(source, includes=(op_kernel,))
    environment.mark(built, kernels / "merge_states.o", on_groups=False)
    finding = tried("merge_states")
    assert finding.outcome == "error"
    assert "gm-bounds" in finding.said
    assert "A vector core stopped with an exception" in finding.explanation


def strip(path: Path) -> None:
    """Take the marks of the device's compiler from an object."""
    subprocess.run(["objcopy", "--remove-section=.ascend.meta.*", str(path)], check=True)


def test_objects_of_another_mode_are_named_and_their_steps_not_run(kernels: Path) -> None:
    strip(kernels / "write_kv.o")
    finding = tried("objects")
    assert finding.said == f"in {kernels}: write_kv.o has no section .ascend.meta"
    assert "every argument arrives one place later" in finding.explanation
    assert tried("write_kv").outcome == "not run"
    assert tried("arguments").passed


def test_a_kernel_on_groups_without_one_half_is_not_run(kernels: Path) -> None:
    halves = ["--strip-symbol=paged_attention_mixed_float16_mix_aiv"]
    subprocess.run(["objcopy", *halves, str(kernels / "attention_mixed.o")], check=True)
    finding = tried("attention on one group")
    assert finding.outcome == "not run"
    assert finding.said == "attention_mixed.o has no paged_attention_mixed_float16_mix_aiv"


def test_an_object_that_is_not_there_is_named(kernels: Path) -> None:
    (kernels / "echo_arguments.o").unlink()
    assert "echo_arguments.o can't be read" in tried("objects").said
    assert tried("arguments").outcome == "not run"


def test_kernels_of_another_chip_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_KERNELS")
    monkeypatch.setenv("PAGED_SIM_SOC", "Ascend910B4")
    finding = tried("objects")
    assert "PAGED_SOC=Ascend910B4" in finding.explanation


def test_a_device_that_torch_npu_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    rows = {row.name: row.finding for row in ladder.climb(LIMIT, (), False)}
    assert rows["device"].outcome == "error"
    assert "libhccl.so" in rows["device"].said or "ImportError" in rows["device"].said
    assert rows["arguments"].outcome == "not run"


def test_op_tests_that_fail_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_SIM_FAULT", "idle:paged_copy_blocks")
    finding, log = ladder.op_tests(("tests/ops/test_copy_blocks.py",))
    assert finding.outcome == "wrong"
    assert " failed" in finding.said
    assert "FAILED" in log


def test_attention_is_timed_also_where_torch_npu_s_own_cannot_be_had() -> None:
    from paged_ops.ascend import runtime, versus

    runtime.load()
    (line,) = versus.compared([versus.Case("tiny", 2, 128, 1, 2, 1)], 2)
    assert line.startswith("tiny: paged_ops ")
    assert "; torch_npu's own can't be had: " in line


def test_torch_npu_s_own_attention_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_ops.ascend import runtime, versus

    runtime.load()
    given = {}

    class Recorder:
        @staticmethod
        def npu_fused_infer_attention_score(*tensors: object, **named: object) -> object:
            given.update(named)
            return tensors

    operator = torch.ops.npu.npu_fused_infer_attention_score.default
    monkeypatch.setattr(versus, "import_module", lambda _: Recorder)
    versus.Inputs(versus.Case("tiny", 2, 128, 1, 2, 1)).theirs()
    assert set(given) <= {argument.name for argument in operator._schema.arguments}
    assert given["actual_seq_lengths"] == [1, 2]


@pytest.mark.parametrize(
    ("answers", "refusal"),
    [
        (torch.zeros(4, 128, 16), "answers is torch.float32, expected torch.int64"),
        (torch.zeros(4, 128 * 16, dtype=torch.int64), "answers has 2 dimensions, expected 3"),
        (torch.zeros(4, 64, 16, dtype=torch.int64), "answers.shape[1] is 64, expected 128"),
    ],
)
def test_a_tensor_that_the_answers_do_not_fit_is_refused(
    answers: torch.Tensor, refusal: str
) -> None:
    environment.load()
    with pytest.raises(RuntimeError, match=re.escape(refusal)):
        torch.ops.paged._npu_echo_arguments(answers.npu(), 0)
