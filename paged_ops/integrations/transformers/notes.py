"""How a model's attention, once it is called, knows the cache that its keys and values went to.

A model gives each layer's new keys and values to its cache, and then query, key and value to the
attention function, which isn't told of the cache. So the cache leaves a note on the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

NOTE = "paged_note"
"""Under this name new keys and values, and the attention's keyword arguments, carry a `Note`."""


class Attends(Protocol):
    """Whatever holds the keys and values: writes the new ones, then attends to all."""

    def attend(
        self,
        note: Note,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attend in one layer.

        Parameters
        ----------
        note : Note
            What was said to the cache's update: the layer, and whether this is the first time that
            these keys and values are attended to.
        query, key, value : Tensor
            ``[batch, num_tokens, num_heads, head_dim]``, key and value with num_kv_heads. The
            query may be of the last tokens only, where the keys were written before.
        mask : Tensor, optional
            ``[batch, seen + num_tokens]`` bool: which tokens are no padding. None: all.
        options : dict
            scale, sliding_window, softcap and sinks, as `paged_ops.attention`.

        Returns
        -------
        Tensor
            ``[batch, num_tokens, num_heads, head_dim of value]``.
        """
        ...

    def num_seen(self, layer: int) -> int:
        """Return how many columns a layer has seen."""
        ...


@dataclass
class Note:
    """What a cache's ``update`` leaves for the attention function, which is called next.

    Attributes
    ----------
    holder : Attends
        Who attends.
    layer : int
        The layer's index, as the model numbers it in its cache.
    written : bool
        Whether the keys and values were attended to before, and so are in the pool.
    module : nn.Module, optional
        The attention layer, once it has called.
    """

    holder: Attends
    layer: int
    written: bool = False
    module: nn.Module | None = None


class NotingCache(Cache):
    """A cache whose keys and values are written and attended to by the attention function.

    Most models hand the very tensors that ``update`` returns to the attention function, so these
    carry the note, and two layers that share keys share it. Models that make others of them, as
    those with latent attention do, pass their keyword arguments on.

    Parameters
    ----------
    holder : Attends
        Who attends.
    sliding : list of bool
        Which layers have a sliding window.
    """

    def __init__(self, holder: Attends, sliding: list[bool]) -> None:
        super().__init__(layers=[NotedLayer(holder, *each) for each in enumerate(sliding)])
        self._holder = holder

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Leave a note for the attention function."""
        note = Note(self._holder, layer_idx)
        for tensor in (key_states, value_states):
            setattr(tensor, NOTE, note)
        if "kwargs" in kwargs:
            kwargs["kwargs"][NOTE] = note
        return key_states, value_states

    def _refuse_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what layers keep beside keys and values."""
        raise ValueError(
            "a layer keeps a state of its own (convolution, linear attention, indexer) beside keys "
            "and values, and blocks hold only those"
        )

    get_conv_state = update_conv_state = _refuse_state
    get_recurrent_state = update_recurrent_state = _refuse_state
    has_previous_state = update_indexer = _refuse_state


class NotedLayer(CacheLayerMixin):
    """What transformers asks of a single layer: how much it has seen."""

    is_compileable = False
    is_croppable = True

    def __init__(self, holder: Attends, index: int, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._holder, self._index = holder, index
        self.is_sliding = is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pools exist from the start."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: `NotingCache.update` is the way."""
        raise NotImplementedError("call update of the whole cache")

    def get_seq_length(self) -> int:
        """Return how many columns this layer has seen."""
        return self._holder.num_seen(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the next mask has, and that it begins with the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: what limits a row is the pool that all share."""
        return -1
