"""What the object of a kernel must have in it, read from its ELF headers.

``python objects.py MADE KEPT`` copies an object that has it, and fails with the reason where one
hasn't: so no other comes into the package. The build calls this file by itself, before the package
can be imported: standard library only.
"""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

META = ".ascend.meta"
"""Where asc mode says which cores a kernel runs on, in a section for each: a name, or its start."""

UNITS_ON_GROUPS = ("attention_mixed",)
"""Sources of op_kernel whose entry points run on cube and vector cores."""

HIDDEN_ARGUMENT = (
    "In cce mode the runtime puts a hidden argument of 8 bytes first, so every argument arrives "
    "one place later; and every kernel is split into a cube and a vector half, 1 to 2, whatever it "
    "says of its cores. The kernels need -x asc --aicore-only."
)

_RELOCATABLE = 1
_SYMBOL_TABLES = (2, 11)
_FUNCTION = 2
_UNDEFINED = 0


class Elf(NamedTuple):
    """An object file.

    Attributes
    ----------
    kind : int
        1: not linked yet.
    sections : tuple of str
        Their names.
    functions : frozenset of str
        Those that it defines.
    """

    kind: int
    sections: tuple[str, ...]
    functions: frozenset[str]


def read_elf(data: bytes) -> Elf:
    """Read the headers of a 64-bit little-endian ELF file; raise ValueError for another."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    try:
        return _read(data)
    except (struct.error, IndexError) as error:
        raise ValueError("an ELF file that is cut short") from error


def _read(data: bytes) -> Elf:
    (kind,) = struct.unpack_from("<H", data, 16)
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)
    ]
    names_offset = headers[names_at][4]
    functions = set()
    for _, section_kind, _, _, offset, size, link, _, _, each in headers:
        if section_kind in _SYMBOL_TABLES:
            strings = headers[link][4]
            for at in range(offset, offset + size, each):
                name, info, _, section = struct.unpack_from("<IBBH", data, at)
                if info & 15 == _FUNCTION and section != _UNDEFINED:
                    functions.add(_text(data, strings + name))
    sections = tuple(_text(data, names_offset + header[0]) for header in headers)
    return Elf(kind, sections, frozenset(functions))


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="replace")


class Fault(NamedTuple):
    """What an object lacks, in a line, and what that means, in sentences."""

    what: str
    why: str


def faults(path: Path) -> Iterator[Fault]:
    """Find what an object lacks; what is expected depends on its stem, the name of its source."""
    try:
        elf = read_elf(path.read_bytes())
    except (OSError, ValueError) as error:
        yield Fault(f"{path.name} can't be read: {error}", "It was not built, or not copied whole.")
        return
    if elf.kind == _RELOCATABLE:
        yield Fault(
            f"{path.name} was compiled but not linked",
            "The runtime loads what CANN's ld.lld -m aicorelinux -Ttext=0 -static makes of an "
            "object.",
        )
    if not any(name == META or name.startswith(META + ".") for name in elf.sections):
        yield Fault(
            f"{path.name} has no section {META}",
            f"It wasn't compiled in asc mode. {HIDDEN_ARGUMENT}",
        )
    if path.stem.split(".")[0] in UNITS_ON_GROUPS:
        cube, vector = (
            {name.removesuffix(half) for name in elf.functions if name.endswith(half)}
            for half in ("_mix_aic", "_mix_aiv")
        )
        for half, has, other in (("_mix_aic", cube, vector), ("_mix_aiv", vector, cube)):
            if not has or other - has:
                missing = ", ".join(f"{name}{half}" for name in sorted(other - has)) or half
                yield Fault(
                    f"{path.name} has no {missing}",
                    "A kernel on groups of cores is one function for the cube cores (_mix_aic) and "
                    "one for the vector cores (_mix_aiv), and each half would wait for the other "
                    "for ever. The kernel type that its source states was not taken.",
                )


def described(found: Iterable[Fault]) -> tuple[str, str]:
    """Return what is lacking, and once each what that means."""
    found = list(found)
    return (
        "; ".join(fault.what for fault in found),
        " ".join(dict.fromkeys(fault.why for fault in found)),
    )


def main(made: str, kept: str) -> None:
    """Copy an object to where it is kept, unless it has a fault."""
    what, why = described(faults(Path(made)))
    if what:
        sys.exit(f"paged_ops: an Ascend kernel was compiled wrongly: {what}. {why}")
    shutil.copyfile(made, kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
