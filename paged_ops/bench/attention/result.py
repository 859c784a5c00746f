"""What one workload came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paged_ops.bench.attention.limits import MATMUL_FLOPS
from paged_ops.bench.workloads import Workload

OURS = "paged"


@dataclass
class Result:
    """Median seconds of everything that was timed in one rotation.

    Attributes
    ----------
    workload : Workload
        What was run.
    seconds : dict of str to float
        By peer, `OURS` among them.
    limits : dict of str to float
        By limit.
    notes : dict of str to str
        Why a peer was not timed.
    is_write : bool
        Whether K and V were written instead of attended to.
    """

    workload: Workload
    seconds: dict[str, float]
    limits: dict[str, float]
    notes: dict[str, str] = field(default_factory=dict)
    is_write: bool = False

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
        ours = self.seconds[OURS]
        return {name: ours / other for name, other in self.seconds.items() if name != OURS}

    @property
    def best_peer(self) -> str | None:
        """The fastest of the peers."""
        ratios = self.ratios
        return max(ratios, key=ratios.__getitem__) if ratios else None

    @property
    def share_of_limit(self) -> float | None:
        """The least time that the machine needs, over ours.

        That is the time of reading the blocks, or of the operations at the speed of a product of
        matrices, whichever is longer; in a write the time of a plain copy. None where reading could
        not be timed.
        """
        if self.is_write:
            return self.limits["copy"] / self.seconds[OURS]
        if "blocks" not in self.limits:
            return None
        products = self.workload.flops / MATMUL_FLOPS * self.limits["matmul"]
        return max(self.limits["blocks"], products) / self.seconds[OURS]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for a JSON file."""
        return {
            "workload": self.workload.name,
            "description": self.workload.description,
            "dtype": str(self.workload.dtype).removeprefix("torch."),
            "kv_bytes": self.workload.kv_bytes,
            "flops": 0 if self.is_write else self.workload.flops,
            "seconds": self.seconds,
            "limits": self.limits,
            "GB/s": self.gigabytes_per_second,
            "GFLOP/s": self.gigaflops,
            "ratios": self.ratios,
            "best_peer": self.best_peer,
            "share_of_limit": self.share_of_limit,
            "not_timed": self.notes,
        }
