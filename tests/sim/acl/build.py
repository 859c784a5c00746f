"""Build the libraries that torch_npu loads, so that the real wheel runs where there is no CANN.

torch_npu links against CANN's C interface: ``libascendcl.so`` and a few others. `build` makes
libraries of those names from ``src/``, where a small part of the interface is implemented:

====================  ============================================================================
devices, contexts     two devices of the model that ``PAGED_SIM_SOC`` names (Ascend910B1 to B4);
                      ``PAGED_SIM_CORES`` is how many cube cores they have, or "unsaid": they don't
                      tell
streams, events       synchronous: what is submitted to a stream has run when the call returns
graphs                capture of streams into graphs, and their replay
memory                host memory that only an entry point or a kernel can touch, full of garbage
copies                host and device in all directions; a strided copy and a fill with zeros
kernels               a binary is a shared library built against the simulated vector core;
                      a launch that breaks a rule of that core fails with the rule in its text;
                      ``PAGED_SIM_FAULT`` asks for launches with a fault (``src/faults.cpp``)
====================  ============================================================================

Every other entry point that the wheel needs in order to load is generated here. It returns an error
and counts the call (``sim_acl_report``), because one that returned success would make operators of
torch do nothing, in silence. Functions that torch_npu looks up by name while it runs are simply
missing where they aren't implemented: torch_npu reports those itself, by name.

Run ``python -m tests.sim.acl.build`` in an environment that has torch_npu; it prints the folder
that has to be in ``LD_LIBRARY_PATH``. ``tests/npu_environment.py`` does that and sets the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).parent / "src"
CORE_INCLUDE = ROOT / "tests" / "sim" / "ascendc" / "include"
OUTPUT = ROOT / "build" / "sim" / "acl"
CXX = os.environ.get("CXX", "g++")

# The library that holds everything; the others only lead to it.
RUNTIME = "libascendcl.so"
# torch_npu opens this one by name when it needs an operator.
OPENED_BY_NAME = ("libopapi.so",)
# How the names of CANN's C functions begin.
ENTRY_POINT = re.compile(r"(acl|Hccl|Msprof|rt[A-Z])\w+")


def package_directory(name: str) -> Path:
    """Return where a package is installed, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"the simulated device needs {name} in this environment")
    return Path(spec.origin).parent


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed_by(library: Path) -> list[str]:
    """Return the libraries that a library says it needs."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "--dynamic", str(library)))


def loaded_with_torch_npu(package: Path) -> list[Path]:
    """Return the wheel's own libraries that importing torch_npu loads."""
    found = list(package.glob("_C.*.so"))
    for library in found:
        for name in needed_by(library):
            path = package / "lib" / name
            if path.exists() and path not in found:
                found.append(path)
    return found


def is_installed(name: str) -> bool:
    """Whether the compiler knows a library of this name: then it belongs to the system."""
    return output_of(CXX, f"-print-file-name={name}").strip() != name


def missing_libraries(libraries: list[Path]) -> list[str]:
    """Return the libraries that neither the wheel nor torch nor the system has: those of CANN."""
    present = {path.name for path in libraries}
    present |= {path.name for path in (package_directory("torch") / "lib").iterdir()}
    needed = {name for library in libraries for name in needed_by(library)}
    return sorted(name for name in needed - present if not is_installed(name))


def symbols(library: Path, kind: str) -> set[str]:
    """Return the C functions of CANN among a library's ``undefined`` or ``defined`` symbols."""
    names = output_of("nm", "--dynamic", f"--{kind}-only", "--format=just-symbols", str(library))
    return {name for name in names.split() if ENTRY_POINT.fullmatch(name)}


def implemented() -> set[str]:
    """Return the entry points that ``src/`` defines: those at the start of a line with a body."""
    definition = re.compile(r"^(?:SIM_EXPORT )?[\w ]+?[ *]+(\w+)\([^;]*?\)\s*\{", re.MULTILINE)
    text = "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.cpp")))
    return {name for name in definition.findall(text) if ENTRY_POINT.fullmatch(name)}


