"""What is served: a Llama, of random weights or trained, and a queue of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paged_ops.bench.memory.lengths import DISTRIBUTIONS, Distribution


@dataclass(frozen=True)
class Shape:
    """The model: Llama with grouped-query attention; its head_dim is 64."""

    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    vocab_size: int = 4096

    def build(self, max_length: int) -> LlamaForCausalLM:
        """Make the model in float32, the same one every time."""
        hidden = 64 * self.num_heads
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=64,
            max_position_embeddings=max_length,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config)
        model.eval()
        return model


def load(folder: Path) -> LlamaForCausalLM:
    """Read a trained model in float32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def bytes_per_token(model: LlamaForCausalLM) -> int:
    """Return the bytes of a token's keys and values over all layers, in float32."""
    config = model.config
    sizes = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return 2 * 4 * math.prod(size or 0 for size in sizes)


class Job(NamedTuple):
    """One request: its prompt's ids, and how many tokens its answer has."""

    prompt: list[int]
    num_new: int


def make_jobs(count: int, max_length: int, vocab_size: int) -> list[Job]:
    """Draw requests of at most `max_length` tokens, of which ShareGPT's means are the same share.

    That is, as large a share as they are of the 2048 tokens of the models that they were measured
    with.
    """
    means = DISTRIBUTIONS["sharegpt-means"]
    share = max_length / means.max_length
    scaled = Distribution(means.mean_prompt * share, means.mean_output * share, max_length)
    lengths = scaled.draw(count)
    generator = torch.Generator().manual_seed(0)
    return [
        Job(torch.randint(vocab_size, (prompt,), generator=generator).tolist(), output)
        for prompt, output, _ in lengths
    ]
