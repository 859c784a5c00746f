"""A model is tried once, on two short prompts, before its attention is replaced.

What a model's configuration says needn't be what its layers do: they may keep a state of their own,
attend without transformers' interface, lay another mask over their keys, or have other sizes. So a
first run without attention notes what each layer gives to its cache, and further ones compare what
the model computes over blocks with what it computes by its own ("eager") attention.

Two correct ways differ by rounding, which a model may enlarge. How far is measured, too: by running
the model's own attention again with the embeddings changed in their last bits. A wrong mask changes
a layer's output by a tenth of its size or more. The limit is the geometric mean of the two, and at
least three times the rounding: 10^-4 or so in float32, 0.04 in bfloat16. Layers where it comes to 1
aren't judged; the first ones always are. A choice that hangs by a bit, of an expert for example,
may be made differently by chance, but not in three trials with other tokens and ever more
measurements.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from paged_ops.integrations.transformers.attention import NAME, register
from paged_ops.integrations.transformers.layers import Layer
from paged_ops.integrations.transformers.notes import Note, NotingCache
from paged_ops.integrations.transformers.untouched import untouched

LENGTHS = (6, 4)
"""Tokens of the two prompts."""

STEPS = (4, 5, 6)
"""Where the steps over blocks end: a prompt in one, then a token in each, counted by columns."""

TRIALS = 3

FAULT = 0.1
"""What a wrong mask changes at least, relative to the size of a layer's output."""


@dataclass(frozen=True)
class Trial:
    """How a model is run over blocks, and what that is compared with.

    Attributes
    ----------
    kind : str
        A name, under which results are kept.
    run : callable
        Runs a sample over blocks of these layers; yields each step's logits, and the row and
        column of each token that they belong to, ``[num_tokens, 2]``.
    in_one_batch : bool
        Whether the model's own attention gets the prompts in one padded batch: some models treat
        padding in a way of their own, and a cache isn't to blame for it. Else each alone.
    start : int
        Position of the second prompt's first token.
    """

    kind: str
    run: Callable[[Sequence[Layer], Sample], Iterator[tuple[Tensor, Tensor]]]
    in_one_batch: bool = False
    start: int = 0

    @property
    def own_calls(self) -> list[tuple[list[int], int]]:
        """The rows, and the first column, of each call of the model by its own attention."""
        if self.in_one_batch:
            return [([0, 1], 0)]
        return [([row], LENGTHS[0] - length) for row, length in enumerate(LENGTHS)]


_known: weakref.WeakKeyDictionary[PreTrainedModel, dict[object, list[Layer]]]
_known = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Sample:
    """Two prompts of a model's tokens, the second padded on the left.

    Attributes
    ----------
    tokens, mask, positions : Tensor
        ``[2, num_columns]``.
    """

    tokens: Tensor
    mask: Tensor
    positions: Tensor

    @classmethod
    def draw(cls, model: PreTrainedModel, seed: int, start: int = 0) -> Sample:
        """Draw tokens that aren't special; the second prompt begins at position `start`."""
        ids = torch.tensor(ordinary_tokens(model))
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(ids), (2, LENGTHS[0]), generator=generator)
        mask = torch.arange(LENGTHS[0]) >= LENGTHS[0] - torch.tensor(LENGTHS)[:, None]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        positions[1] += start
        return cls(*(each.to(model.device) for each in (ids[chosen] * mask, mask, positions)))


def ordinary_tokens(model: PreTrainedModel) -> list[int]:
    """Return token ids that the configuration doesn't name, as it does those of images and ends."""
    config = model.config.get_text_config(decoder=True)
    named = [
        value if isinstance(value, list) else [value]
        for each in (model.config, config)
        for name, value in vars(each).items()
        if "token" in name
    ]
    special = {token for tokens in named for token in tokens if isinstance(token, int)}
    ids = range(min(config.vocab_size, 4096))
    return [token for token in ids if token not in special] or list(ids)


def probed_layers(model: PreTrainedModel, trial: Trial) -> list[Layer]:
    """Try a model, once for each kind of trial, dtype and device, and return its layers.

    What the trial changes in the model is put back.

    Raises
    ------
    ValueError
        The model can't be served, with the reason.
    """
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device and can't be tried; pass probe=False")
    results = _known.setdefault(model, {})
    key = trial.kind, model.dtype, model.device
    if key not in results:
        register()
        device = model.device.type
        with untouched(model), torch.no_grad(), torch.autocast(device, enabled=False):
            model.eval()
            results[key] = _try(model, trial)
    return results[key]


