"""PagedCache: what ``model.generate`` keeps its keys and values in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from paged_ops.arguments import checked_int
from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.blocks.layer_groups import LayerGroup, LayerGroups
from paged_ops.functional import attention, write_kv
from paged_ops.integrations.transformers.attention import KEYWORD, NAME
from paged_ops.integrations.transformers.padding import Columns
from paged_ops.pool.kv_cache import PagedKVCache

_WINDOWS = {"full_attention": False, "sliding_attention": True}  # layer types that are served


class PagedCache(Cache):
    """A cache for ``model.generate``, and for calls of the model, that lives in a pool of blocks.

    Give it as ``cache=``. The rows of a batch take blocks as they grow; padding takes none. Layers
    with a sliding window have a pool of their own, whose blocks go back when they have left the
    window. Beams share the blocks that they have in common, and a beam that writes into a shared
    block gets a copy of it. One cache serves one batch at a time; `reset` makes it ready for the
    next.

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
        None: the model's.

    Attributes
    ----------
    pools : dict
        The `PagedKVCache` of the layers with each window (None: without).
    groups : LayerGroups
        The books of the pools, named in the same way.

    Raises
    ------
    ValueError
        The model has layers of a type that isn't served, or a number is out of its range.
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
    ) -> None:
        windows = layer_windows(model.config)
        self._config = model.config.get_text_config(decoder=True)
        self._rows = _Rows(model, windows, num_blocks, block_size, cache_dtype)
        super().__init__(
            layers=[_Layer(self._rows, index, window) for index, window in enumerate(windows)]
        )

    @property
    def pools(self) -> dict[int | None, PagedKVCache]:
        """The pool of the layers with each window."""
        return self._rows.pools

    @property
    def groups(self) -> LayerGroups:
        """The books of the pools."""
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
            The model's attention isn't ``"paged_ops"``, or it has no way to pass the cache on.
        """
        # The first layer's look is enough: the configuration's attributes are slow.
        if layer_idx == 0 and (used := self._config._attn_implementation) != NAME:
            raise ValueError(
                f'attn_implementation is "{used}", expected "{NAME}": call register() and '
                f'model.set_attn_implementation("{NAME}")'
            )
        if "kwargs" not in kwargs:
            raise ValueError("the model gives its cache no keyword arguments to pass on")
        kwargs["kwargs"][KEYWORD] = self._rows
        return key_states, value_states

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


class _Layer(CacheLayerMixin):
    """What transformers asks of a single layer: how much it has seen."""

    is_compileable = False
    is_croppable = True

    def __init__(self, rows: _Rows, index: int, sliding_window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._index = rows, index
        self.is_sliding = sliding_window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pools exist from the start."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: `PagedCache.update` is the way."""
        raise NotImplementedError("call update of the PagedCache")

    def get_seq_length(self) -> int:
        """Return how many columns this layer has seen."""
        return self._rows.seen[self._index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the next mask has, and that it begins with the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: what limits a row is the pool that all share."""
        return -1


@dataclass(frozen=True)
class _Call:
    """One call of attention in a step: the columns that it computes, and its index tensors."""

    columns: Tensor | None  # among all batch * num_new; None: all of them
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    sliding_window: int | None


@dataclass(frozen=True)
class _Plan:
    """What a step does in the layers of one group."""

    columns: Tensor | None  # the real tokens among all batch * num_new; None: all of them
    slot_mapping: Tensor
    calls: list[_Call]


class _Rows:
    """The rows of the batch: their requests, their padding, and the plan of the step under way.

    A step begins when a layer that has seen all columns is given new ones; the other layers follow
    with the same plan.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: list[int | None],
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype | None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        members = {window: windows.count(window) for window in windows}
        self.pools = {
            window: PagedKVCache(
                count,
                num_blocks,
                block_size,
                num_kv_heads,
                head_dim,
                model.dtype,
                model.device,
                cache_dtype=cache_dtype,
            )
            for window, count in members.items()
        }
        self.groups = LayerGroups(
            {_name(window): LayerGroup(num_blocks, window) for window in members},
            block_size,
            prefix_caching=False,
        )
        self._windows = windows
        places = [(self.pools[own], windows[:i].count(own)) for i, own in enumerate(windows)]
        self._caches = [pool.layer(layer) for pool, layer in places]
        self._scales = [pool.scales(layer) for pool, layer in places]
        self._device = model.device
        self.holds_past = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        for request in getattr(self, "requests", []):
            self.groups.free(request)
        self.requests: list[int] = []
        self._next_request = 0
        self.seen = [0] * len(self._windows)  # columns, by layer
        self._mask = torch.ones(0, 0, dtype=torch.bool)
        self._plans: dict[int | None, _Plan] = {}
        self._decode = {
            window: DecodeBatches(self._manager(window), self._device) for window in self.pools
        }

    @property
    def num_columns(self) -> int:
        """Columns that were seen, those of the step under way included."""
        return self._mask.shape[1]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Write the new tokens of a layer and attend from every new column."""
        window = self._windows[layer]
        if options["sliding_window"] != window:
            raise ValueError(
                f"layer {layer} attends with sliding_window {options['sliding_window']}, but its "
                f"cache was made for {window}"
            )
        batch, num_new = query.shape[:2]
        plan = self._plan(layer, batch, num_new, mask)
        query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        key_cache, value_cache = self._caches[layer]
        if plan.columns is not None:
            key, value = key[plan.columns], value[plan.columns]
        scales = self._scales[layer]
        write_kv(key, value, key_cache, value_cache, plan.slot_mapping, **scales)
        output = _attend(plan.calls, query, key_cache, value_cache, {**options, **scales})
        return output.view(batch, num_new, *output.shape[1:])

    def crop(self, removed: int) -> None:
        """Remove the last columns; what is left is sure to stay."""
        keep = self.num_columns - removed
        lengths = self._mask[:, :keep].sum(1).tolist()
        self.groups.truncate_all(
            [
                (request, length)
                for request, length in zip(self.requests, lengths, strict=True)
                if length < self.groups.num_tokens(request)
            ]
        )
        self._commit()
        self._mask = self._mask[:, :keep]
        self.seen = [min(seen, keep) for seen in self.seen]

    def select(self, parents: list[int]) -> None:
        """Make row i of the batch continue row ``parents[i]``."""
        for i, parent in enumerate(parents):
            checked_int(f"rows[{i}]", parent, 0, len(self.requests) - 1)
        requests: list[int] = []
        taken: set[int] = set()
        for parent in parents:
            request = self.requests[parent]
            if parent in taken:
                self.groups.fork(request, self._next_request)
                request, self._next_request = self._next_request, self._next_request + 1
            taken.add(parent)
            requests.append(request)
        for row, request in enumerate(self.requests):
            if row not in taken:
                self.groups.free(request)
        self.requests = requests
        self._mask = self._mask[torch.tensor(parents, dtype=torch.int64)]

    def _plan(self, layer: int, batch: int, num_new: int, mask: Tensor | None) -> _Plan:
        """Return the plan of this step, which the first layer makes."""
        begins = self.seen[layer] == self.num_columns
        if begins:
            self._begin(batch, num_new, mask)
        if self.seen[layer] + num_new != self.num_columns:
            raise RuntimeError(
                f"layer {layer} has seen {self.seen[layer]} columns and gets {num_new}, but the "
                f"first layer has {self.num_columns}: a call was broken off; reset() the cache"
            )
        self.seen[layer] = self.num_columns
        return self._plans[self._windows[layer]]

    def _begin(self, batch: int, num_new: int, mask: Tensor | None) -> None:
        """Take the new columns in: make room for their tokens, and plan the step."""
        columns = self._columns(batch, num_new, mask)
        if not self.num_columns:  # nothing was computed yet, so it may be another batch
            self.reset()
            self._admit(batch)
        if not self.holds_past:
            self._commit()
        counts = columns.new.sum(1).tolist()
        self._grow(counts)
        simple = columns.is_ragged_left(set(self.pools))
        self._plans = {
            window: self._plan_group(window, columns, counts, simple) for window in self.pools
        }
        self._mask = columns.mask

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

    def _admit(self, batch: int) -> None:
        """Make a request for each row."""
        self.requests = list(range(self._next_request, self._next_request + batch))
        self._next_request += batch
        for request in self.requests:
            self.groups.allocate(request, 0)

    def _commit(self) -> None:
        """Give back the blocks that no token after the present ones sees."""
        if set(self.pools) == {None}:
            return
        for request in self.requests:
            self.groups.commit(request)

    def _grow(self, counts: list[int]) -> None:
        """Make room for so many new tokens in each row, or change nothing."""
        copies = self.groups.append_all(list(zip(self.requests, counts, strict=True)))
        for window, pool in self.pools.items():
            pool.copy_blocks(copies[_name(window)])

    def _plan_group(
        self, window: int | None, columns: Columns, counts: list[int], simple: bool
    ) -> _Plan:
        """Plan a step for the layers with one window."""
        if columns.num_new == 1 and min(counts) == 1:
            batch = self._decode[window].build(self.requests)
        else:
            batch = build_batch(self._manager(window), self.requests, counts, device=self._device)
        real = None
        if not columns.new.all():
            real = columns.new.flatten().nonzero()[:, 0].to(self._device)
        if simple:
            tables, starts = batch.block_tables, batch.query_start_loc
            calls = [_Call(real, tables, batch.seq_lens, starts, window)]
        else:
            calls = self._calls_by_column(batch, columns, window)
        return _Plan(real, batch.slot_mapping, calls)

    def _calls_by_column(self, batch: Batch, columns: Columns, window: int | None) -> list[_Call]:
        """Make each column a sequence of one query, in one call for each number of keys to see."""
        ends, lengths = columns.visible_runs(window)
        tables = batch.block_tables.repeat_interleave(columns.num_new, 0)
        seq_lens = ends.flatten().to(torch.int32)
        if window is None:
            return [_Call(None, tables, seq_lens.to(self._device), None, None)]
        calls = []
        for length in lengths.unique().tolist():
            if length:
                chosen = (lengths.flatten() == length).nonzero()[:, 0]
                where = chosen.to(self._device)
                lens = seq_lens[chosen].to(self._device)
                calls.append(_Call(where, tables[where], lens, None, length))
        return calls

    def _manager(self, window: int | None) -> Any:
        return self.groups[_name(window)]


def _name(window: int | None) -> str:
    """Return the name of a group of layers."""
    return "full" if window is None else f"window {window}"


def _attend(
    calls: list[_Call],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attend from the columns of each call; the others, padding that sees nothing, get zeros."""

    def run(call: _Call, query: Tensor) -> Tensor:
        given = options | {"sliding_window": call.sliding_window}
        tables = (call.block_tables, call.seq_lens, call.query_start_loc)
        return attention(query, key_cache, value_cache, *tables, **given)

    if len(calls) == 1 and calls[0].columns is None:
        return run(calls[0], query)
    output = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    for call in calls:
        output[call.columns] = run(call, query[call.columns])
    return output
