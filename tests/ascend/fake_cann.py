"""A CANN for machines without one: its programs write down their commands and make host objects.

What the device's compiler leaves in an object is what the build looks at: a section and functions
of certain names. Here gcc leaves them, or, as `mode` says, something wrong.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

MODES = ("asc", "cce", "half", "unlinked")

COMPILER = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.ascend import fake_cann
fake_cann.{function}({home!r}, {mode!r})
"""

CMAKE_FUNCTIONS = """
function(ascendc_fatbin_library target)
  set(output ${CMAKE_INSTALL_PREFIX}/fatbin/${target}/${target}.o)
  file(MAKE_DIRECTORY ${CMAKE_INSTALL_PREFIX}/fatbin/${target})
  add_custom_target(${target} ALL
    COMMAND HOME/bin/bisheng -x asc --aicore-only "$<TARGET_PROPERTY:${target},definitions>"
      -c ${ARGN} -o ${target}.obj
    COMMAND HOME/bin/ld.lld ${target}.obj -static -o ${output})
endfunction()
function(ascendc_compile_definitions target scope)
  set_target_properties(${target} PROPERTIES definitions "${ARGN}")
endfunction()
function(ascendc_include_directories target scope)
  set_target_properties(${target} PROPERTIES includes "${ARGN}")
endfunction()
"""


def make(home: Path, version: str = "8.5.0", mode: str = "asc") -> Path:
    """Lay out a CANN in a folder, with its version, headers' folders, programs and CMake file."""
    note = home / "x86_64-linux" / "ascend_toolkit_install.info"
    note.parent.mkdir(parents=True)
    note.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\narch=x86_64\n")
    (home / "compiler" / "tikcpp" / "tikcfw" / "interface").mkdir(parents=True)
    (home / "bin").mkdir()
    root = str(Path(__file__).resolve().parents[2])
    for name, function in (("bisheng", "compile_source"), ("ld.lld", "link_object")):
        program = home / "bin" / name
        program.write_text(
            COMPILER.format(
                python=sys.executable, root=root, function=function, home=str(home), mode=mode
            )
        )
        program.chmod(0o755)
    (home / "cmake").mkdir()
    (home / "cmake" / "ascendc.cmake").write_text(CMAKE_FUNCTIONS.replace("HOME", str(home)))
    return home


def commands(home: Path) -> list[str]:
    """Return what the programs were called with, in order."""
    return (home / "commands").read_text().splitlines()


def entry_points(source: Path) -> list[str]:
    text = source.read_text()
    by_dtype = re.findall(r"^PAGED_\w+_ENTRY\((\w+)", text, re.M)
    return by_dtype + re.findall(r"^PAGED_KERNEL\(PAGED_\w+, (\w+)", text, re.M)


def object_source(source: Path, mode: str) -> str:
    """Return C that makes an object like that of the device's compiler from a kernel's source."""
    on_groups = "PAGED_GROUPS" in source.read_text()
    lines = []
    for name in entry_points(source):
        halves = ("_mix_aic", "_mix_aiv") if on_groups else ("_mix_aiv",)
        for half in halves[:1] if mode == "half" else halves:
            lines.append(f"void {name}{half}(void) {{}}")
            if mode != "cce":
                lines.append(
                    f'__attribute__((section(".ascend.meta.{name}{half}"), used)) '
                    f"const int meta_{name}{half} = 1;"
                )
    return "\n".join(lines) + "\n"


def note(home: str, program: str) -> None:
    with open(Path(home) / "commands", "a") as file:
        file.write(" ".join([program, *sys.argv[1:]]) + "\n")


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def compile_source(home: str, mode: str) -> None:
    """Be bisheng."""
    note(home, "bisheng")
    made = Path(argument("-o"))
    text = made.with_suffix(".fake.c")
    text.write_text(object_source(Path(argument("-c")), mode))
    if "-MF" in sys.argv:
        Path(argument("-MF")).write_text(f"{made}: {argument('-c')}\n")
    subprocess.run(["gcc", "-c", "-fPIC", str(text), "-o", str(made)], check=True)


def link_object(home: str, mode: str) -> None:
    """Be ld.lld."""
    note(home, "ld.lld")
    (made,) = (name for name in sys.argv if name.endswith(".obj"))
    if mode == "unlinked":
        shutil.copyfile(made, argument("-o"))
    else:
        command = ["gcc", "-shared", "-nostdlib", made, "-o", argument("-o")]
        subprocess.run(command, check=True)
