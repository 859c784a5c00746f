"""The report: one file for people and programs."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import paged_ops
from paged_ops.ascend import cann
from paged_ops.ascend.finding import Finding
from paged_ops.ascend.processes import run

DATA = "---- the same as data ----"
"""The line after which a report is JSON."""

VARIABLES = ("ASCEND", "PAGED_", "LD_LIBRARY_PATH", "TASK_QUEUE", "TORCH_", "PYTORCH_NPU")
"""How the names of environment variables begin that a report shows."""


class Row(NamedTuple):
    """A step, its finding, the seconds that it took, and the end of what its process wrote."""

    name: str
    shows: str
    finding: Finding
    seconds: float
    log: str = ""


def machine() -> dict[str, Any]:
    """Say what is installed, and what the driver shows."""
    home = cann.home()
    smi = run(["npu-smi", "info"], 30)
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "paged_ops": paged_ops.__version__,
        "build": paged_ops.backend_info().npu,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.platform()}",
        "torch": _version("torch"),
        "torch_npu": _version("torch_npu"),
        "cann": None if home is None else cann.version(home) or "unknown",
        "cann_home": home and str(home),
        "npu_smi": smi.output if smi.code == 0 else f"npu-smi: {smi.output}",
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def text(about: dict[str, Any], rows: list[Row]) -> str:
    """Write the report."""
    lines = ["paged_ops on an Ascend NPU", ""]
    lines += [f"{name:<10} {value}" for name, value in about.items() if name not in _LONG]
    lines += ["", f"{'step':<36}{'outcome':<10}{'seconds':>8}"]
    lines += [f"{row.name:<36}{row.finding.outcome:<10}{row.seconds:>8.1f}" for row in rows]
    for row in rows:
        lines += ["", f"{row.name}: {row.finding.outcome}", f"  works if it passes: {row.shows}"]
        lines += [f"  {line}" for line in row.finding.said.splitlines()]
        lines += textwrap.wrap(
            row.finding.explanation, 98, initial_indent="  ", subsequent_indent="  "
        )
        if row.log and not row.finding.passed:
            lines += ["  end of its output:", textwrap.indent(row.log.rstrip(), "  | ")]
    lines += ["", "npu-smi info", "", about["npu_smi"].rstrip(), "", DATA]
    steps = [
        {"name": row.name, **row.finding._asdict(), "seconds": row.seconds, "log": row.log}
        for row in rows
    ]
    return "\n".join(lines) + "\n" + json.dumps({**about, "steps": steps}, indent=1) + "\n"


_LONG = ("npu_smi", "variables")


def write(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write the report into a file: after each step, so that a machine that stops leaves one."""
    path.write_text(text(about, rows))


def read(text: str) -> dict[str, Any]:
    """Return what a report has as data."""
    data: dict[str, Any] = json.loads(text.split(DATA)[1])
    return data


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
