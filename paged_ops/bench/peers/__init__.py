"""What attention is compared with. A peer is a module; one whose package is missing says so."""

from __future__ import annotations

from paged_ops.bench.peers.torch_sdpa import PEERS

__all__ = ["PEERS"]
