"""A pool of int8 beside float32 and bfloat16: its memory, and how well the model still predicts.

"Per token and head": `write_kv` chooses a scale for each row, nothing has to be known before. "Per
head": the scales are set first, here from the largest keys and values of another text. What counts
is the likelihood of a text that the model reads through the cache.
"""

import torch

from paged_ops import BlockManager, PagedKVCache, build_batch
from paged_ops.demo.model import load_model
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import PagedLayers

CALIBRATION = (
    "KING.\nNow, my good lords, what tidings do you bring from the north? I have not slept these "
    "three nights for the fear of it.\n\nFIRST LORD.\nMy liege, the rebels are dispersed and fled."
)
TEXT = (
    "HAMLET.\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to "
    "suffer\nThe slings and arrows of outrageous fortune,\nOr to take arms against a sea of "
    "troubles,\nAnd by opposing end them. To die: to sleep;\nNo more; and by a sleep to say we end"
)
tokenizer = Tokenizer.load()
float32, bfloat16 = load_model(), load_model(dtype=torch.bfloat16)


def read(model, text, cache):
    """Run the text through the pool; return how likely each token was, on average, and the rows."""
    tokens = torch.tensor(tokenizer.encode(text))
    manager = BlockManager(cache.num_blocks, cache.block_size)
    manager.allocate("text", len(tokens))
    batch = build_batch(manager, ["text"], [len(tokens)])
    logits = model(tokens, torch.arange(len(tokens)), PagedLayers(cache, batch))
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
    return loss.exp().item(), logits


def pool(**options):
    return PagedKVCache(*float32.config.pool_shape(16, 16), **options)


per_head = pool(cache_dtype=torch.int8, scale_granularity="head")
calibration = pool()
read(float32, CALIBRATION, calibration)
for layer in range(calibration.num_layers):
    largest = [part.abs().amax(dim=(0, 1, 3)) for part in calibration.layer(layer)]
    per_head.set_scales(layer, largest[0] / 127, largest[1] / 127)

exact, whole = read(float32, TEXT, plain := pool())
print(f"{'pool':24} {'KiB':>5} {'perplexity':>11} {'logits off by':>14}")
print(f"{'float32':24} {plain.num_bytes // 1024:>5} {exact:>11.3f} {0:>14.4f}")
for name, model, cache, most in (
    ("bfloat16, model as well", bfloat16, pool(dtype=torch.bfloat16), 0.02),
    ("int8, per token and head", float32, pool(cache_dtype=torch.int8), 0.01),
    ("int8, per head", float32, per_head, 0.01),
):
    perplexity, logits = read(model, TEXT, cache)
    off = (logits - whole).abs().mean().item()
    print(f"{name:24} {cache.num_bytes // 1024:>5} {perplexity:>11.3f} {off:>14.4f}")
    assert abs(perplexity / exact - 1) < most
