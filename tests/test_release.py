"""The files of a release: two wheels for any Linux, and the sources; see ``make test-wheels``.

``PAGED_DIST`` names their folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIST = ROOT / os.environ.get("PAGED_DIST", "")
MACHINES = ("x86_64", "aarch64")
VARIANTS = {
    "x86_64": ["generic", "avx2", "avx512", "avx512bf16", "amx"],
    "aarch64": ["generic", "neon", "neonbf16"],
}
AARCH64 = Path("/usr/aarch64-linux-gnu")

pytestmark = pytest.mark.skipif(
    "PAGED_DIST" not in os.environ, reason="PAGED_DIST names no folder with the files of a release"
)
each_machine = pytest.mark.parametrize("machine", MACHINES)


def printed_by(*command: str | Path, **environment: str) -> str:
    """Run a command, which has to succeed, and return what it prints."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Unpack the wheels; return the folder of the package in each."""
    folders = {}
    for machine in MACHINES:
        (wheel,) = DIST.glob(f"*_{machine}.whl")
        folder = tmp_path_factory.mktemp(machine)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        folders[machine] = folder / "paged_ops"
    return folders


def undefined_symbols(library: Path) -> set[str]:
    """Return the names that a library asks others for."""
    listing = printed_by("readelf", "--wide", "--dyn-syms", library)
    return set(re.findall(r" UND ([^@\s]+)", listing))


@each_machine
def test_the_auditor_names_the_wheel_for_any_linux_with_the_c_library_of_torch(
    machine: str, unpacked: dict[str, Path]
) -> None:
    (name,) = (path.name for path in DIST.glob(f"*_{machine}.whl"))
    assert name.startswith("paged_ops-")
    assert f"-py3-none-manylinux_2_27_{machine}.manylinux_2_28_{machine}.whl" in name
    record = json.loads((unpacked[machine] / "_build.json").read_text())
    assert record["glibc"] == "2.28"
    assert record["machine"] == machine
    assert record["cpu_isas"] == VARIANTS[machine]


@each_machine
def test_the_library_needs_torch_and_the_c_library_alone(
    machine: str, unpacked: dict[str, Path]
) -> None:
    library = unpacked[machine] / "_C.abi3.so"
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", printed_by("readelf", "-d", library)))
    c_library = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0"}
    assert {"libtorch_cpu.so", "libgcc_s.so.1"} <= needed
    loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert needed <= c_library | loaders | {"libtorch_cpu.so", "libgcc_s.so.1"}


@each_machine
def test_the_library_defines_nothing_that_another_could_meet(
    machine: str, unpacked: dict[str, Path]
) -> None:
    """The C++ library inside is this library's own; torch has its own, too."""
    assert printed_by("nm", "-D", "--defined-only", unpacked[machine] / "_C.abi3.so") == ""


def test_both_libraries_ask_torch_for_the_same(unpacked: dict[str, Path]) -> None:
    """The one that is loaded here finds all of it."""
    x86_64, aarch64 = (
        {name for name in undefined_symbols(unpacked[machine] / "_C.abi3.so") if "torch_" in name}
        for machine in MACHINES
    )
    assert len(x86_64) > 50
    assert aarch64 == x86_64


def test_memory_is_copied_by_the_c_library(unpacked: dict[str, Path]) -> None:
    """The linker has plain loops of its own for it, and a logf of other bits."""
    for machine in MACHINES:
        asked = undefined_symbols(unpacked[machine] / "_C.abi3.so")
        assert {"memcpy", "memset", "logf"} <= asked


DIGEST = """
import hashlib, sys, torch, paged_ops
from paged_ops import backend_info
torch.manual_seed(7)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for length, rows in ((1, 1), (700, 1), (2500, 1), (130, 130), (600, 33)):
        cache = torch.randn(200, 2, 16, 2, 80).to(dtype)
        query = torch.randn(rows, 8, 80).to(dtype)
        table = torch.randperm(200)[: -(-length // 16)][None].int()
        lens, starts = torch.tensor([length]).int(), torch.tensor([0, rows]).int()
        output, lse = torch.ops.paged.attention_with_lse(
            query, cache[:, 0], cache[:, 1], table, lens, starts
        )
        digest.update(output.view(torch.uint8).numpy().tobytes())
        digest.update(lse.numpy().tobytes())
print(backend_info().library, backend_info().cpu_isa, digest.hexdigest())
"""


@pytest.mark.parametrize("isa", VARIANTS["x86_64"])
def test_the_kernels_give_the_bits_of_the_build_from_sources(
    isa: str, unpacked: dict[str, Path]
) -> None:
    def run(**environment: str) -> list[str]:
        return printed_by(sys.executable, "-c", DIGEST, PAGED_CPU_ISA=isa, **environment).split()

    library = str(unpacked["x86_64"] / "_C.abi3.so")
    of_the_wheel, of_the_tree = run(PAGED_LIBRARY=library), run()
    assert of_the_wheel[0] == library != of_the_tree[0]
    assert of_the_wheel[1:] == of_the_tree[1:]


@pytest.mark.skipif(not AARCH64.exists(), reason="no aarch64 C library to load beside")
def test_the_aarch64_library_finds_each_symbol(unpacked: dict[str, Path], tmp_path: Path) -> None:
    """Sought by the loader of aarch64, under qemu, in its C library and a stub of torch."""
    library = unpacked["aarch64"] / "_C.abi3.so"
    (tmp_path / "libtorch_cpu.so").symlink_to(next(ROOT.glob("build/*aarch64/libtorch_cpu.so")))
    loader = AARCH64 / "lib" / "ld-linux-aarch64.so.1"
    path = f"{tmp_path}:{AARCH64 / 'lib'}"
    command = ["qemu-aarch64", "-E", "LD_TRACE_LOADED_OBJECTS=1", "-E", "LD_WARN=yes"]
    command += ["-E", "LD_BIND_NOW=1", "-E", f"LD_LIBRARY_PATH={path}", str(loader), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "libtorch_cpu.so =>" in done.stdout
    assert "undefined symbol" not in done.stdout + done.stderr
    assert "not found" not in done.stdout


# ------------------------------------------------------------------ the sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the source distribution; return its folder."""
    (archive,) = DIST.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def test_the_sources_build(sources: Path) -> None:
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=sources, check=True)
    printed = printed_by(sys.executable, "-m", "paged_ops", PYTHONPATH=str(sources))
    assert str(sources) in printed
    assert "27 of 27 checks passed" in printed


def test_without_a_compiler_the_build_says_what_to_do(sources: Path) -> None:
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    there = {"cwd": sources, "env": {"PATH": "/nonexistent"}}
    done = subprocess.run(build, **there, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "there is no g++ here" in done.stderr
    assert "Traceback" not in done.stderr
