"""What a step of a padded batch does in the layers of one group: what it writes, and its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_ops.batch.batch import Batch
from paged_ops.functional import attention
from paged_ops.integrations.transformers.padding import Columns


@dataclass(frozen=True)
class Call:
    """One call of attention in a step: the columns that it computes, and its index tensors."""

    columns: Tensor | None  # among all batch * num_new; None: all of them
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    sliding_window: int | None


@dataclass(frozen=True)
class Plan:
    """What a step does in the layers of one group."""

    columns: Tensor | None  # the real tokens among all batch * num_new; None: all of them
    num_new: int
    block_tables: Tensor
    slot_mapping: Tensor
    calls: list[Call]

    def calls_of_last(self, columns: Columns, window: int | None) -> list[Call]:
        """Return the calls for the last columns; for all that are new, those that were planned."""
        if columns.num_new == self.num_new:
            return self.calls
        return _calls_by_column(self.block_tables, columns, window)


def plan_step(batch: Batch, columns: Columns, window: int | None, simple: bool) -> Plan:
    """Plan a step for layers with one window; `simple` says that one call serves all rows."""
    device = batch.slot_mapping.device
    real = None
    if not columns.new.all():
        real = columns.new.flatten().nonzero()[:, 0].to(device)
    if simple:
        tables, starts = batch.block_tables, batch.query_start_loc
        calls = [Call(real, tables, batch.seq_lens, starts, window)]
    else:
        calls = _calls_by_column(batch.block_tables, columns, window)
    return Plan(real, columns.num_new, batch.block_tables, batch.slot_mapping, calls)


def _calls_by_column(block_tables: Tensor, columns: Columns, window: int | None) -> list[Call]:
    """Make each column a sequence of one query, in one call for each number of keys to see."""
    ends, lengths = columns.visible_runs(window)
    device = block_tables.device
    tables = block_tables.repeat_interleave(columns.num_new, 0)
    seq_lens = ends.flatten().to(torch.int32)
    if window is None:
        return [Call(None, tables, seq_lens.to(device), None, None)]
    calls = []
    for length in lengths.unique().tolist():
        if length:
            chosen = (lengths.flatten() == length).nonzero()[:, 0]
            where, lens = chosen.to(device), seq_lens[chosen].to(device)
            calls.append(Call(where, tables[where], lens, None, length))
    return calls


def attend(
    calls: list[Call],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attend from the columns of each call; the others, padding that sees nothing, get zeros."""

    def run(call: Call, query: Tensor) -> Tensor:
        given = options | {"sliding_window": call.sliding_window}
        tables = (call.block_tables, call.seq_lens, call.query_start_loc)
        return attention(query, key_cache, value_cache, *tables, **given)

    if len(calls) == 1 and calls[0].columns is None:
        return run(calls[0], query)
    output = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    for call in calls:
        output[call.columns] = run(call, query[call.columns])
    return output
