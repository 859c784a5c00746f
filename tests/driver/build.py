"""Build the driver: the CPU units, with the flags that setup.py gives them, and driver.cpp.

``python -m tests.driver.build MACHINE CXX`` builds for a machine (as ``platform.machine()`` calls
it) with a compiler for it, into ``build/driver-MACHINE``. The machine `TILES` is an x86_64 whose
matrix unit is emulated in software.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TILES = "x86_64-tiles"


def folder(machine: str) -> Path:
    """Return where the driver for a machine and its object files are."""
    return ROOT / "build" / f"driver-{machine}"


def program(machine: str) -> Path:
    """Return where the driver for a machine is."""
    return folder(machine) / "driver"


def setup_names() -> dict[str, Any]:
    """Return what setup.py defines."""
    argv = ["setup.py", "--quiet", "--version"]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(None):
        return runpy.run_path(str(ROOT / "setup.py"))


def ninja_file(machine: str, cxx: str) -> str:
    """Return the text of the driver's build.ninja."""
    platform = {"_PYTHON_HOST_PLATFORM": f"linux-{machine.partition('-')[0]}"}
    with mock.patch.dict(os.environ, platform):
        names = setup_names()
        found = [unit for unit in names["units"](Path()) if unit.name.startswith("cpu.")]
    if machine == TILES:
        for unit in found:
            if unit.name in ("cpu.attention.isa.amx", "cpu.dispatch"):
                unit.flags.append(f"-include {HERE / 'emulated_tiles.h'}")
    found.append(names["Unit"]("driver", HERE / "driver.cpp", []))
    lines = [
        f"flags = {' '.join(names['common_flags']())}",
        "rule compile",
        f"  command = {cxx} $flags $extra -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {cxx} -pthread $in -o $out",
    ]
    for unit in found:
        lines += [
            f"build {unit.name}.o: compile {unit.source}",
            f"  extra = {' '.join(unit.flags)}",
        ]
    lines.append(f"build driver: link {' '.join(f'{unit.name}.o' for unit in found)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine")
    parser.add_argument("cxx")
    options = parser.parse_args()
    work = folder(options.machine)
    work.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(ninja_file(options.machine, options.cxx))
    ninja = [sys.executable, "-m", "ninja", "-C", str(work), "--quiet"]
    sys.exit(subprocess.run(ninja, check=False).returncode)


if __name__ == "__main__":
    main()
