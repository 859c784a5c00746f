"""What is read from the object of a kernel, and what is said of a wrong one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paged_ops.ascend import objects

OP_KERNEL = Path(__file__).resolve().parents[2] / "op_kernel"
META = '__attribute__((section(".ascend.meta.{0}"), used)) const int meta_{0} = 1;\n'
HALVES = "void k_mix_aic(void) {}\nvoid k_mix_aiv(void) {}\n"


def compiled(path: Path, text: str, *, linked: bool = True) -> Path:
    source = path.with_suffix(".c")
    source.write_text(text)
    how = ("-shared", "-nostdlib") if linked else ("-c",)
    subprocess.run(["gcc", *how, "-fPIC", str(source), "-o", str(path)], check=True)
    return path


def test_an_object_s_kind_sections_and_functions_are_read(tmp_path: Path) -> None:
    text = META.format("k") + "int k = 2; int far(void); int f(void) { return far(); }"
    loose = objects.read_elf(compiled(tmp_path / "a.o", text, linked=False).read_bytes())
    assert loose.kind == 1
    assert ".ascend.meta.k" in loose.sections
    assert loose.functions == {"f"}
    linked = objects.read_elf(compiled(tmp_path / "b.o", text).read_bytes())
    assert linked.kind == 3
    assert ".ascend.meta.k" in linked.sections
    assert "f" in linked.functions


def test_the_units_on_groups_are_those_whose_sources_say_so() -> None:
    saying = {path.stem for path in OP_KERNEL.glob("*.cpp") if "PAGED_GROUPS" in path.read_text()}
    assert saying == set(objects.UNITS_ON_GROUPS)


@pytest.mark.parametrize(
    ("stem", "text", "said"),
    [
        ("write_kv", META.format("k"), ()),
        ("write_kv", META.format("k").replace(".k", ""), ()),
        ("write_kv", "void k(void) {}", ("no section .ascend.meta",)),
        ("write_kv", META.format("k").replace("meta.", "metal."), ("no section .ascend.meta",)),
        ("attention_mixed", META.format("k") + HALVES, ()),
        ("attention_mixed", META.format("k"), ("no _mix_aic", "no _mix_aiv")),
        ("attention_mixed", META.format("k") + "void k_mix_aic(void) {}", ("no k_mix_aiv",)),
        ("attention_mixed", META.format("k") + "void k_mix_aiv(void) {}", ("no k_mix_aic",)),
        (
            "attention_mixed",
            META.format("k") + HALVES + "void l_mix_aiv(void) {}",
            ("no l_mix_aic",),
        ),
        ("attention_mixed", HALVES, ("no section .ascend.meta",)),
    ],
)
def test_each_fault_of_an_object_is_named(
    tmp_path: Path, stem: str, text: str, said: tuple[str, ...]
) -> None:
    faults = list(objects.faults(compiled(tmp_path / f"{stem}.o", text)))
    assert len(faults) == len(said)
    assert all(part in fault.what for part, fault in zip(said, faults, strict=True))


def test_a_half_that_is_only_called_is_not_there(tmp_path: Path) -> None:
    text = META.format("k") + "void k_mix_aiv(void); void k_mix_aic(void) { k_mix_aiv(); }"
    (fault,) = objects.faults(compiled(tmp_path / "attention_mixed.o", text))
    assert "no k_mix_aiv" in fault.what


def test_an_object_that_was_not_linked_is_named(tmp_path: Path) -> None:
    (fault,) = objects.faults(compiled(tmp_path / "write_kv.o", META.format("k"), linked=False))
    assert "compiled but not linked" in fault.what


@pytest.mark.parametrize("kept", [0, 5, 40, 64, 500])
def test_a_file_that_is_cut_short_or_no_object_is_named(tmp_path: Path, kept: int) -> None:
    whole = compiled(tmp_path / "write_kv.o", META.format("k")).read_bytes()
    (tmp_path / "write_kv.o").write_bytes(whole[:kept])
    (fault,) = objects.faults(tmp_path / "write_kv.o")
    assert "write_kv.o can't be read: " in fault.what


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (fault,) = objects.faults(tmp_path / "write_kv.o")
    assert "can't be read" in fault.what