def returns_pointer(name: str, headers: str) -> bool:
    """Whether the wheel's headers say so; then an error code would be taken for an address."""
    return re.search(rf"^ACL_FUNC_VISIBILITY [^;()]*\*\s*{name}\s*\(", headers, re.M) is not None


def unimplemented_source(names: list[str]) -> str:
    """Return C++ that defines each entry point as a call that fails and is counted."""
    lines = ['#include "unimplemented.h"']
    lines += [
        f'SIM_EXPORT int {name}() {{ return sim_unimplemented("{name}"); }}' for name in names
    ]
    return "\n".join(lines) + "\n"


def compile_flags(package: Path) -> list[str]:
    """Return the flags of every source; the wheel's headers say what each function looks like."""
    include = package / "include" / "third_party" / "acl" / "inc"
    flags = ["-std=c++20", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    # FUNC_VISIBILITY makes those headers export what they declare.
    flags += ["-DFUNC_VISIBILITY", f"-I{SOURCES}", f"-I{CORE_INCLUDE}"]
    return [*flags, "-isystem", str(include)]


def make(target: Path, inputs: list[Path], command: list[str]) -> None:
    """Run a command that makes a file, unless the file is newer than its inputs.

    The file appears in one step: other processes may have the old one loaded.
    """
    if target.exists() and all(i.stat().st_mtime <= target.stat().st_mtime for i in inputs):
        return
    temporary = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([CXX, *command, "-o", str(temporary)], check=False)
    if done.returncode != 0:
        sys.exit("the simulated AscendCL could not be built, see the messages above")
    temporary.replace(target)


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def unimplemented(package: Path, wheel: list[Path]) -> list[str]:
    """Return the entry points that the wheel can't be loaded without and that ``src/`` lacks."""
    needed = set().union(*(symbols(library, "undefined") for library in wheel))
    needed -= set().union(*(symbols(library, "defined") for library in wheel))
    missing = sorted(needed - implemented())
    folder = package / "include" / "third_party" / "acl" / "inc" / "acl"
    headers = "\n".join(path.read_text(errors="replace") for path in folder.glob("*.h"))
    pointers = [name for name in missing if returns_pointer(name, headers)]
    if pointers:
        sys.exit(f"these return pointers and need an implementation: {', '.join(pointers)}")
    return missing


def make_runtime(package: Path, generated: Path) -> Path:
    """Compile and link the library that holds everything."""
    flags = compile_flags(package)
    write_if_changed(OUTPUT / "flags", " ".join([CXX, *flags]))
    common = [OUTPUT / "flags", CORE_INCLUDE / "sim_api.h", *SOURCES.glob("*.h")]
    objects = []
    for source in [*sorted(SOURCES.glob("*.cpp")), generated]:
        objects.append(OUTPUT / f"{source.stem}.o")
        make(objects[-1], [source, *common], [*flags, "-c", str(source)])
    runtime = OUTPUT / "lib" / RUNTIME
    make(runtime, objects, ["-shared", f"-Wl,-soname,{RUNTIME}", *map(str, objects), "-ldl"])
    return runtime


def build() -> Path:
    """Build what is out of date; return the folder for ``LD_LIBRARY_PATH``."""
    package = package_directory("torch_npu")
    wheel = loaded_with_torch_npu(package)
    (OUTPUT / "lib").mkdir(parents=True, exist_ok=True)
    generated = OUTPUT / "unimplemented_entry_points.cpp"
    write_if_changed(generated, unimplemented_source(unimplemented(package, wheel)))
    runtime = make_runtime(package, generated)
    for name in {*missing_libraries(wheel), *OPENED_BY_NAME} - {RUNTIME}:
        leads_to = ["-Wl,--no-as-needed", str(runtime), "-Wl,-rpath,$ORIGIN"]
        make(OUTPUT / "lib" / name, [runtime], ["-shared", f"-Wl,-soname,{name}", *leads_to])
    return OUTPUT / "lib"


if __name__ == "__main__":
    print(build())
