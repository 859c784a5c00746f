"""The metrics of a pool, as Prometheus reads them."""

from __future__ import annotations

import pytest

from paged_ops.blocks.manager import BlockManager

pytest.importorskip("prometheus_client", reason="metrics need the prometheus_client package")


def test_every_figure_of_the_books_is_exported() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from paged_ops.blocks.metrics import prometheus_text

    manager = BlockManager(8, 4)
    manager.allocate("a", range(10))
    manager.commit("a")
    manager.preempt("a")
    manager.allocate("b", range(10))
    text = prometheus_text(manager)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples == {
        ("paged_blocks", "free"): 5,
        ("paged_blocks", "cached"): 0,
        ("paged_blocks", "owned"): 3,
        ("paged_requests",): 1,
        ("paged_live_tokens",): 10,
        ("paged_waste_slots",): 2,
        ("paged_prompt_tokens_total",): 20,
        ("paged_hit_tokens_total",): 8,
        ("paged_evictions_total",): 0,
        ("paged_preemptions_total",): 1,
    }


def test_a_registry_reads_the_books_whenever_it_is_asked() -> None:
    from prometheus_client import CollectorRegistry

    from paged_ops.blocks.metrics import PoolCollector

    manager, registry = BlockManager(8, 4), CollectorRegistry()
    registry.register(PoolCollector(manager))
    assert registry.get_sample_value("paged_blocks", {"state": "owned"}) == 0
    manager.allocate("a", 5)
    assert registry.get_sample_value("paged_blocks", {"state": "owned"}) == 2
