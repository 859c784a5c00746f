"""PackedModel: a transformers model over the new tokens of many requests, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_ops.engine import LayerAttention
from paged_ops.integrations.transformers.attention import KEYWORD, NAME, register


@dataclass(frozen=True)
class PackedConfig:
    """What an engine has to know of a model to make a pool for it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    vocab_size: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> PackedConfig:
        """Read it from the model's configuration."""
        config = model.config.get_text_config(decoder=True)
        num_heads = config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or num_heads,
            getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            config.max_position_embeddings,
            config.vocab_size,
        )


class PackedModel(nn.Module):
    """Runs a transformers model over one flat run of tokens that belong to many requests.

    It is a `paged_ops.engine.Model`: it keeps no cache, and in every layer, query, key and value of
    the new tokens go to a callable.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model whose attention goes through transformers' ``AttentionInterface``. Its
        attention is set to ``"paged_ops"``.

    Examples
    --------
    >>> from paged_ops.engine import Engine
    >>> from paged_ops.demo.llama import load_llama
    >>> from paged_ops.integrations.transformers import PackedModel
    >>> engine = Engine(PackedModel(load_llama()), num_blocks=8, block_size=4, max_batch=2)
    >>> request = engine.submit([5, 6, 7], max_new_tokens=3)
    >>> len(list(engine.run())), len(request.generated)
    (3, 3)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        register()
        model.set_attn_implementation(NAME)
        self.model = model
        self.config = PackedConfig.of(model)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: LayerAttention, rows: Tensor
    ) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        tokens, positions : Tensor
            int64 ``[num_tokens]``: the new tokens of all requests, one request after another, and
            where each sits in its request.
        attend : callable
            Called in every layer.
        rows : Tensor
            Which tokens' logits are wanted, int64 ``[num_rows]``.

        Returns
        -------
        Tensor
            float32 ``[num_rows, vocab_size]``.
        """
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            **{KEYWORD: _Flat(attend)},
        )
        logits: Tensor = output.logits[0].to(torch.float32)
        return logits


class _Flat:
    """Takes away the batch dimension of 1 on the way to a `LayerAttention`."""

    def __init__(self, attend: LayerAttention) -> None:
        self._attend = attend

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        if mask is not None:
            raise ValueError("attention_mask is a tensor, expected None: nothing is padded here")
        return self._attend(layer, query[0], key[0], value[0], **options)[None]
