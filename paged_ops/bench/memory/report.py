"""The rows of a study: as text, as CSV files and as pictures."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paged_ops.bench.memory.saturated import Usage

Row = dict[str, Any]
"""What is reported of one run, by column."""

COLUMNS = {
    "live": "share of the pool that holds a token: pool utilisation, the paper's figure 2",
    "reserved": "share that is kept for tokens sure to come",
    "internal": "share that is held and never used",
    "external": "share that nobody holds while a request waits",
    "allocation": "share of the held slots that holds a token: allocation utilisation",
    "running": "requests that run at once",
    "preemptions": "preemptions per request",
}


def usage_row(
    workload: str, method: str, usage: Usage, block_size: int | None, watermark: float
) -> Row:
    """Say how one way of keeping requests used the pool; shares in percent of all slots."""
    return {
        "workload": workload,
        "method": method,
        "block_size": block_size,
        "watermark": watermark,
        **{part: usage.share(getattr(usage, part)) for part in _PARTS},
        "allocation": usage.allocation_utilisation,
        "running": usage.mean_running,
        "preemptions": usage.preemptions_per_request,
    }


def as_text(rows: Sequence[Row]) -> str:
    """Lay out rows of one kind as a table."""
    names = [name for name in rows[0] if name != "workload"]
    lines = [names] + [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of one kind; what does not apply is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def draw_usage(path: Path, rows: Iterable[Row]) -> None:
    """Draw where the pool goes, for each workload: one bar per method."""
    groups = _by_workload(row for row in rows if row["watermark"] == 0)
    figure, axes = _axes(len(groups))
    for axis, (workload, members) in zip(axes, groups.items(), strict=True):
        labels = [f"{row['method']} {row['block_size'] or ''}".strip() for row in members]
        bottom = [0.0] * len(members)
        for part, colour in _PARTS.items():
            values = [row[part] for row in members]
            axis.bar(labels, values, bottom=bottom, label=part, color=colour)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        axis.set_title(workload)
        axis.set_ylabel("percent of the pool")
        axis.tick_params(axis="x", rotation=60)
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=90)


def draw_reuse(path: Path, rows: Iterable[Row]) -> None:
    """Draw what is found over the size of the pool; without a limit as a dashed line."""
    figure, axes = _axes(1)
    for workload, members in _by_workload(rows).items():
        found = {row["num_blocks"]: row["found"] for row in members}
        without_limit = found.pop(None)
        (line,) = axes[0].plot(list(found), list(found.values()), marker="o", label=workload)
        axes[0].axhline(without_limit, linestyle="--", color=line.get_color())
    axes[0].set_xscale("log")
    axes[0].set_xlabel("blocks of the pool")
    axes[0].set_ylabel("percent of prompt blocks found")
    axes[0].legend()
    figure.savefig(path, dpi=90)


_PARTS = {"live": "#3a7d44", "reserved": "#e0b040", "internal": "#c44e52", "external": "#b0b0b0"}


def _by_workload(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["workload"], []).append(row)
    return groups


def _axes(count: int) -> tuple[Any, Any]:
    """Return a figure with so many axes side by side. Imports matplotlib, which is an extra."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * count, 4.0), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]
