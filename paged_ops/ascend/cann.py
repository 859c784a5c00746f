"""Where CANN is, how old it is, and its tools.

The build reads this file by itself, before the package can be imported: standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

LEAST = (8, 5)
"""The oldest CANN whose compiler makes a device's object of a source alone (``-x asc``)."""

TOOL_FOLDERS = ("ccec_compiler/bin", "compiler/ccec_compiler/bin", "tools/bisheng_compiler/bin")
"""Where its compiler and its linker are, beside ``bin``; releases differ."""


def home() -> Path | None:
    """Return the CANN that ``ASCEND_HOME_PATH`` names, None if it isn't set."""
    named = os.environ.get("ASCEND_HOME_PATH")
    return Path(named) if named else None


def version(cann: Path) -> str | None:
    """Return the version as CANN writes it, such as 8.5.0 or 8.1.RC1; None if it isn't found."""
    for note in sorted({*cann.glob("*-linux/*_install.info"), *cann.glob("*_install.info")}):
        if "toolkit" in note.name and (
            found := re.search(r"^version=(\d+\.\S+)", note.read_text(errors="replace"), re.M)
        ):
            return found[1]
    return None


def find_tool(cann: Path, name: str) -> Path | None:
    """Return the first program of that name in the folders where CANN has had them."""
    places = (cann / folder / name for folder in (*TOOL_FOLDERS, "bin"))
    return next((place for place in places if place.exists()), None)


def header_folders(cann: Path) -> Iterator[Path]:
    """Find the folders of the headers that kernels include."""
    roots = (cann, *sorted(cann.glob("*-linux")), cann / "compiler")
    for root in roots:
        framework = root / "tikcpp" / "tikcfw"
        folders = (root / "include", framework, framework / "impl", framework / "interface")
        yield from (folder for folder in folders if folder.is_dir())


def why_not() -> str | None:
    """Say why kernels can't be compiled here, or None if they can."""
    cann = home()
    if cann is None:
        return "no CANN here (ASCEND_HOME_PATH is not set)"
    found = version(cann)
    if found is not None and tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST:
        return (
            f"CANN {found} in {cann}, expected {LEAST[0]}.{LEAST[1]} or later: compilers before it "
            "have no asc mode"
        )
    for tool in ("bisheng", "ld.lld"):
        if find_tool(cann, tool) is None:
            return f"no {tool} in {cann}/{{{','.join((*TOOL_FOLDERS, 'bin'))}}}"
    return None
