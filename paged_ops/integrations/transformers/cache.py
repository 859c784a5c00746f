"""PagedCache: what ``model.generate`` keeps its keys and values in."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_ops.arguments import checked_int
from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.blocks.errors import UnknownRequest
from paged_ops.blocks.layer_groups import LayerGroup, LayerGroups
from paged_ops.functional import write_kv
from paged_ops.integrations.transformers.attention import NAME
from paged_ops.integrations.transformers.layers import Layer, by_group, configured_layers
from paged_ops.integrations.transformers.notes import Note, NotingCache
from paged_ops.integrations.transformers.padding import Columns
from paged_ops.integrations.transformers.probe import STEPS, Sample, Trial, inputs, probed_layers
from paged_ops.integrations.transformers.steps import Plan, attend, plan_step
from paged_ops.pool.kv_cache import PagedKVCache, Scales


class PagedCache(NotingCache):
    """A cache for ``model.generate``, and for calls of the model, that lives in a pool of blocks.

    Give it as ``cache=``. The rows of a batch take blocks as they grow; padding takes none. Layers
    with a sliding window have a pool of their own, whose blocks go back when they have left the
    window. Beams share the blocks that they have in common, and a beam that writes into a shared
    block gets a copy of it. One cache serves one batch at a time; `reset` makes it ready for the
    next. ``copy.deepcopy`` makes a cache that continues from the same tokens: it shares the pools
    and the blocks, of which it gets a copy where one of the two writes, and it gives back its own
    when nothing refers to it any more.

    The model is tried first, once: two prompts of a few tokens are run by its own attention and
    over blocks. Sizes and windows of the layers come from there.

    Parameters
    ----------
    model : PreTrainedModel
        The model, on its device and in its dtype, with ``"paged_ops"`` as attention.
    num_blocks : int
        Blocks of each pool. Each row needs ``ceil(tokens / block_size)``, beams at most one row
        each.
    block_size : int
        Tokens per block.
    cache_dtype : torch.dtype, optional
        As `PagedKVCache`: int8, float8_e4m3fn or float8_e5m2, with a scale for each token and head.
        None: that of the keys.
    probe : bool
        Whether the model is tried. False believes its configuration: where there is no time for a
        trial, or where it refuses a model wrongly.

    Attributes
    ----------
    pools : dict
        The `PagedKVCache` of each group of layers: ``"full"``, ``"window 4096"``; where layers of
        one window differ in size, a group for each size.
    groups : LayerGroups
        The books of the pools, under the same names.

    Raises
    ------
    ValueError
        The model computes something else over blocks than by its own attention, with the reason;
        or a number is out of its range.
    MemoryError
        The pools are larger than the memory available.

    See Also
    --------
    register : makes the attention known; its example is one of this class as well.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        block_size: int = 16,
        *,
        cache_dtype: torch.dtype | None = None,
        probe: bool = True,
    ) -> None:
        if probe:
            trial = Trial("paged", partial(_try, model), in_one_batch=True)
            layers = probed_layers(model, trial)
        else:
            layers = configured_layers(model)
        self._config = model.config.get_text_config(decoder=True)
        self._hold(_Rows(layers, num_blocks, block_size, model.device, cache_dtype))

    def _hold(self, rows: _Rows) -> None:
        """Be the cache of these rows."""
        self._rows = rows
        super().__init__(rows, rows.sliding)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Return a cache that continues from the same tokens and shares their blocks."""
        other = copy.copy(self)
        other._hold(self._rows.fork())
        memo[id(self)] = other
        return other

    @property
    def pools(self) -> dict[str, PagedKVCache]:
        """The pool of each group of layers."""
        return self._rows.pools

    @property
    def groups(self) -> LayerGroups:
        """The books of the pools."""
        self._rows.settle()
        return self._rows.groups

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first call."""
        return len(self._rows.requests) or -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Have the attention function, which is called next, write and attend.

        Raises
        ------
        ValueError
            The model's attention isn't ``"paged_ops"``.
        """
        # The first layer's look is enough: the configuration's attributes are slow.
        if layer_idx == self._rows.first and (used := self._config._attn_implementation) != NAME:
            raise ValueError(
                f'attn_implementation is "{used}", expected "{NAME}": call register() and '
                f'model.set_attn_implementation("{NAME}")'
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Keep what leaves a sliding window until `crop` says how much of the past stays."""
        self._rows.holds_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns of every row.

        Raises
        ------
        ValueError
            The number is positive or exceeds the length, or a layer has given up blocks that the
            new end sees (call `activate_past_recording` before).
        """
        removed = -tokens_to_remove
        self._rows.crop(checked_int("-tokens_to_remove", removed, 0, self._rows.num_columns))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i continue what row ``beam_idx[i]`` was; blocks are shared, not copied."""
        self._rows.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._rows.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each row `repeats` rows, which share their blocks."""
        repeats = checked_int("repeats", repeats, 1)
        self._rows.select([row for row in range(len(self._rows.requests)) for _ in range(repeats)])

    def reset(self) -> None:
        """Give back all blocks; the next call may be of another batch."""
        self._rows.reset()
        self._rows.holds_past = False


def _try(
    model: PreTrainedModel, layers: Sequence[Layer], sample: Sample
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a sample in one padded batch, whose rows change places on the way; see `probe.Trial`.

    A model that keeps something of a row anywhere else then takes it for the other row's.
    """
    rows = _Rows(layers, 8, 4, model.device)
    cache = NotingCache(rows, rows.sliding)
    for begin, end in itertools.pairwise((0, *STEPS)):
        order = [0, 1]
        if end == STEPS[-1]:
            order.reverse()
            rows.select(order)
        given = inputs(model, sample, order, begin, end)
        logits = model(**given, cache=cache, use_cache=True).logits
        yield logits, torch.cartesian_prod(torch.tensor(order), torch.arange(begin, end))


