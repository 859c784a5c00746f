"""The results as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paged_ops.bench.attention.result import OURS, Figures, Result

LEGEND = """\
Cold: the caches were flushed before the call. Warm: the call follows others like it.
"/ peer" is our time over the peer's: below 1 paged attention is the faster one.
"% read" is the time of reading the blocks in the order of the tables, over ours; for a write that
of a plain copy. "% unit" is the time of the operations in the unit of the processor that multiplies
this dtype fastest, over ours. The larger of the two is the limit that binds."""


class Table:
    """Lines with one column for each peer."""

    def __init__(self, peers: Iterable[str]) -> None:
        self._widths = {name: max(7, len(name) + 2) for name in peers}

    def header(self) -> str:
        """Return the first line."""
        peers = "".join(f" {'/ ' + name:>{width}}" for name, width in self._widths.items())
        columns = f"{'workload':13} {'':4} {'ms':>8} {'GB/s':>6} {'GFLOP/s':>8}"
        return f"{columns}{peers} {'% read':>7} {'% unit':>7}"

    def rows(self, result: Result) -> Iterator[str]:
        """Yield the lines of a workload: cold, and warm."""
        for kind, figures in (("cold", result.cold), ("warm", result.warm)):
            yield f"{result.workload.name:13} {kind} {self._row(figures)}"

    def _row(self, figures: Figures) -> str:
        cells = "".join(
            f" {_number(figures.ratios.get(name), '.2f'):>{width}}"
            for name, width in self._widths.items()
        )
        read, unit = (
            _number(None if share is None else 100 * share, ".0f")
            for share in (figures.share_of_memory, figures.share_of_products)
        )
        return (
            f"{1e3 * figures.seconds[OURS]:8.3f} {figures.gigabytes_per_second:6.1f} "
            f"{_number(figures.gigaflops or None, '.0f'):>8}{cells} {read:>7} {unit:>7}"
        )


def notes(result: Result) -> list[str]:
    """Return a line for each peer that was not timed."""
    return [f"  {name} not timed: {reason}" for name, reason in result.notes.items()]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
