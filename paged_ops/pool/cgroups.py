"""What the control groups of this process leave it of memory: the limits of containers.

A process is in a group of each hierarchy that the system has mounted: of the one of version 2, of
one per controller of version 1, or of both kinds. A group's limit holds for all groups below it
together, so each group on the way up counts. In a container the way ends at the container's own
group, whose path is then mounted as the top.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Version:
    """The names of a version: its limits, what is used of them, and what of that is for the asking.

    Pages of files that nobody has used lately count as used, and are given up at need.
    """

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")

_NO_LIMIT = 2**62  # is below what version 1 says where version 2 says "max"


def available_to_groups(root: Path = Path("/")) -> int | None:
    """Return the bytes that the strictest group of this process has left; None without a limit.

    Parameters
    ----------
    root : Path
        Where the system's files are.
    """
    left = [
        _left(group, version)
        for version, top, path in _hierarchies(root)
        for group in _way_up(root / top.lstrip("/"), path)
    ]
    return min((each for each in left if each is not None), default=None)


def _hierarchies(root: Path) -> Iterator[tuple[_Version, str, str]]:
    """List where hierarchies that limit memory are mounted, and this process's group in each."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        kind, _, options = [*kind.split(), "", "", ""][:3]
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top, point = (_unescaped(field) for field in mount.split()[3:5])
        version = _V2 if kind == "cgroup2" else _V1
        yield version, point, _below(paths[kind], top)


def _below(path: str, top: str) -> str:
    """Return the path of a group below the one that is mounted; that one if it isn't below it."""
    top = top.rstrip("/")
    return path[len(top) :] if path == top or path.startswith(top + "/") else ""


def _way_up(top: Path, path: str) -> Iterator[Path]:
    """List a group and those above it."""
    names = [name for name in path.split("/") if name not in ("", ".", "..")]
    for length in range(len(names), -1, -1):
        yield top.joinpath(*names[:length])


def _left(group: Path, version: _Version) -> int | None:
    """Return the bytes that a group has left of its limits; None if it has none."""
    texts = [_read(group / name).strip() for name in version.limits]
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT]
    if not limits:
        return None
    usage = _read(group / version.usage).strip()
    used = int(usage) if usage.isdecimal() else 0
    reclaimable = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, number = line.partition(" ")
        if name == version.reclaimable and number.isdecimal():
            reclaimable = int(number)
    return max(0, min(limits) - max(0, used - reclaimable))


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which blanks are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
