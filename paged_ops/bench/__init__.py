"""Benchmarks: ``python -m paged_ops.bench attention``.

Every figure is a median over samples that are interleaved with those of the peers and of the
machine's limit, because the speed of memory on a shared machine changes within minutes: only ratios
inside one run mean something.
"""
