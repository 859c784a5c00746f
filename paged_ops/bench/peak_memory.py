"""How much memory a call takes at its peak, beyond what the process had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")


def peak_growth(call: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory rose at most during a call (Linux).

    Whatever took the memory counts: torch's allocator, a compiled graph, a library. Memory that
    was mapped and never written does not.
    """
    (_PROCESS / "clear_refs").write_text("5")  # the peak begins anew, at what is resident now
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """Return a field of the process's status, in bytes."""
    lines = (_PROCESS / "status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024
