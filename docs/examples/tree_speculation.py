"""Speculative decoding with a tree of candidates, checked by one call of the model.

What followed the newest token wherever it stood before is proposed, all of it at once: a tree whose
branches share what they begin with. `tree_mask` lets each candidate see its ancestors only. The
branch that the model agrees with is kept: the tokens are those of plain decoding, in fewer calls.
"""

from functools import partial

import torch

from paged_ops import BlockManager, PagedKVCache, build_batch, write_kv
from paged_ops.demo.model import ContiguousAttention, load_model
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import PagedLayers

PROMPT, NEW_TOKENS, DEPTH, MOST_NODES = "ROMEO.\nO, my lord, my lord, I have", 64, 5, 24

model, tokenizer = load_model(), Tokenizer.load()
manager = BlockManager(num_blocks=32, block_size=8)
cache = PagedKVCache(*model.config.pool_shape(32, 8))


def propose(text):
    """Return the tree's tokens, each one's parent and its children; node 0 is the newest token."""
    tokens, parents, children = [text[-1]], [0], [{}]
    for place in reversed(range(len(text) - 1)):
        node = 0
        for token in text[place + 1 : place + 1 + DEPTH] if text[place] == text[-1] else ():
            if token not in children[node] and len(tokens) < MOST_NODES:
                children[node][token] = len(tokens)
                tokens, parents, children = [*tokens, token], [*parents, node], [*children, {}]
            node = children[node].get(token)
            if node is None:
                break
    return tokens, parents, children


def decode_by_trees(text, length):
    """Lengthen a text by one call of the model after another; return how many there were."""
    manager.allocate("ann", len(text) - 1)
    attend = PagedLayers(cache, build_batch(manager, ["ann"], [len(text) - 1]))
    model(torch.tensor(text[:-1]), torch.arange(len(text) - 1), attend)
    calls = 0
    while len(text) < length:
        tokens, parents, children = propose(text)
        mask = torch.eye(len(tokens), dtype=torch.bool)
        for node, parent in enumerate(parents):
            mask[node] |= mask[parent]
        manager.append("ann", len(tokens))
        batch = build_batch(manager, ["ann"], [len(tokens)])
        attend = partial(PagedLayers(cache, batch), tree_mask=mask)
        positions = mask.sum(1) + len(text) - 2
        best = model(torch.tensor(tokens), positions, attend).argmax(-1).tolist()
        path = [0]
        while (following := children[path[-1]].get(best[path[-1]])) is not None:
            path.append(following)
        blocks, offsets = batch.slot_mapping[path] // 8, batch.slot_mapping[path] % 8
        for layer in range(cache.num_layers):  # the accepted branch, to where it belongs
            rows = [part[blocks, offsets] for part in cache.layer(layer)]
            write_kv(*rows, *cache.layer(layer), batch.slot_mapping[: len(path)])
        text += [best[node] for node in path]
        manager.truncate("ann", len(text) - 1)  # the newest token isn't written yet
        calls += 1
    return calls


text = tokenizer.encode(PROMPT)
length = len(text) + NEW_TOKENS
plain, attend, start = list(text), ContiguousAttention(model.config), 0
while len(plain) < length:
    new = torch.tensor(plain[start:])
    start, logits = len(plain), model(new, torch.arange(start, len(plain)), attend)
    plain.append(int(logits[-1].argmax()))
calls = decode_by_trees(text, length)
assert text[:length] == plain
print(tokenizer.decode(plain))
print(f"{NEW_TOKENS} tokens in {calls} calls of the model, {NEW_TOKENS / calls:.2f} a call")
assert calls < NEW_TOKENS
