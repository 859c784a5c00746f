"""Which request owns which block of the pool: plain Python, no torch."""

from paged_ops.blocks.digest import ExtraKey, chain_digests
from paged_ops.blocks.errors import InFlight, OutOfBlocks, UnknownRequest
from paged_ops.blocks.events import Cleared, EventStream, Removed, Stored
from paged_ops.blocks.layer_groups import LayerGroup, LayerGroups
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.stats import BlockStats
from paged_ops.blocks.swap import SwapSpace, Transfer

__all__ = [
    "BlockManager",
    "BlockStats",
    "Cleared",
    "EventStream",
    "ExtraKey",
    "InFlight",
    "LayerGroup",
    "LayerGroups",
    "OutOfBlocks",
    "Removed",
    "Stored",
    "SwapSpace",
    "Transfer",
    "UnknownRequest",
    "chain_digests",
]
