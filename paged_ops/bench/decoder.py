"""A decoder step over a pool, and the batches that one runs on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paged_ops import Batch, PagedKVCache
from paged_ops.demo.model import LanguageModel, ModelConfig
from paged_ops.engine import PagedLayers

TINY = ModelConfig(
    vocab_size=64, dim=32, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=64,
    max_positions=1024,
)  # fmt: skip
"""Four layers of hardly any arithmetic: what is left is what a graph costs."""

LLAMA_SHAPED = ModelConfig(
    vocab_size=8192, dim=1024, num_heads=16, num_kv_heads=4, head_dim=64, hidden_dim=2816,
    max_positions=4096,
)  # fmt: skip
"""Four layers with the proportions of a small Llama."""


class DecoderStep(nn.Module):
    """One step of a model over its pool: in each layer write, attend, MLP; then the logits.

    Parameters
    ----------
    model : LanguageModel
        The model.
    cache : PagedKVCache
        Its pool, of as many layers.
    """

    def __init__(self, model: LanguageModel, cache: PagedKVCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, tokens: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Return ``[num_tokens, vocab_size]`` for ``[num_tokens]`` tokens and their positions."""
        logits: Tensor = self.model(tokens, positions, PagedLayers(self.cache, batch))
        return logits


def make_step(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> DecoderStep:
    """Return a step with random weights, the same ones for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(config).to(dtype).eval().requires_grad_(False)
    shape = config.pool_shape(num_blocks, block_size)
    return DecoderStep(model, PagedKVCache(*shape, dtype, cache_dtype=cache_dtype))


def decode_batch(
    step: DecoderStep, batch: int, max_blocks_per_seq: int, seed: int = 0
) -> tuple[Tensor, Tensor, Batch]:
    """Return the arguments of a decode step of sequences of random lengths.

    Parameters
    ----------
    step : DecoderStep
        The step they are for. Its pool must have ``batch * max_blocks_per_seq`` blocks.
    batch, max_blocks_per_seq : int
        The shape of the block tables, whose blocks lie anywhere in the pool.
    seed : int
        Of the random numbers.

    Returns
    -------
    tokens, positions : Tensor
        ``[batch]`` int64.
    batch : Batch
        One new token for each sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks, block_size = step.cache.num_blocks, step.cache.block_size
    blocks = torch.randperm(num_blocks, generator=generator)[: batch * max_blocks_per_seq]
    block_tables = blocks.view(batch, max_blocks_per_seq).to(torch.int32)
    longest = min(max_blocks_per_seq * block_size, step.model.config.max_positions)
    seq_lens = torch.randint(1, longest + 1, (batch,), generator=generator, dtype=torch.int32)
    positions = seq_lens.long() - 1
    last_blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    index = Batch(
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32),
        slot_mapping=last_blocks * block_size + positions % block_size,
    )
    tokens = torch.randint(0, step.model.config.vocab_size, (batch,), generator=generator)
    return tokens, positions, index
