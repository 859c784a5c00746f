"""Paged attention on an Ascend NPU: the same calls, with tensors of the device "npu".

Needs torch_npu, CANN and the NPU kernels of this package. Two prompts, then a token more of each;
the outputs are compared with those of the CPU, which gets the same numbers.
"""

import torch
import torch_npu  # noqa: F401  (makes "npu" a device)

from paged_ops import BlockManager, PagedKVCache, attention, build_batch, write_kv

torch.manual_seed(0)


def run(device, *steps):
    """Write and attend, step by step; return all outputs, on the CPU."""
    manager = BlockManager(num_blocks=64, block_size=16)
    cache = PagedKVCache(1, 64, 16, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=device)
    manager.allocate("ann", 0)
    manager.allocate("bob", 0)
    outputs = []
    for new_tokens, rows in steps:
        manager.append_all(list(zip(("ann", "bob"), new_tokens, strict=True)))
        batch = build_batch(manager, ["ann", "bob"], new_tokens, device=device)
        query, key, value = (tensor.to(device) for tensor in rows)
        write_kv(key, value, *cache.layer(0), batch.slot_mapping)
        index = batch.block_tables, batch.seq_lens, batch.query_start_loc
        outputs.append(attention(query, *cache.layer(0), *index).cpu())
    return torch.cat(outputs)


def step(*new_tokens):
    return new_tokens, [torch.randn(sum(new_tokens), heads, 64).half() for heads in (8, 2, 2)]


steps = step(7, 25), step(1, 1)
output, expected = run("npu", *steps), run("cpu", *steps)
print(f"{len(output)} rows on {torch.npu.get_device_name()}")
print(f"the largest difference from the CPU is {(output - expected).abs().max():.1e}")
torch.testing.assert_close(output, expected, atol=2e-3, rtol=2e-3)
