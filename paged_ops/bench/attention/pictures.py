"""The results as pictures. matplotlib is an extra, so it is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paged_ops.bench.attention.result import Result


def draw_workloads(path: Path, results: Sequence[Result]) -> None:
    """Draw two bars for each workload: its share of the limit, and its ratio to the best peer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.8 * len(results)), 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    names = [result.workload.name for result in results]
    shares = [100 * (result.cold.share_of_limit or 0.0) for result in results]
    above.bar_label(above.bar(names, shares, color="#3a7d44"), fmt="%.0f")
    above.margins(y=0.1)
    above.axhline(100, color="black", linewidth=0.8)
    above.set_ylabel("percent of the machine's limit")
    best = [result.cold.best_peer for result in results]
    ratios = [
        result.cold.ratios[peer] if peer else 0.0
        for result, peer in zip(results, best, strict=True)
    ]
    labels = [f"{ratio:.2f}\n{peer}" for ratio, peer in zip(ratios, best, strict=True)]
    below.bar_label(below.bar(names, ratios, color="#4c72b0"), labels, fontsize=8)
    below.axhline(1, color="black", linewidth=0.8)
    below.margins(y=0.2)
    below.set_ylabel("time over the best peer's")
    below.tick_params(axis="x", rotation=45)
    figure.savefig(path, dpi=90)


def draw_curves(path: Path, curves: Mapping[str, Sequence[Result]]) -> None:
    """Draw the time over the length and over the batch, for ours, the peers and the limit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(curves), 4.5), layout="constrained")
    for axis, (name, results) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        at = [int(result.workload.name.split()[-1]) for result in results]
        figures = [result.cold for result in results]
        for peer in figures[0].seconds:
            times = [1e3 * each.seconds.get(peer, float("nan")) for each in figures]
            axis.plot(at, times, marker="o", label=peer)
        if all("blocks" in each.limits for each in figures):
            limit = [1e3 * each.limits["blocks"] for each in figures]
            axis.plot(at, limit, color="black", linestyle="--", label="reading the blocks")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(name)
        axis.set_ylabel("milliseconds")
        axis.set_title(results[0].workload.description)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=90)
