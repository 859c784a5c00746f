"""The results as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable

from paged_ops.bench.attention.result import Result

LEGEND = """\
"/ peer" is our time over the peer's: below 1 paged attention is the faster one.
"% limit" is the least time that the machine needs, over ours: reading the blocks in the order of
the tables, or the operations at the speed of a product of matrices, whichever is longer; for a
write a plain copy."""


class Table:
    """Lines with one column for each peer."""

    def __init__(self, peers: Iterable[str]) -> None:
        self._widths = {name: max(7, len(name) + 2) for name in peers}

    def header(self) -> str:
        """Return the first line."""
        peers = "".join(f" {'/ ' + name:>{width}}" for name, width in self._widths.items())
        return f"{'workload':13} {'ms':>8} {'GB/s':>6} {'GFLOP/s':>8}{peers} {'% limit':>8}"

    def row(self, result: Result) -> str:
        """Return the line of a workload."""
        cells = "".join(
            f" {_number(result.ratios.get(name), '.2f'):>{width}}"
            for name, width in self._widths.items()
        )
        share = result.share_of_limit
        percent = None if share is None else 100 * share
        flops = result.gigaflops or None
        return (
            f"{result.workload.name:13} {1e3 * result.seconds['paged']:8.3f} "
            f"{result.gigabytes_per_second:6.1f} {_number(flops, '.0f'):>8}{cells} "
            f"{_number(percent, '.0f'):>8}"
        )


def notes(result: Result) -> list[str]:
    """Return a line for each peer that was not timed."""
    return [f"  {name} not timed: {reason}" for name, reason in result.notes.items()]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
