"""``python -m paged_ops.bench serving``: the paged cache against transformers' contiguous ones."""

from paged_ops.bench.serving.command import add_parser

__all__ = ["add_parser"]