def _try(model: PreTrainedModel, trial: Trial) -> list[Layer]:
    with _refusing(model, "can't be served"):
        _set_attention(model, NAME)
        recorder = _record(model, Sample.draw(model, 0))
        layers = [recorder.layers[index] for index in sorted(recorder.layers)]
        _refuse_narrower_caches(model, recorder.layers)
    eps = torch.finfo(model.dtype).eps
    for seed in range(TRIALS):
        sample = Sample.draw(model, seed, trial.start)
        with _refusing(model, "itself fails on two short prompts, which are its trial"):
            model.set_attn_implementation("eager")
            own = _own(model, trial, sample, recorder.modules)
            noise = [eps / 2] * len(own)
            for rerun in range(1 + 2 * seed):
                again = _own(model, trial, sample, recorder.modules, rerun)
                noise = list(map(max, noise, map(_change, own, again)))
        with _refusing(model, "can't be served"):
            _set_attention(model, NAME)
            paged = _over_blocks(trial, layers, sample, recorder.modules)
            reason = _difference(own, paged, noise, recorder.calls)
        if reason is None:
            return layers
    raise ValueError(f"{type(model).__name__} can't be served: {reason}")


@contextmanager
def _refusing(model: PreTrainedModel, verdict: str) -> Iterator[None]:
    """Turn what the model's code raises into a refusal of the model."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"its code raised {type(error).__name__}: "
        raise ValueError(f"{type(model).__name__} {verdict}: {kind}{error}") from error


def _set_attention(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    used = model.config.get_text_config(decoder=True)._attn_implementation
    if used != name:
        raise ValueError(
            "it attends by code of its own, not through transformers' AttentionInterface, so no "
            "other attention can be put in its place"
        )


# What each layer gives to its cache


@dataclass
class _Recorder:
    """Notes what each layer keeps; all output is 0."""

    layers: dict[int, Layer] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # the layer of each call

    def attend(
        self,
        note: Note,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Note a layer's sizes and window."""
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                f"layer {note.layer} attends with a mask of {mask.dim()} dimensions that it made "
                f"itself"
            )
        sizes = key.shape[2], key.shape[3], value.shape[3]
        layer = Layer(note.layer, *sizes, key.dtype, options["sliding_window"])
        if not note.written and note.layer in self.layers:
            raise ValueError(f"layer {note.layer} updates its cache twice for the same tokens")
        if self.layers.setdefault(note.layer, layer) != layer:
            raise ValueError(f"layer {note.layer} attends in two ways to the same keys and values")
        if note.module is not None:
            self.modules.append(note.module)
        self.calls.append(note.layer)
        return query.new_zeros(*query.shape[:3], value.shape[3])

    def num_seen(self, layer: int) -> int:
        """Return 0: nothing is kept."""
        return 0