@dataclass(frozen=True)
class _Place:
    """Where a layer's keys and values lie."""

    group: str
    sliding_window: int | None
    dtype: torch.dtype
    caches: tuple[Tensor, Tensor]
    scales: Scales


class _Rows:
    """The rows of the batch: their requests, their padding, and the plan of the step under way.

    A step begins when a layer that has seen all columns is given new ones; the other layers follow
    with the same plan. A layer has seen columns once it has attended from them, and what some layer
    hasn't seen belongs to the step under way. If that is broken off, the next one takes it back: so
    it can be made again, unless every layer had seen its columns, which `num_seen` tells.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.requests: list[int] = []
        self._loose: list[int] = []  # requests that go, but for those that are rows of the batch
        self._left: deque[int] = deque()  # requests of copies that are gone; all copies share it
        grouped = by_group(layers)
        self.pools = {
            name: PagedKVCache(
                len(members),
                num_blocks,
                block_size,
                members[0].num_kv_heads,
                members[0].head_dim,
                members[0].dtype,
                device,
                head_dim_v=members[0].head_dim_v,
                cache_dtype=cache_dtype,
            )
            for name, members in grouped.items()
        }
        self._windows = {name: members[0].sliding_window for name, members in grouped.items()}
        self.groups = LayerGroups(
            {name: LayerGroup(num_blocks, window) for name, window in self._windows.items()},
            block_size,
            prefix_caching=False,
        )
        self._layers = {
            layer.index: _Place(
                name, layer.sliding_window, layer.dtype, pool.layer(i), pool.scales(i)
            )
            for name, pool in self.pools.items()
            for i, layer in enumerate(grouped[name])
        }
        self._device = device
        self._ids = itertools.count()
        self.holds_past = False
        self.reset()

    def __del__(self) -> None:
        """Leave the requests to who shares the pools: the books may be in use at this moment."""
        self._left.extend({*self.requests, *self._loose})

    def settle(self) -> None:
        """Give back the blocks of requests that are gone; a broken-off call may have done so."""
        for request in self._loose:
            if request not in self.requests:
                self._free(request)
        self._loose = []
        while self._left:
            self._free(self._left[0])
            self._left.popleft()

    def _free(self, request: int) -> None:
        with suppress(UnknownRequest):
            self.groups.free(request)

    def fork(self) -> _Rows:
        """Return rows that continue from the same tokens, and share pools and books with these."""
        self._take_back()
        self.settle()
        other = copy.copy(self)
        other.requests, other._loose = [], []
        for request in self.requests:
            other.requests.append(next(self._ids))
            self.groups.fork(request, other.requests[-1])
        other.seen = self.seen.copy()
        other._plans = {}
        other._decode = other._new_decode()
        return other

    def reset(self) -> None:
        """Forget everything."""
        self._loose = [*self._loose, *self.requests]
        self.requests = []
        self.settle()
        self.seen = dict.fromkeys(self._layers, 0)  # columns, by layer
        self._beginner: int | None = None  # the layer that began the step under way
        self._is_growing = False  # whether the books may be ahead of the mask
        self._mask = torch.ones(0, 0, dtype=torch.bool)
        self._plans: dict[str, Plan] = {}
        self._decode = self._new_decode()

    def _new_decode(self) -> dict[str, DecodeBatches]:
        return {name: DecodeBatches(self.groups[name], self._device) for name in self.pools}

    @property
    def first(self) -> int:
        """The index of the first layer."""
        return next(iter(self._layers))

    @property
    def sliding(self) -> list[bool]:
        """Which layers have a window, by index; layers without keys of their own have none."""
        places = [self._layers.get(index) for index in range(max(self._layers) + 1)]
        return [place is not None and place.sliding_window is not None for place in places]

    def num_seen(self, layer: int) -> int:
        """Return how many columns all layers have seen, to which the step under way adds."""
        return min(self.seen.values())

    @property
    def num_columns(self) -> int:
        """Columns that were seen, those of the step under way included."""
        return self._mask.shape[1]

    def attend(
        self,
        note: Note,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Write the new tokens of a layer and attend from every new column."""
        place = self._layers.get(note.layer)
        if place is None:
            raise ValueError(f"the cache was made for a model without a layer {note.layer}")
        if options["sliding_window"] not in (None, place.sliding_window):
            raise ValueError(
                f"layer {note.layer} attends with sliding_window {options['sliding_window']}, but "
                f"its cache was made for {place.sliding_window}"
            )
        batch, num_queries = query.shape[:2]
        dtype = query.dtype
        if not note.written:
            self._take_part(note.layer, batch, num_queries, mask)
        plan = self._plans[place.group]
        query, key, value = (each.flatten(0, 1).to(place.dtype) for each in (query, key, value))
        if not note.written:
            if plan.columns is not None:
                key, value = key[plan.columns], value[plan.columns]
            write_kv(key, value, *place.caches, plan.slot_mapping, **place.scales)
        calls = plan.calls_of_last(Columns(self._mask, num_queries), place.sliding_window)
        output = attend(calls, query, *place.caches, {**options, **place.scales})
        self.seen[note.layer] = self.num_columns
        return output.view(batch, num_queries, *output.shape[1:]).to(dtype)

    def crop(self, removed: int) -> None:
        """Remove the last columns; what is left is sure to stay."""
        self._take_back()
        self._cut(self.num_columns - removed)
        self._commit()

    def _take_back(self) -> None:
        """Undo a step that was broken off: what not every layer has seen."""
        keep = min(self.seen.values())
        if not keep and self.requests:
            self.reset()
        elif self._is_growing or keep < self.num_columns:
            self._cut(keep)
            self._is_growing = False

    def _cut(self, keep: int) -> None:
        """Forget all columns but the first ones, in the books as well."""
        lengths = self._mask[:, :keep].sum(1).tolist()
        self.groups.truncate_all(
            [
                (request, length)
                for request, length in zip(self.requests, lengths, strict=True)
                if length < self.groups.num_tokens(request)
            ]
        )
        self.seen = {layer: min(seen, keep) for layer, seen in self.seen.items()}
        self._mask = self._mask[:, :keep]

    def select(self, parents: list[int]) -> None:
        """Make row i of the batch continue row ``parents[i]``."""
        for i, parent in enumerate(parents):
            checked_int(f"rows[{i}]", parent, 0, len(self.requests) - 1)
        self._take_back()
        self.settle()
        self._loose = self.requests.copy()
        mask = self._mask[torch.tensor(parents, dtype=torch.int64)]
        requests = [self.requests[parent] for parent in parents]
        for i, request in enumerate(requests):
            if request in requests[:i]:
                requests[i] = next(self._ids)
                self._loose.append(requests[i])
                self.groups.fork(request, requests[i])
        self.requests, self._mask = requests, mask
        self.settle()

    def _take_part(self, layer: int, batch: int, num_new: int, mask: Tensor | None) -> None:
        """Let a layer take part in the step, which the first of them begins."""
        if layer == self._beginner or self.seen[layer] == self.num_columns:
            self._take_back()
            self._begin(layer, batch, num_new, mask)
        if self.seen[layer] + num_new != self.num_columns:
            raise RuntimeError(
                f"layer {layer} has seen {self.seen[layer]} columns and gets {num_new}, but layer "
                f"{self._beginner} has {self.num_columns} with those of this step"
            )

    def _begin(self, layer: int, batch: int, num_new: int, mask: Tensor | None) -> None:
        """Take the new columns in: make room for their tokens, and plan the step."""
        columns = self._columns(batch, num_new, mask)
        if not self.num_columns:  # nothing was computed yet, so there are no rows
            for request in itertools.islice(self._ids, batch):
                self.requests.append(request)
                self.groups.allocate(request, 0)
        self._beginner = layer
        if not self.holds_past:
            self._commit()
        counts = columns.new.sum(1).tolist()
        self._is_growing = True
        self._grow(counts)
        simple = columns.is_ragged_left(set(self._windows.values()))
        self._plans = {
            name: plan_step(self._build(name, columns, counts), columns, window, simple)
            for name, window in self._windows.items()
        }
        self._mask = columns.mask
        self._is_growing = False

    def _columns(self, batch: int, num_new: int, mask: Tensor | None) -> Columns:
        """Join the new columns to those seen, or refuse the mask."""
        if self.num_columns and batch != len(self.requests):
            raise ValueError(
                f"the batch has {batch} rows, but the cache holds {len(self.requests)}; reset() "
                f"it before another batch"
            )
        history = self._mask if self.num_columns else torch.ones(batch, 0, dtype=torch.bool)
        seen = history.shape[1]
        if mask is None:
            return Columns(torch.nn.functional.pad(history, (0, num_new), value=True), num_new)
        if mask.dim() != 2 or mask.shape != (batch, seen + num_new):
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, expected {[batch, seen + num_new]}, "
                f"one column for each token in the cache and each new one"
            )
        mask = mask.to("cpu", torch.bool)
        if not torch.equal(mask[:, :seen], history):
            row, column = (mask[:, :seen] != history).nonzero()[0].tolist()
            raise ValueError(
                f"attention_mask[{row}, {column}] is {int(mask[row, column])}, expected "
                f"{int(history[row, column])}, as when the token was computed"
            )
        return Columns(mask, num_new)

    def _commit(self) -> None:
        """Give back the blocks that no token after the present ones sees."""
        if set(self._windows.values()) == {None}:
            return
        for request in self.requests:
            self.groups.commit(request)

    def _grow(self, counts: list[int]) -> None:
        """Make room for so many new tokens in each row, or change nothing."""
        self.settle()
        ledgers = {name: self.groups[name].ledger for name in self.pools}
        first = self.groups[next(iter(self.pools))]
        # One change for all groups, for they share lock and journal.
        with first.lock, first.ledger:
            growth = {
                name: [
                    (held, count, None)
                    for held, count in zip(ledger.find_all(self.requests), counts, strict=True)
                ]
                for name, ledger in ledgers.items()
            }
            for name, ledger in ledgers.items():
                ledger.refuse_growth(growth[name])
            for name, ledger in ledgers.items():
                self.pools[name].copy_blocks(ledger.grow(growth[name]))

    def _build(self, name: str, columns: Columns, counts: list[int]) -> Batch:
        """Build a step's index tensors for the layers of one group."""
        if columns.num_new == 1 and min(counts) == 1:
            return self._decode[name].build(self.requests)
        return build_batch(self.groups[name], self.requests, counts, device=self._device)
