"""torch's ``flex_attention`` over a pool, by its own experimental ``PagedAttention``.

One sequence of keys holds the whole pool; a mask for each sequence names the blocks that it has,
and maps a place in the pool to a position. A batch is rectangular, so sequences with as many query
tokens as each other are one call. The kernel is generated: a compilation for each shape, of several
seconds; not compiled, ``flex_attention`` makes all scores of the pool.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.peers.peer import Call, Peer, Unsupported
from paged_ops.bench.workloads import Inputs

_QUERY_BLOCK = 128  # query tokens that share a list of blocks; torch's default


def absence() -> str | None:
    """Return why it can't serve, or None."""
    if find_spec("torch.nn.attention.experimental") is None:
        return "this torch has no experimental paged attention"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler}"
    return None


def _attention(inputs: Inputs) -> Call:
    from torch._dynamo.exc import TorchDynamoException
    from torch.nn.attention.flex_attention import flex_attention

    # What was compiled for other workloads would count towards the limit of recompilations.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    key, value = (_joined(cache) for cache in (inputs.key_cache, inputs.value_cache))
    groups: dict[int, list[int]] = {}
    for sequence, length in enumerate(inputs.workload.query_lens):
        groups.setdefault(length, []).append(sequence)
    masks = [_block_mask(inputs, sequences, new) for new, sequences in groups.items()]
    starts = inputs.query_start_loc[:-1].long()
    rows = [starts[some, None] + torch.arange(new) for new, some in groups.items()]

    def call() -> list[Tensor]:
        outputs: dict[int, Tensor] = {}
        for sequences, some, mask in zip(groups.values(), rows, masks, strict=True):
            query = inputs.query[some].transpose(1, 2)
            output = compiled(query, key, value, block_mask=mask, enable_gqa=True)
            outputs |= zip(sequences, output.transpose(1, 2), strict=True)
        return [outputs[sequence] for sequence in range(len(outputs))]

    try:
        call()
    except TorchDynamoException as error:
        reason = getattr(error, "inner_exception", error)
        raise Unsupported(f"not compiled: {str(reason).splitlines()[0]}") from error
    return call


def _joined(cache: Tensor) -> Tensor:
    """Return a copy of a cache as ``[1, heads, slots, head_dim]``, as a mask refers to it."""
    return cache.flatten(0, 1).transpose(0, 1).contiguous()[None]


def _block_mask(inputs: Inputs, sequences: list[int], new_tokens: int) -> Any:
    """Return which blocks of the pool, and which of their slots, the new tokens see."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    num_blocks, block_size = inputs.key_cache.shape[:2]
    lengths = inputs.seq_lens.long()[sequences]
    tables = PagedAttention(num_blocks, block_size, len(sequences), device="cpu")
    for row, sequence in enumerate(sequences):
        used = torch.arange(-(-inputs.workload.seq_lens[sequence] // block_size))
        blocks = inputs.block_tables[sequence, : len(used)].long()
        tables.page_table[row, : len(used)] = blocks
        tables.physical_to_logical[row, blocks] = used

    def causal(b: Tensor, h: Tensor, token: Tensor, key: Tensor) -> Tensor:
        return key <= token + lengths[b] - new_tokens

    logical = create_block_mask(
        causal,
        len(sequences),
        None,
        new_tokens,
        -(-int(lengths.max()) // block_size) * block_size,
        device="cpu",
        BLOCK_SIZE=(min(_QUERY_BLOCK, new_tokens), block_size),
    )
    return tables.convert_logical_block_mask(logical, kv_len=lengths)


PEER = Peer(None, absence, _attention, on_request=True)
