"""A model for engines of a hundred numbers, whose tokens depend on all that came before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_ops.engine import LayerAttention


@dataclass(frozen=True)
class TinyConfig:
    vocab_size: int = 40
    num_layers: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8
    max_positions: int = 64


class TinyModel:
    """Attention over embeddings, twice; raises when it meets `poison`."""

    def __init__(self, poison: int | None = None) -> None:
        self.config = TinyConfig()
        self.poison = poison
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(self.config.vocab_size, 8, generator=generator)
        self.positions = torch.randn(self.config.max_positions, 8, generator=generator)
        self.weights = torch.randn(2, 3, 8, 16, generator=generator)

    def parameters(self) -> Iterator[Tensor]:
        yield self.embedding

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: LayerAttention, *, rows: Tensor
    ) -> Tensor:
        x = self.embedding[tokens] + self.positions[positions]
        for layer, weights in enumerate(self.weights):
            query, key, value = x @ weights
            heads = query.view(-1, 2, 8), key[:, None, :8], value[:, None, :8]
            x = x + attend(layer, *heads).flatten(1) @ weights[0].T
            if layer and self.poison is not None and self.poison in tokens.tolist():
                raise IndexError(f"{self.poison} out of range")
            x = torch.nn.functional.rms_norm(x, [8])
        return x[rows] @ self.embedding.T