class _RecordingCache(NotingCache):
    """Counts updates, so that layers which then attend by themselves are noticed."""

    def __init__(self, recorder: _Recorder, num_layers: int) -> None:
        super().__init__(recorder, [False] * num_layers)
        self.updated: list[int] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count an update."""
        self.updated.append(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _record(model: PreTrainedModel, sample: Sample) -> _Recorder:
    """Run the first prompt without attention, and note what each layer keeps."""
    recorder = _Recorder()
    config = model.config.get_text_config(decoder=True)
    cache = _RecordingCache(recorder, getattr(config, "num_hidden_layers", 1))
    given = inputs(model, sample, [0], 0, LENGTHS[0])
    model(**given, cache=cache, use_cache=True)
    if not cache.updated:
        raise ValueError("none of its layers gives keys and values to a cache")
    alone = set(cache.updated) - set(recorder.layers)
    if alone:
        raise ValueError(
            f"layer {min(alone)} gives keys and values to its cache, but attends by code of its "
            f"own, not through transformers' AttentionInterface"
        )
    return recorder


def _refuse_narrower_caches(model: PreTrainedModel, layers: dict[int, Layer]) -> None:
    """Refuse a layer whose keys leave transformers' own cache although its mask shows them.

    What such a layer sees depends on the steps in which its tokens came.
    """
    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, cached in enumerate(own.layers):
        window = getattr(cached, "sliding_window", None)
        if window is not None and index in layers and layers[index].sliding_window != window:
            raise ValueError(
                f"layer {index} has a sliding window of {window} in transformers' own cache, but "
                f"its mask is made for {layers[index].sliding_window}"
            )


# What the model computes


def inputs(
    model: PreTrainedModel, sample: Sample, rows: list[int], begin: int, end: int, first: int = 0
) -> dict[str, Tensor]:
    """Return what ``generate`` gives to a model for some rows, and the columns from begin to end.

    The model has seen the columns from `first` on.
    """
    given = {
        "input_ids": sample.tokens[rows, begin:end],
        "attention_mask": sample.mask[rows, first:end].long(),
        "position_ids": sample.positions[rows, begin:end],
    }
    taken = inspect.signature(model.forward).parameters
    return {name: given[name] for name in given if name in taken or "input_ids" not in taken}


@contextmanager
def _heard(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of attention layers, in the order of their calls."""
    outputs: list[Tensor] = []

    def hear(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.register_forward_hook(hear) for module in dict.fromkeys(modules)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _own(
    model: PreTrainedModel,
    trial: Trial,
    sample: Sample,
    modules: list[nn.Module],
    seed: int | None = None,
) -> list[Tensor]:
    """Run the prompts by the model's own attention, each alone or in one padded batch.

    With a seed, the embeddings are changed in their last bits.

    Returns
    -------
    list of Tensor
        For each call of an attention layer, and at last for the logits, float32 ``[num_tokens,
        ...]``: one row for each token, prompt by prompt.
    """
    generator = torch.Generator().manual_seed(seed or 0)

    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        signs = torch.randint(2, output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    embeddings = model.get_input_embeddings()
    hook = None if seed is None else embeddings.register_forward_hook(change)
    parts: list[list[Tensor]] = []
    try:
        for rows, first in trial.own_calls:
            with _heard(modules) as outputs:
                given = inputs(model, sample, rows, first, LENGTHS[0], first)
                logits = model(**given, use_cache=False).logits
            real = sample.mask[rows, first:].flatten()
            parts.append([each.reshape(len(real), -1)[real] for each in (*outputs, logits)])
    finally:
        if hook is not None:
            hook.remove()
    return [torch.cat(each).to(torch.float32) for each in zip(*parts, strict=True)]


def _over_blocks(
    trial: Trial, layers: Sequence[Layer], sample: Sample, modules: list[nn.Module]
) -> list[Tensor]:
    """Run both prompts together over blocks; the result is as that of `_own`."""
    places: list[Tensor] = []
    parts: list[list[Tensor]] = []
    with _heard(modules) as outputs:
        for logits, place in trial.run(layers, sample):
            parts.append([each.reshape(len(place), -1) for each in (*outputs, logits)])
            places.append(place)
            outputs.clear()
    row, column = torch.cat(places).unbind(1)
    real = sample.mask.cpu()[row, column]
    order = (row * LENGTHS[0] + column)[real].argsort()
    return [torch.cat(each)[real][order].to(torch.float32) for each in zip(*parts, strict=True)]


# Whether it is the same


def _change(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two rows, relative to the row's size."""
    size = one.norm(dim=1)
    size = size.clamp(min=1e-3 * float(size.pow(2).mean().sqrt()))
    change = (one - other).norm(dim=1) / size
    return float(change.nan_to_num(torch.inf).max())


def _difference(
    own: list[Tensor], paged: list[Tensor], noise: list[float], calls: list[int]
) -> str | None:
    """Say where the model differs over blocks by more than rounding; None: nowhere."""
    names = [f"the output of layer {layer}" for layer in calls] + ["the output of its head"]
    if not len(names) == len(own) == len(paged):
        return "its attention layers aren't called as often as by its own attention"
    rounding = itertools.accumulate(noise, max)
    for name, mine, blocks, error in zip(names, own, paged, rounding, strict=True):
        limit = max((error * FAULT) ** 0.5, 3 * error)
        if limit < 1 and (change := _change(mine, blocks)) > limit:
            return (
                f"{name} differs from that by its own attention by {change:.2g} of its size, where "
                f"rounding explains {error:.2g}"
            )
    return None
