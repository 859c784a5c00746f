"""How setup.py builds the Ascend kernels: the commands, CANN's CMake functions, what is refused.

No CANN is at hand. Programs in the place of its compiler and linker write down how they are called
(`fake_cann`); what CANN's own make of the sources, nobody has seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paged_ops.ascend import cann
from tests.ascend import fake_cann

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "op_kernel").glob("*.cpp"))

SETUP = """
import pathlib, runpy, sys
sys.argv = ["setup.py", "--quiet", "--version"]
names = runpy.run_path("setup.py")
work = pathlib.Path({work!r})
print("status:", names["npu_status"]())
if names["cann"].why_not() is None:
    (work / "cmake").mkdir()
    if "ASCENDC_CMAKE_DIR" in names["os"].environ:
        (work / "cmake" / "CMakeLists.txt").write_text(names["cmake_text"]())
    (work / "build.ninja").write_text("\\n".join(names["kernel_lines"](work / "kernels")) + "\\n")
"""


def configure(work: Path, **variables: str) -> str:
    """Let setup.py write the build of the kernels alone; return what it says of them."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND")}
    done = subprocess.run(
        [sys.executable, "-c", SETUP.format(work=str(work))],
        env=inherited | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("status: ")[1].strip()


def build(work: Path) -> subprocess.CompletedProcess[str]:
    ninja = [sys.executable, "-m", "ninja", "-C", str(work), "-k", "0"]
    return subprocess.run(ninja, capture_output=True, text=True)


def test_with_cann_each_source_is_compiled_linked_and_kept(tmp_path: Path) -> None:
    home = fake_cann.make(tmp_path / "cann")
    status = configure(tmp_path, ASCEND_HOME_PATH=str(home), PAGED_SOC="Ascend910B3")
    assert status == f"built for Ascend910B3 by bisheng of CANN 8.5.0 in {home}"
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout
    commands = fake_cann.commands(home)
    for source in SOURCES:
        compiled = next(line for line in commands if f"-c {source} " in line)
        assert compiled.startswith(
            "bisheng -std=c++17 -O3 -x asc --aicore-only --npu-arch=dav-2201 -DK_MAX_SHAPE_DIM=0 "
        )
        assert f" -I{ROOT / 'op_kernel'} " in compiled
        assert f" -I{home}/compiler/tikcpp/tikcfw/interface " in compiled
        assert compiled.endswith(f"-o {source.stem}.obj")
        assert (
            f"ld.lld -m aicorelinux -Ttext=0 {source.stem}.obj -static -o {source.stem}.o"
        ) in commands
    kept = sorted(path.stem for path in (tmp_path / "kernels").glob("*.o"))
    assert kept == [source.stem for source in SOURCES]
    assert "cce" not in " ".join(commands).replace("-mllvm -cce-aicore", "")


WRONG = {
    "cce": (
        "attention.o has no section .ascend.meta. It wasn't compiled in asc mode. In cce mode the "
        "runtime puts a hidden argument of 8 bytes first, so every argument arrives one place later"
    ),
    "half": "attention_mixed.o has no paged_attention_mixed_bfloat16_mix_aiv, ",
    "unlinked": "write_kv.o was compiled but not linked",
}


@pytest.mark.parametrize("mode", WRONG)
def test_an_object_of_the_wrong_kind_is_an_error_of_the_build(tmp_path: Path, mode: str) -> None:
    home = fake_cann.make(tmp_path / "cann", mode=mode)
    configure(tmp_path, ASCEND_HOME_PATH=str(home))
    done = build(tmp_path)
    assert done.returncode != 0
    assert WRONG[mode] in done.stdout
    kept = {path.stem for path in (tmp_path / "kernels").glob("*.o")}
    # The other kernels have only one half.
    assert kept == ({s.stem for s in SOURCES} - {"attention_mixed"} if mode == "half" else set())


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake here")
@pytest.mark.parametrize("mode", ["asc", "cce"])
def test_where_cann_s_cmake_functions_are_named_they_make_the_objects(
    tmp_path: Path, mode: str
) -> None:
    home = fake_cann.make(tmp_path / "cann", mode=mode)
    status = configure(tmp_path, ASCEND_HOME_PATH=str(home), ASCENDC_CMAKE_DIR=str(home / "cmake"))
    assert status == f"built for Ascend910B1 by CANN's CMake functions of CANN 8.5.0 in {home}"
    text = (tmp_path / "cmake" / "CMakeLists.txt").read_text()
    assert 'set(SOC_VERSION "Ascend910B1" CACHE STRING "")' in text
    done = build(tmp_path)
    kept = sorted(path.stem for path in (tmp_path / "kernels").glob("*.o"))
    assert (done.returncode == 0) == (mode == "asc"), done.stdout
    assert kept == ([source.stem for source in SOURCES] if mode == "asc" else [])
    compiled = [line for line in fake_cann.commands(home) if line.startswith("bisheng")]
    assert all("-DK_MAX_SHAPE_DIM=0" in line for line in compiled)
    assert len(compiled) == len(SOURCES)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (
            "8.1.RC1",
            "CANN 8.1.RC1 in {home}, expected 8.5 or later: compilers before it have no asc",
        ),
        ("8.3.0", "CANN 8.3.0 in {home}, expected 8.5 or later"),
        ("8.5.0", None),
        ("9.1.0-beta.1", None),
        ("10.0.0", None),
    ],
)
def test_a_cann_before_8_5_is_refused_by_name(
    tmp_path: Path, version: str, reason: str | None
) -> None:
    home = fake_cann.make(tmp_path / "cann", version=version)
    status = configure(tmp_path, ASCEND_HOME_PATH=str(home))
    if reason is None:
        assert status.startswith("built for ")
    else:
        assert status.startswith("not built: " + reason.format(home=home))
        assert not (tmp_path / "build.ninja").exists()


def test_a_cann_whose_version_is_not_found_is_tried(tmp_path: Path) -> None:
    home = fake_cann.make(tmp_path / "cann")
    (home / "x86_64-linux" / "ascend_toolkit_install.info").unlink()
    assert "CANN (unknown)" in configure(tmp_path, ASCEND_HOME_PATH=str(home))


@pytest.mark.parametrize("tool", ["bisheng", "ld.lld"])
def test_what_a_cann_lacks_is_named(tmp_path: Path, tool: str) -> None:
    home = fake_cann.make(tmp_path / "cann")
    (home / "bin" / tool).unlink()
    assert configure(tmp_path, ASCEND_HOME_PATH=str(home)).startswith(
        f"not built: no {tool} in {home}/{{ccec_compiler/bin,"
    )


def test_the_tools_are_the_first_of_the_folders_where_cann_has_had_them(tmp_path: Path) -> None:
    for folder in ("bin", "tools/bisheng_compiler/bin", "ccec_compiler/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "ld.lld").touch()
        assert cann.find_tool(tmp_path, "ld.lld") == tmp_path / folder / "ld.lld"


def test_without_cann_nothing_is_said_to_be_missing_but_cann(tmp_path: Path) -> None:
    assert configure(tmp_path) == "not built: no CANN here (ASCEND_HOME_PATH is not set)"
