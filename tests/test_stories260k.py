"""A trained model that speaks through the paged ops.

stories260K is a Llama of 260,000 parameters (8 heads, 4 KV heads, head_dim 8). Its greedy text is
known, so one wrong key in 200 steps would show. The weights are not part of this project: the
test looks in ``$PAGED_TEST_DATA``, or else in ``shared/data`` beside the repository, and skips
where they are absent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import paged_ops

assert paged_ops  # Loads the library that registers torch.ops.paged.

BOS = 1
NUM_STEPS = 200
KNOWN_TEXT = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. \
She said, "I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""


def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PAGED_TEST_DATA", beside)) / "models" / "stories260K"
    if not (folder / "stories260K.bin").exists():
        pytest.skip(f"stories260K is not in {folder}; set PAGED_TEST_DATA to the data folder")
    return folder


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    mlp_norm: Tensor
    gate: Tensor
    down: Tensor
    up: Tensor


class Model:
    """A Llama in the llama2.c format: seven int32, then float32 weights, one kind at a time."""

    def __init__(self, path: Path) -> None:
        header = np.fromfile(path, dtype=np.int32, count=7).tolist()
        dim, hidden_dim, num_layers, self.num_heads, self.num_kv_heads, vocab_size, _ = header
        self.head_dim = dim // self.num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        weights = torch.from_numpy(np.fromfile(path, dtype=np.float32, offset=28))
        self._taken = 0

        def take(*shape: int) -> Tensor:
            start, self._taken = self._taken, self._taken + int(np.prod(shape))
            return weights[start : self._taken].view(shape)

        self.embedding = take(abs(vocab_size), dim)
        kinds = [
            take(num_layers, dim),
            take(num_layers, dim, dim),
            take(num_layers, kv_dim, dim),
            take(num_layers, kv_dim, dim),
            take(num_layers, dim, dim),
            take(num_layers, dim),
            take(num_layers, hidden_dim, dim),
            take(num_layers, dim, hidden_dim),
            take(num_layers, hidden_dim, dim),
        ]
        self.layers = [Layer(*(kind[i] for kind in kinds)) for i in range(num_layers)]
        self.norm = take(dim)
        assert vocab_size > 0, "the classifier is expected to be the embedding"

    def forward(self, token: int, position: int, pool: Pool) -> Tensor:
        """Write one token's keys and values into the pool and return the next one's logits."""
        x = self.embedding[token]
        for layer, (key_cache, value_cache) in zip(self.layers, pool.caches, strict=True):
            h = rms_norm(x, layer.attention_norm)
            query = rotate((layer.wq @ h).view(1, self.num_heads, self.head_dim), position)
            key = rotate((layer.wk @ h).view(1, self.num_kv_heads, self.head_dim), position)
            value = (layer.wv @ h).view(1, self.num_kv_heads, self.head_dim)
            torch.ops.paged.write_kv(key, value, key_cache, value_cache, pool.slot(position))
            attended = torch.ops.paged.attention(
                query,
                key_cache,
                value_cache,
                pool.block_table,
                torch.tensor([position + 1], dtype=torch.int32),
            )
            x = x + layer.wo @ attended.flatten()
            h = rms_norm(x, layer.mlp_norm)
            x = x + layer.down @ (silu(layer.gate @ h) * (layer.up @ h))
        return self.embedding @ rms_norm(x, self.norm)


class Pool:
    """The pool of one sequence, its blocks in random order, NaN wherever nothing was written."""

    def __init__(self, model: Model, block_size: int) -> None:
        num_needed = -(-NUM_STEPS // block_size)
        num_blocks = num_needed + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        shape = (num_blocks, 2, model.num_kv_heads, block_size, model.head_dim)
        self.block_size = block_size
        self.block_table = order[:num_needed].int().unsqueeze(0)
        self.caches = [
            torch.full(shape, float("nan")).transpose(2, 3).unbind(1) for _ in model.layers
        ]

    def slot(self, position: int) -> Tensor:
        block = self.block_table[0, position // self.block_size]
        return (block.long() * self.block_size + position % self.block_size).view(1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean() + 1e-5) * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """Turn neighbouring pairs of ``[1, num_heads, head_dim]`` by their rotary angles."""
    frequencies = 10000.0 ** (-torch.arange(0, x.shape[2], 2) / x.shape[2])
    turn = torch.polar(torch.ones_like(frequencies), position * frequencies)
    pairs = torch.view_as_complex(x.unflatten(2, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(2)


def read_tokens(path: Path, count: int) -> list[bytes]:
    """Read a llama2.c tokenizer: the longest length, then (score, length, bytes) of each token."""
    data = path.read_bytes()
    tokens, offset = [], 4
    for _ in range(count):
        length = int.from_bytes(data[offset + 4 : offset + 8], "little")
        tokens.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return tokens


def to_text(ids: list[int], tokens: list[bytes]) -> str:
    """Join tokens as sentencepiece does: no space at the start, <0x..> is one byte."""
    pieces = [
        bytes([int(tokens[i][3:5], 16)]) if tokens[i].startswith(b"<0x") else tokens[i] for i in ids
    ]
    return b"".join(pieces).decode().removeprefix(" ")


@torch.inference_mode()
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_greedy_text_is_the_known_one_character_for_character(block_size: int) -> None:
    torch.set_num_threads(1)  # Matrices of 64 x 64 gain nothing from more.
    folder = data_folder()
    model = Model(folder / "stories260K.bin")
    tokens = read_tokens(folder / "tok512.bin", len(model.embedding))
    pool = Pool(model, block_size)
    ids, token = [], BOS
    for position in range(NUM_STEPS):
        token = int(model.forward(token, position, pool).argmax())
        ids.append(token)
    text = to_text(ids, tokens)
    assert text == KNOWN_TEXT
