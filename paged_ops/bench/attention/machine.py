"""Where, when and with what a measurement was made."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import paged_ops
from paged_ops.bench.peers import PEERS


def describe() -> dict[str, Any]:
    """Return the machine, the date, the versions and the command."""
    info = paged_ops.backend_info()
    return {
        "machine": _processor(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "paged_ops.bench", *sys.argv[1:]]),
        "cpu_isa": info.cpu_isa,
        "versions": {"python": platform.python_version(), "torch": info.torch, **_packages()},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def _packages() -> dict[str, str]:
    """Return the versions of the installed peers and of this package."""
    names = {"paged-ops", *(peer.package for peer in PEERS.values() if peer.package)}
    found = {}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
