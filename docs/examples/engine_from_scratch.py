"""Continuous batching on the ops, the pool and the books alone, under a tiny random transformer.

Prefixes are found, a full pool preempts the youngest, the tokens are those of torch's attention.
"""

from collections import deque
from contextlib import suppress

import torch
import torch.nn.functional as F

from paged_ops import BlockManager, OutOfBlocks, PagedKVCache, attention, build_batch, write_kv

torch.manual_seed(0)
LENGTH = 40  # of a prompt with its answer: ten blocks of sixteen
embedding, positional = torch.randn(500, 64), torch.randn(LENGTH, 64)
layers = [(torch.randn(64, 192) / 8, torch.randn(64, 64) / 8) for _ in range(2)]
manager = BlockManager(num_blocks=16, block_size=4)
cache = PagedKVCache(len(layers), 16, 4, num_kv_heads=4, head_dim=16)
texts = {name: [*range(12), 100 + i] for i, name in enumerate(("ann", "bob", "cid", "dee", "eve"))}
waiting, running, steps = deque(texts), [], 0  # running: the oldest first


def model(tokens, positions, attend):
    x = embedding[tokens] + positional[positions]
    for layer, (qkv, mlp) in enumerate(layers):
        rows = (F.layer_norm(x, [64]) @ qkv).view(-1, 3, 4, 16).unbind(1)
        x = x + attend(layer, *rows).flatten(1)
        x = x + F.gelu(F.layer_norm(x, [64]) @ mlp)
    return (x @ embedding.T).argmax(-1)


def paged(layer, query, key, value):
    write_kv(key, value, *cache.layer(layer), batch.slot_mapping)
    index = batch.block_tables, batch.seq_lens, batch.query_start_loc
    return attention(query, *cache.layer(layer), *index)


def alone(layer, *rows):
    heads_first = (tensor.transpose(0, 1) for tensor in rows)
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)


def schedule():
    """Return how many tokens of each request the next step computes: grow first, then admit."""
    new = {}
    for request in list(running):
        while request in running and request not in new:
            try:
                manager.append(request, texts[request][-1:])
                new[request] = 1
            except OutOfBlocks:
                waiting.appendleft(running.pop())
                manager.preempt(waiting[0])
    with suppress(OutOfBlocks):  # the others wait until somebody is done
        while waiting:
            prompt = texts[waiting[0]]
            new[waiting[0]] = len(prompt) - manager.allocate(waiting[0], prompt)
            running.append(waiting.popleft())
    return new


while waiting or running:
    new = schedule()
    batch = build_batch(manager, list(new), list(new.values()))
    tokens = torch.tensor([token for r, n in new.items() for token in texts[r][-n:]])
    positions = torch.tensor([len(texts[r]) - n + i for r, n in new.items() for i in range(n)])
    steps += 1
    chosen = model(tokens, positions, paged)[batch.query_start_loc[1:] - 1].tolist()
    for request, token in zip(new, chosen, strict=True):
        manager.commit(request)  # it is written: others may find it
        texts[request].append(token)
        if len(texts[request]) == LENGTH:
            running.remove(request)
            manager.free(request)
for text in texts.values():
    assert text[13:] == model(torch.tensor(text[:-1]), torch.arange(39), alone)[12:].tolist()
stats = manager.stats()
print(f"{steps} steps, {stats.hit_tokens} tokens found, {stats.preemptions} preemptions")
