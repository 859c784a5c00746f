"""One process computes a prompt, the other decodes: the request moves, with all its blocks.

`send_request` and `receive_request` carry blocks and books over torch.distributed, here gloo. The
receiver goes on as if it had computed the prompt itself: its tokens are those of one process that
decodes with a contiguous cache.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paged_ops import BlockManager, PagedKVCache, build_batch
from paged_ops.demo.model import ContiguousAttention, load_model
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.distributed import receive_request, send_request
from paged_ops.engine import PagedLayers

PROMPT, NEW_TOKENS = "JULIET.\nO Romeo, wherefore art thou", 32


def likeliest(model, text, num_new, attend):
    """Run the model over the last tokens of a text; return the token that follows."""
    positions = torch.arange(len(text) - num_new, len(text))
    return int(model(torch.tensor(text[-num_new:]), positions, attend)[-1].argmax())


def prefill(model, manager, cache, text):
    manager.allocate("juliet", text)
    batch = build_batch(manager, ["juliet"], [len(text)])
    first = likeliest(model, text, len(text), PagedLayers(cache, batch))
    manager.commit("juliet")
    send_request(manager, cache, "juliet", destination=1)
    manager.free("juliet")
    print(
        f"rank 0: {len(text)} tokens computed and sent, {manager.num_used} blocks kept", flush=True
    )
    dist.send(torch.tensor(first), dst=1)  # after the line above, so that lines don't mix


def decode(model, manager, cache, text):
    name = receive_request(manager, cache, source=0)
    dist.recv(first := torch.tensor(0), src=0)
    print(f"rank 1: {name!r} is here, {manager.num_tokens(name)} tokens")
    continued = [*text, int(first)]
    while len(continued) < len(text) + NEW_TOKENS:
        manager.append(name, continued[-1:])
        attend = PagedLayers(cache, build_batch(manager, [name]))
        continued.append(likeliest(model, continued, 1, attend))
    attend = ContiguousAttention(model.config)
    expected = [*text, likeliest(model, text, len(text), attend)]
    while len(expected) < len(continued):
        expected.append(likeliest(model, expected, 1, attend))
    assert continued == expected
    print(Tokenizer.load().decode(continued))
    print(f"rank 1: {NEW_TOKENS} tokens, the same as in one process")


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, text = load_model(), Tokenizer.load().encode(PROMPT)
    manager = BlockManager(num_blocks=16, block_size=8)
    cache = PagedKVCache(*model.config.pool_shape(16, 8))
    (prefill, decode)[rank](model, manager, cache, text)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store",), nprocs=2)
