"""What attention is compared with: one module for each package that may be installed."""

from __future__ import annotations

from paged_ops.bench.peers import openvino_cpu, sgl_cpu, torch_flex, torch_sdpa, vllm_cpu
from paged_ops.bench.peers.peer import Call, Latent, Peer, Quantised, Unsupported

PEERS: dict[str, Peer] = {
    "gather+sdpa": torch_sdpa.GATHERED,
    "sdpa": torch_sdpa.CONTIGUOUS,
    "flex": torch_flex.PEER,
    "vllm": vllm_cpu.PEER,
    "sgl": sgl_cpu.PEER,
    "openvino": openvino_cpu.PEER,
}

__all__ = ["PEERS", "Call", "Latent", "Peer", "Quantised", "Unsupported"]
