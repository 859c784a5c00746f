"""What the device's compiler asks of the kernels beyond C++: GM apart, one kind of core at a time.

To it `__gm__` is an address space of its own. clang knows those too, so it reads the sources with
the simulated device's declarations and refuses whatever mixes GM with the memory of a core. It
produces nothing: kernels run as g++ compiles them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sim.build import INCLUDE, ROOT

OP_KERNEL = ROOT / "op_kernel"
UNITS = sorted(OP_KERNEL.glob("*.cpp"))
CLANG = shutil.which("clang++")
needs_clang = pytest.mark.skipif(CLANG is None, reason="there is no clang++ here")


def refusals(source: Path, core: str) -> list[str]:
    """Return the errors that clang finds for one kind of core, AIC or AIV."""
    flags = ("-std=c++17", "-fsyntax-only", "-ferror-limit=0", "-Wno-unknown-pragmas")
    defines = ("-DASCENDC_SIM_GM_SPACE=1", f"-DASCENDC_SIM_CORE={core}", "-DASCENDC_SIM_NARROW")
    command = [str(CLANG), *flags, *defines, f"-I{INCLUDE}", f"-I{OP_KERNEL}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = re.findall(r"error: .*", done.stderr)
    assert bool(errors) == (done.returncode != 0), done.stderr
    return errors


@needs_clang
@pytest.mark.parametrize("core", ["AIC", "AIV"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_keeps_gm_and_the_memory_of_a_core_apart(unit: Path, core: str) -> None:
    assert refusals(unit, core) == []


BODIES = {
    "const Tiling data = *(__gm__ Tiling*)tiling;": "no matching constructor",
    "Tiling data; data = *(__gm__ Tiling*)tiling;": "no viable overloaded",
    "const Tiling& data = *(__gm__ Tiling*)tiling;": "reference of type",
    "const Tiling* data = (__gm__ Tiling*)tiling;": "cannot initialize a variable",
    "Read((__gm__ Tiling*)tiling);": "no matching function",
    "(void)((__gm__ Tiling*)tiling)->tokens;": "",
    "const auto data = TilingAt<Tiling>(tiling);": "",
    "(void)TilingAt<Odd>(tiling);": "whole words",
}


@needs_clang
@pytest.mark.parametrize("body", BODIES)
def test_reading_the_tiling_in_another_way_than_word_by_word_is_refused(
    tmp_path: Path, body: str
) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(
        f"""
#include "common/entry.h"
struct Tiling {{ int64_t tokens; }};
struct Odd {{ int32_t tokens; }};
inline void Read(const Tiling*) {{}}
PAGED_KERNEL(PAGED_VECTOR_CORES, kernel, (GM_ADDR tiling), {{ {body} }})
"""
    )
    found = refusals(source, "AIC")
    expected = BODIES[body]
    assert any(expected in error for error in found) if expected else found == []


def test_each_entry_point_says_which_cores_run_it() -> None:
    # A unit with several entry points has to, and CANN changes how: one file knows.
    for unit in UNITS:
        text = unit.read_text()
        assert "__global__" not in text
        assert "PAGED_KERNEL(PAGED_" in text
