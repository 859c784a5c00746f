"""What one workload came to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paged_ops.bench.attention.limits import MATMUL_FLOPS, UNIT_FLOPS
from paged_ops.bench.timing import Samples, median_ratio
from paged_ops.bench.workloads import Workload

OURS = "paged"


Times = Mapping[str, tuple[float, ...]]
"""Seconds of each round, by name."""


@dataclass(frozen=True)
class Figures:
    """What follows from the times of one kind of call, cold or warm.

    A ratio or a share is the median of those within each round.

    Attributes
    ----------
    workload : Workload
        What was run.
    times : mapping of str to tuple of float
        By peer, `OURS` among them.
    limit_times : mapping of str to tuple of float
        By limit.
    is_write : bool
        Whether K and V were written instead of attended to.
    """

    workload: Workload
    times: Times
    limit_times: Times
    is_write: bool

    @property
    def seconds(self) -> dict[str, float]:
        """Medians, by peer."""
        return _medians(self.times)

    @property
    def limits(self) -> dict[str, float]:
        """Medians, by limit."""
        return _medians(self.limit_times)

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes of K and V over our time."""
        return self.workload.kv_bytes / self.seconds[OURS] / 1e9

    @property
    def gigaflops(self) -> float:
        """Operations over our time; none in a write."""
        return 0.0 if self.is_write else self.workload.flops / self.seconds[OURS] / 1e9

    @property
    def ratios(self) -> dict[str, float]:
        """Our time over each peer's: below 1 ours is the faster one."""
        others = {name: times for name, times in self.times.items() if name != OURS}
        return {name: 1 / self._over_ours(times) for name, times in others.items()}

    @property
    def best_peer(self) -> str | None:
        """The fastest of the peers."""
        ratios = self.ratios
        return max(ratios, key=ratios.__getitem__) if ratios else None

    @property
    def share_of_memory(self) -> float | None:
        """The time of reading the blocks, in a write that of a plain copy, over ours.

        None where reading could not be timed.
        """
        limit = self.limit_times.get("copy" if self.is_write else "blocks")
        return None if limit is None else self._over_ours(limit)

    @property
    def share_of_products(self) -> float | None:
        """The time of the operations in the unit that multiplies fastest, over ours.

        Where no unit could be timed it is the speed of torch's product of matrices; None in a
        write.
        """
        if self.is_write:
            return None
        unit, flops = self.limit_times.get("unit"), UNIT_FLOPS
        if unit is None:
            unit, flops = self.limit_times["matmul"], MATMUL_FLOPS
        return self.workload.flops / flops * self._over_ours(unit)

    @property
    def share_of_limit(self) -> float | None:
        """The share of the limit that binds; None where reading could not be timed."""
        if self.share_of_memory is None:
            return None
        return max(self.share_of_memory, self.share_of_products or 0.0)

    def _over_ours(self, times: tuple[float, ...]) -> float:
        return median_ratio(times, self.times[OURS])

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for a JSON file."""
        return {
            "seconds": self.seconds,
            "limits": self.limits,
            "GB/s": self.gigabytes_per_second,
            "GFLOP/s": self.gigaflops,
            "ratios": self.ratios,
            "best_peer": self.best_peer,
            "share_of_memory": self.share_of_memory,
            "share_of_products": self.share_of_products,
            "share_of_limit": self.share_of_limit,
        }


@dataclass
class Result:
    """Everything that was timed in one rotation.

    Attributes
    ----------
    workload : Workload
        What was run.
    samples : dict of str to Samples
        By peer, `OURS` among them.
    limits : dict of str to Samples
        By limit.
    notes : dict of str to str
        Why a peer was not timed.
    kernels : dict of str to str
        Which of its kernels a peer took, where it has several; which unit multiplied.
    is_write : bool
        Whether K and V were written instead of attended to.
    """

    workload: Workload
    samples: dict[str, Samples]
    limits: dict[str, Samples]
    notes: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    is_write: bool = False

    @property
    def cold(self) -> Figures:
        """Calls whose tensors no cache holds."""
        return self._figures("cold")

    @property
    def warm(self) -> Figures:
        """Calls that follow their like: what fits is in a cache, threads are awake."""
        return self._figures("warm")

    def _figures(self, kind: str) -> Figures:
        def times(samples: Mapping[str, Samples]) -> Times:
            return {name: getattr(each, kind) for name, each in samples.items()}

        return Figures(self.workload, times(self.samples), times(self.limits), self.is_write)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for a JSON file."""
        return {
            "workload": self.workload.name,
            "description": self.workload.description,
            "dtype": str(self.workload.dtype).removeprefix("torch."),
            "kv_bytes": self.workload.kv_bytes,
            "flops": 0 if self.is_write else self.workload.flops,
            "cold": self.cold.as_dict(),
            "warm": self.warm.as_dict(),
            "kernels": self.kernels,
            "not_timed": self.notes,
            "samples": {
                name: asdict(each) for name, each in {**self.samples, **self.limits}.items()
            },
        }


def _medians(times: Times) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}
