"""What an engine has to know of a model, and the attention that it hands to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

import paged_ops
from paged_ops import Batch, PagedKVCache


class ModelShape(Protocol):
    """What the pool of a model depends on, and which sequences it takes."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows: ids are below."""

    @property
    def num_layers(self) -> int:
        """Layers, each with a pool of its own."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of the keys and values."""

    @property
    def head_dim(self) -> int:
        """Elements of a key or value per head."""

    @property
    def max_positions(self) -> int:
        """Tokens that a sequence may have."""


class LayerAttention(Protocol):
    """Writes a layer's new keys and values into a pool and attends to it."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Attend from ``[num_tokens, num_heads, head_dim]``; options as `paged_ops.attention`."""


class Model(Protocol):
    """A causal language model that keeps no cache: its attention is a parameter of the call."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""

    def parameters(self) -> Iterator[Tensor]:
        """Its weights; the first one's dtype is the cache's."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: LayerAttention, *, rows: Tensor
    ) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        tokens, positions : Tensor
            int64 ``[num_tokens]``: the new tokens of all requests, one request after another, and
            where each sits in its request.
        attend : LayerAttention
            Called in every layer with the query, key and value of the new tokens.
        rows : Tensor
            Which tokens' logits are wanted, int64 ``[num_rows]``.

        Returns
        -------
        Tensor
            float32 ``[num_rows, vocab_size]``.
        """


class PagedLayers:
    """Attention over the paged cache for one step's batch; what the model calls in each layer."""

    def __init__(self, cache: PagedKVCache, batch: Batch) -> None:
        self._cache, self._batch = cache, batch

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Write the new keys and values into their slots, then attend through the block tables.

        Options are those of `paged_ops.attention`.
        """
        key_cache, value_cache = self._cache.layer(layer)
        batch, scales = self._batch, self._cache.scales(layer)
        paged_ops.write_kv(key, value, key_cache, value_cache, batch.slot_mapping, **scales)
        return paged_ops.attention(
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            **scales,
            **options,
        )
