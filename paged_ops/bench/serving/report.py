"""The results: as tables, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_ops.bench.serving.outcome import Outcome


def as_row(name: str, outcome: Outcome) -> dict[str, Any]:
    """Return what is reported of a run."""
    return {
        "cache": name,
        "memory utilisation, %": round(100 * outcome.utilisation, 1),
        "most requests at once": outcome.most_running,
        "tokens/s": round(outcome.tokens_per_second, 1),
        "time to first token, s": round(outcome.median_first_token, 2),
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """Lay out rows as a Markdown table."""
    lines = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON and, where matplotlib is installed, as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serving.json").write_text(json.dumps(results, indent=2) + "\n")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nno picture: matplotlib is missing; install paged-ops[plots]")
        return
    rows = results["serving"]
    columns = [name for name in rows[0] if name != "cache"]
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(columns)), columns, strict=True):
        bars = axis.bar(
            [row["cache"] for row in rows],
            [row[column] for row in rows],
            color=["#b0b0b0", "#c44e52", "#3a7d44"],
        )
        axis.bar_label(bars)
        axis.margins(y=0.15)
        axis.set_title(column, fontsize=10)
    figure.savefig(folder / "serving.png", dpi=90)
