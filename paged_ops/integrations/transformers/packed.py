"""PackedModel: a transformers model over the new tokens of many requests, without padding."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_ops.batch.batch import Batch, build_batch
from paged_ops.blocks.manager import BlockManager
from paged_ops.engine import LayerAttention
from paged_ops.functional import attention, write_kv
from paged_ops.integrations.transformers.attention import NAME, register
from paged_ops.integrations.transformers.layers import Layer, configured_layers
from paged_ops.integrations.transformers.notes import Note, NotingCache
from paged_ops.integrations.transformers.probe import STEPS, Sample, Trial, probed_layers
from paged_ops.pool.kv_cache import PagedKVCache

_LIMITS = ("max_position_embeddings", "max_target_positions")  # names in configurations


@dataclass(frozen=True)
class PackedConfig:
    """What an engine has to know of a model to make a pool for it.

    Attributes
    ----------
    layers : list of Layer
        The layers that keep keys and values, in the order of the numbers that `LayerAttention` is
        given.
    max_positions : int
        Tokens of a request at most.
    vocab_size : int
        Token ids are below this.
    """

    layers: Sequence[Layer]
    max_positions: int
    vocab_size: int

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Heads of the keys and values in every layer; a ValueError if layers differ."""
        return int(self._of_all("num_kv_heads"))

    @property
    def head_dim(self) -> int:
        """Elements of a key per head in every layer; a ValueError if layers differ."""
        return int(self._of_all("head_dim"))

    @property
    def head_dim_v(self) -> int:
        """Elements of a value per head in every layer; a ValueError if layers differ."""
        return int(self._of_all("head_dim_v"))

    def _of_all(self, name: str) -> Any:
        values = [getattr(layer, name) for layer in self.layers]
        for layer, value in zip(self.layers, values, strict=True):
            if value != values[0]:
                raise ValueError(
                    f"layer {layer.index} has {name} {value}, but layer {self.layers[0].index} "
                    f"has {values[0]}: one pool for all layers takes one size; make a pool for "
                    f"each of config.layers"
                )
        return values[0]


class PackedModel(nn.Module):
    """Runs a transformers model over one flat run of tokens that belong to many requests.

    It is a `paged_ops.engine.Model`: it keeps no cache, and in every layer, query, key and value of
    the new tokens go to a callable.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model whose attention goes through transformers' ``AttentionInterface``. Its
        attention is set to ``"paged_ops"``.
    probe : bool
        Whether the model is tried first: two prompts of a few tokens are run together and each
        alone by its own attention. Sizes and windows of the layers come from there. Without that
        its configuration is believed.

    Raises
    ------
    ValueError
        The model computes something else when it runs several requests at once over blocks, with
        the reason.

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

    def __init__(self, model: PreTrainedModel, *, probe: bool = True) -> None:
        super().__init__()
        config = model.config.get_text_config(decoder=True)
        limits = (getattr(config, name, None) for name in _LIMITS)
        max_positions = next((limit for limit in limits if limit), None)
        if probe:
            # The prompts lie far apart, for positions that count from the longest request.
            trial = Trial("packed", partial(_try, model), start=(max_positions or 0) // 2)
            layers = probed_layers(model, trial)
        else:
            layers = configured_layers(model)
        register()
        model.set_attn_implementation(NAME)
        self.model = model
        self.config = PackedConfig(layers, max_positions or sys.maxsize, config.vocab_size)

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
        return _run(self.model, self.config.layers, tokens, positions, attend, rows)


def _run(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    tokens: Tensor,
    positions: Tensor,
    attend: LayerAttention,
    rows: Tensor,
) -> Tensor:
    """As `PackedModel.forward`."""
    flat = _Flat(attend, layers)
    given = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "cache": NotingCache(flat, [layer.sliding_window is not None for layer in layers]),
        "use_cache": True,
    }
    keeps = bool(model._supports_logits_to_keep())  # type: ignore[operator]
    if keeps:
        given["logits_to_keep"] = rows
    logits: Tensor = model(**given).logits[0]
    return (logits if keeps else logits[rows]).to(torch.float32)


def _try(
    model: PreTrainedModel, layers: Sequence[Layer], sample: Sample
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a sample as one run of tokens after another; see `probe.Trial`."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError("it counts positions itself: its forward takes no position_ids")
    pools = _Pools(layers, model.device)
    manager, requests = BlockManager(8, 4), range(len(sample.mask))
    for request in requests:
        manager.allocate(request, 0)
    for begin, end in itertools.pairwise((0, *STEPS)):
        new = sample.mask[:, begin:end]
        lengths = new.sum(1).tolist()
        for request, length in zip(requests, lengths, strict=True):
            manager.append(request, length)
        pools.batch = build_batch(manager, requests, lengths, device=model.device)
        places = new.nonzero() + torch.tensor([0, begin], device=model.device)
        row, column = places.unbind(1)
        tokens, positions = sample.tokens[row, column], sample.positions[row, column]
        everyone = torch.arange(len(tokens), device=model.device)
        yield _run(model, layers, tokens, positions, pools, everyone), places.cpu()


class _Pools:
    """A small pool for each layer, and what a step does with them."""

    batch: Batch

    def __init__(self, layers: Sequence[Layer], device: torch.device) -> None:
        self._pools = [
            PagedKVCache(
                1,
                8,
                4,
                each.num_kv_heads,
                each.head_dim,
                each.dtype,
                device,
                head_dim_v=each.head_dim_v,
            )
            for each in layers
        ]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Write and attend, as a `LayerAttention`."""
        caches, batch = self._pools[layer].layer(0), self.batch
        write_kv(key, value, *caches, batch.slot_mapping)
        tables = batch.block_tables, batch.seq_lens, batch.query_start_loc
        return attention(query, *caches, *tables, **options)


class _Flat:
    """Takes away the batch dimension of 1 on the way to a `LayerAttention`."""

    def __init__(self, attend: LayerAttention, layers: Sequence[Layer]) -> None:
        self._attend = attend
        self._layers = {layer.index: (number, layer) for number, layer in enumerate(layers)}

    def attend(
        self,
        note: Note,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Hand a layer's only row on; its keys and values again, where layers share them."""
        if mask is not None and not mask.all():
            raise ValueError("attention_mask is 0 somewhere, but nothing is padded here")
        number, layer = self._layers[note.layer]
        if options["sliding_window"] not in (None, layer.sliding_window):
            raise ValueError(
                f"layer {note.layer} attends with sliding_window {options['sliding_window']}, "
                f"expected {layer.sliding_window}"
            )
        options["sliding_window"] = layer.sliding_window
        rows = (each[0].to(layer.dtype) for each in (query, key, value))
        return self._attend(number, *rows, **options)[None].to(query.dtype)

    def num_seen(self, layer: int) -> int:
        """Return 0: the new tokens alone are laid out here."""
        return 0
