"""Compile Ascend C kernels, and the library that executes them, for the host."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
INCLUDE = HERE / "ascendc" / "include"
BUILD = ROOT / "build" / "sim"
CXX = os.environ.get("CXX", "g++")

# -fno-strict-aliasing: kernels read GM through casted pointers, as the device compiler lets them.
# -ffp-contract=off: the same bits on every host.
_COMMON = ("-std=c++17", "-g1", "-fPIC", "-Wall", "-ffp-contract=off")
_KERNEL_FLAGS = (*_COMMON, "-O1", "-Werror", "-fno-strict-aliasing")
_RUNTIME_FLAGS = (
    *_COMMON,
    "-O2",
    "-Wextra",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fno-math-errno",
)
_CHECK_FLAGS = ("-fsyntax-only", "-DASCENDC_SIM_NARROW", "-Werror=narrowing")


class CompileError(Exception):
    """A source was refused; the text is what the compiler printed."""


def run(command: Sequence[str | Path]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(done.stderr)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Let one process at a time build `target`; others then find it built."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _command(target: Path, flags: Sequence[str | Path], source: Path) -> list[str]:
    parts = (CXX, *flags, "-MMD", "-MF", target.with_suffix(".d"), source, "-o", target)
    return [str(part) for part in parts]


def _is_current(target: Path, flags: Sequence[str | Path], source: Path) -> bool:
    """Whether `target` was built in this way from files that still have the same contents."""
    record = target.with_suffix(".json")
    if not target.exists() or not record.exists():
        return False
    built = json.loads(record.read_text())
    return built["command"] == _command(target, flags, source) and all(
        Path(path).exists() and _digest(Path(path)) == digest
        for path, digest in built["inputs"].items()
    )


def compile_source(target: Path, source: Path, flags: Sequence[str | Path]) -> bool:
    """Compile `source` to `target`; False: that was done before. Headers count as inputs too."""
    if _is_current(target, flags, source):
        return False
    command = _command(target, flags, source)
    run(command)
    rule = target.with_suffix(".d").read_text().replace("\\\n", " ")
    inputs = [Path(name) for name in rule.split(":", 1)[1].split()]
    record = {
        "command": command,
        "inputs": {str(path): _digest(path) for path in inputs if path.is_relative_to(ROOT)},
    }
    target.with_suffix(".json").write_text(json.dumps(record))
    return True


@cache
def build_runtime() -> Path:
    """Build libascendc_sim.so and return its path."""
    library = BUILD / "libascendc_sim.so"
    with locked(library):
        sources = sorted((HERE / "ascendc" / "src").glob("*.cpp"))
        objects = [BUILD / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            flags = (*_RUNTIME_FLAGS, "-c")
            list(pool.map(compile_source, objects, sources, [flags] * len(sources)))
        built = [_digest(path) for path in objects]
        record = library.with_suffix(".json")
        if not library.exists() or not record.exists() or json.loads(record.read_text()) != built:
            run((CXX, "-shared", *objects, "-o", library, "-lpthread"))
            record.write_text(json.dumps(built))
    return library


def _options(includes: Sequence[Path], defines: Sequence[str]) -> list[str]:
    return [f"-I{path}" for path in (INCLUDE, *includes)] + [f"-D{name}" for name in defines]


def check_source(
    source: Path, *, includes: Sequence[Path] = (), defines: Sequence[str] = ()
) -> None:
    """Let the compiler look at a kernel source with the real, narrow types of all parameters.

    Raises CompileError with the compiler's text: a type that an instruction doesn't have, or a
    conversion that a device compiler refuses as narrowing.
    """
    run((CXX, *_KERNEL_FLAGS, *_CHECK_FLAGS, *_options(includes, defines), source))


def build_kernel(
    source: Path, *, includes: Sequence[Path] = (), defines: Sequence[str] = ()
) -> Path:
    """Compile an unchanged kernel source into a shared library and return its path.

    Raises CompileError with the compiler's text.
    """
    runtime = build_runtime()
    options = _options(includes, defines)
    name = hashlib.sha256(" ".join([str(source), *options]).encode()).hexdigest()[:12]
    target = BUILD / f"{source.stem}-{name}.so"
    link = ("-shared", f"-L{runtime.parent}", "-Wl,--no-as-needed", "-lascendc_sim")
    flags = [*_KERNEL_FLAGS, *options, *link, "-Wl,-rpath,$ORIGIN"]
    with locked(target):
        if not _is_current(target, flags, source):
            check_source(source, includes=includes, defines=defines)
        compile_source(target, source, flags)
    return target
