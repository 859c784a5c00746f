"""A small Llama-architecture language model whose attention is a parameter.

RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied embeddings. The model never sees
a batch dimension: it takes one flat run of tokens with their positions, and hands each layer's
query, key and value to a callable. What that callable does with them is the whole difference
between training (one causal mask per row), an ordinary contiguous KV cache
(:class:`ContiguousAttention`) and a paged one (:class:`paged_ops.engine.PagedLayers`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query, key, value) -> output``.

query ``[num_tokens, num_heads, head_dim]``, key and value ``[num_tokens, num_kv_heads, head_dim]``,
all of the new tokens only; output has query's shape.
"""

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; every field is stored in ``config.json``."""

    vocab_size: int = 2048
    dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden_dim: int = 512
    max_positions: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int]:
        """Return what `paged_ops.PagedKVCache` takes first."""
        return self.num_layers, num_blocks, block_size, self.num_kv_heads, self.head_dim


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, float32 ``[max_positions, head_dim // 2]``."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of ``x [num_tokens, heads, head_dim]`` by its angle."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class Block(nn.Module):
    """One layer: attention and a gated feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: AttentionFunction,
        dropout: float = 0.0,
    ) -> Tensor:
        """Map ``x [num_tokens, dim]`` to the next layer's input; ``dropout`` is for training."""
        head_dim = self.config.head_dim
        h = self.attention_norm(x)
        query = rotate(self.q_proj(h).unflatten(-1, (-1, head_dim)), cos, sin)
        key = rotate(self.k_proj(h).unflatten(-1, (-1, head_dim)), cos, sin)
        value = self.v_proj(h).unflatten(-1, (-1, head_dim))
        attended = attend(self.layer, query, key, value).flatten(-2)
        x = x + F.dropout(self.o_proj(attended), dropout, dropout > 0)
        h = self.ffn_norm(x)
        h = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return x + F.dropout(h, dropout, dropout > 0)


class LanguageModel(nn.Module):
    """The whole model: tokens and their positions in, one row of float32 logits per token out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        for name, table in zip(("cos", "sin"), rotary_tables(config), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: AttentionFunction,
        rows: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        tokens, positions : Tensor
            int64 ``[num_tokens]``: the new tokens of any number of sequences, one after another,
            and where each sits in its sequence (below ``max_positions``).
        attend : callable
            See :data:`AttentionFunction`.
        rows : Tensor, optional
            Which tokens' logits are wanted, int64 ``[num_rows]``. Default: all.
        dropout : float
            Share of the residual updates dropped, for training.

        Returns
        -------
        Tensor
            float32 ``[num_rows, vocab_size]``.
        """
        x = self.embedding(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        for block in self.blocks:
            x = block(x, cos, sin, attend, dropout)
        if rows is not None:
            x = x[rows]
        # The last product is float32 in every dtype: logits rounded to bfloat16 tie too often for
        # an argmax to mean anything.
        return F.linear(self.norm(x).float(), self.embedding.weight.float())


class ContiguousAttention:
    """One sequence's ordinary KV cache, read by torch's ``scaled_dot_product_attention``.

    This is what the paged engine's tokens are compared with: it shares no code with it beyond the
    model's own forward.
    """

    def __init__(self, config: ModelConfig) -> None:
        nothing = torch.empty(0, config.num_kv_heads, config.head_dim)
        self._past = [(nothing, nothing)] * config.num_layers  # keys and values of each layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append key and value ``[num_tokens, num_kv_heads, head_dim]``, attend causally."""
        past_key, past_value = (past.to(key.dtype) for past in self._past[layer])
        key, value = torch.cat([past_key, key]), torch.cat([past_value, value])
        self._past[layer] = key, value
        num_tokens, length = query.shape[0], key.shape[0]
        # End-aligned: new token j sits at position length - num_tokens + j.
        mask = torch.ones(num_tokens, length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - num_tokens)
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        return output.transpose(0, 1)


def read_config(folder: Path = FOLDER) -> dict[str, Any]:
    """Read ``config.json``: the architecture, how it was trained, the losses reached."""
    return cast("dict[str, Any]", json.loads((folder / "config.json").read_text("utf-8")))


def load_model(folder: Path = FOLDER, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Build the model of ``config.json``, filled with the weights of ``model.safetensors``.

    The file holds float16; ``dtype`` is what the model computes in.
    """
    from safetensors.torch import load_file

    model = LanguageModel(ModelConfig(**read_config(folder)["architecture"]))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    cos, sin = model.cos, model.sin
    model = model.to(dtype).eval().requires_grad_(False)
    # Rotation angles stay float32: bfloat16 holds 8 bits of an angle.
    model.cos, model.sin = cos, sin
    return model
