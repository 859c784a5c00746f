"""``python -m paged_ops.bench attention``: attention against its peers and the machine's limits."""

from paged_ops.bench.attention.command import add_parser

__all__ = ["add_parser"]
