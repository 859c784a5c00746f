"""What a pool has to know of a model's attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

_WINDOWS = {"full_attention": False, "sliding_attention": True}  # layer types that are served


@dataclass(frozen=True)
class Layer:
    """One layer that keeps keys and values.

    Attributes
    ----------
    index : int
        The layer's number in the model's calls of its cache.
    num_kv_heads, head_dim, head_dim_v : int
        Sizes of its keys and values.
    dtype : torch.dtype
        Of its keys.
    sliding_window : int, optional
        How many keys a query sees, its own included. None: all.
    """

    index: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    sliding_window: int | None

    @property
    def sizes(self) -> tuple[int, int, int, torch.dtype]:
        """What layers of one pool have in common."""
        return self.num_kv_heads, self.head_dim, self.head_dim_v, self.dtype


def configured_layers(model: PreTrainedModel) -> list[Layer]:
    """Return a model's layers as its configuration tells them, or refuse layers of other kinds."""
    config = model.config.get_text_config(decoder=True)
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return [
        Layer(index, num_kv_heads, head_dim, head_dim, model.dtype, window)
        for index, window in enumerate(layer_windows(config))
    ]


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer, or refuse layers of another kind."""
    types, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for index, kind in enumerate(types):
        if kind not in _WINDOWS:
            expected = " or ".join(_WINDOWS)
            raise ValueError(f"layer {index} of the model is {kind}, expected {expected}")
    return [
        each["sliding_window"] if _WINDOWS[kind] else None
        for kind, each in zip(types, options, strict=True)
    ]


def by_group(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Put the layers together that share a pool: those of one window and of equal sizes."""
    sizes: dict[int | None, list[Any]] = {}
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        window = layer.sliding_window
        alike = sizes.setdefault(window, [])
        if layer.sizes not in alike:
            alike.append(layer.sizes)
        name = "full" if window is None else f"window {window}"
        if number := alike.index(layer.sizes):
            name += f", sizes {number + 1}"
        groups.setdefault(name, []).append(layer)
    return groups
