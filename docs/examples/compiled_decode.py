"""A decode step under `torch.compile`: one graph for every batch, every length and every prompt.

The pool's views are taken inside the compiled function, and the sizes of the first batch are marked
as unknown. A second compilation would be an error here. Needs a C++ compiler, as Inductor does.
"""

import torch

import paged_ops
from paged_ops import BlockManager, PagedKVCache, build_batch

torch.manual_seed(0)
embedding, projection = torch.randn(100, 32), torch.randn(32, 64) / 6
cache = PagedKVCache(num_layers=1, num_blocks=512, block_size=4, num_kv_heads=2, head_dim=8)
manager = BlockManager(num_blocks=512, block_size=4)


def step(tokens, batch):
    """Write, attend, choose: the likeliest token after each of these."""
    x = embedding[tokens]
    query, key, value = (x @ projection).unflatten(-1, (8, 8)).split([4, 2, 2], dim=1)
    key_cache, value_cache = cache.layer(0)
    paged_ops.write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
    attended = paged_ops.attention(
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
    )
    return (torch.relu(x + attended.flatten(1)) @ embedding.T).argmax(-1)


compiled = torch.compile(step, fullgraph=True)
names, lengths = list(range(40)), [3 + 5 * i % 60 for i in range(40)]
for name, length in zip(names, lengths, strict=True):
    manager.allocate(name, length)
prompts = [torch.randint(100, (length,)) for length in lengths]

batch = build_batch(manager, names, lengths)
batch.mark_batch_dynamic(tokens := torch.cat(prompts))
with torch.no_grad():
    compiled(tokens, batch)  # all prompts at once; this call compiles
    newest = torch.randint(100, (40,))
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in (40, 7, 1, 2, 23):
            for name in names[:size]:
                manager.append(name, 1)
            batch = build_batch(manager, names[:size])
            eager = step(newest[:size], batch)
            newest[:size] = compiled(newest[:size], batch)
            assert torch.equal(newest[:size], eager)
            shape, longest = list(batch.block_tables.shape), int(batch.seq_lens.max())
            print(f"{size:>2} requests, the longest has {longest} tokens, table {shape}")
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"graphs compiled: {graphs}")
assert graphs == 1
