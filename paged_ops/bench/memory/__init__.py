"""``python -m paged_ops.bench memory``: how well a pool is used, and what sharing saves."""

from paged_ops.bench.memory.command import add_parser

__all__ = ["add_parser"]
