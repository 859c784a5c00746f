"""The books of a pool as Prometheus metrics. Needs the prometheus_client package."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from paged_ops.blocks.manager import BlockManager


class PoolCollector:
    """Reads `BlockManager.stats` whenever Prometheus asks; between, it costs nothing.

    Register it with ``prometheus_client.REGISTRY.register(PoolCollector(manager))`` or any other
    registry. A registry takes one of it; a second pool gets a registry of its own.

    Parameters
    ----------
    manager : BlockManager
        The books.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, all of one moment."""
        stats = self._manager.stats()
        blocks = GaugeMetricFamily(
            "paged_blocks", "Blocks of the pool; cached ones are free as well.", labels=["state"]
        )
        blocks.add_metric(["free"], stats.num_free - stats.num_cached)
        blocks.add_metric(["cached"], stats.num_cached)
        blocks.add_metric(["owned"], stats.num_used)
        yield blocks
        gauges = {
            "paged_requests": ("Requests that hold blocks.", stats.num_requests),
            "paged_live_tokens": ("Distinct tokens in owned blocks.", stats.live_tokens),
            "paged_waste_slots": ("Slots of owned blocks without token.", stats.internal_waste),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters = {
            "paged_prompt_tokens": ("Tokens of prompts given by ids.", stats.prompt_tokens),
            "paged_hit_tokens": ("Those of them that were cached.", stats.hit_tokens),
            "paged_evictions": ("Cached blocks given up for new content.", stats.evictions),
            "paged_preemptions": ("Requests preempted.", stats.preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)


def prometheus_text(manager: BlockManager) -> str:
    """Return the metrics of a pool in Prometheus' text format.

    Parameters
    ----------
    manager : BlockManager
        The books.

    Examples
    --------
    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> _ = manager.allocate("a", [1, 2, 3, 4, 5])
    >>> print(prometheus_text(manager).splitlines()[4])
    paged_blocks{state="owned"} 2.0
    """
    registry = CollectorRegistry()
    registry.register(PoolCollector(manager))
    return generate_latest(registry).decode()
