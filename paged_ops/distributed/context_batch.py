"""Long sequences cut over ranks: which part of each a rank holds, and who attends to it how.

The ranks of a group hold consecutive parts of a sequence, in the order of their ranks: rank 0 its
first tokens, the last rank its last ones. Each has its part in blocks of its own pool, under the
same request in its own `BlockManager`; a part may be empty.

A part that covers the tokens from `start` to `stop` is attended to in two ways. Queries at these
positions see it up to themselves: an ordinary causal call, since the last of them is its last key.
Queries behind it see all of it: a call that is not causal, whose rows the op takes to stand at the
part's end, too low by a distance that `LocalCall` keeps. See docs/semantics.md, "Merging".
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from paged_ops.arguments import checked_int
from paged_ops.batch.batch import NO_SLOT, Batch, build_batch, checked_query_lens
from paged_ops.blocks.manager import BlockManager


class Part(NamedTuple):
    """What a rank holds of one sequence, and which of its tokens are new.

    Attributes
    ----------
    start, stop : int
        The positions that the rank holds.
    first_query : int
        The position of the first new token; negative if there are more than the sequence is long.
    length : int
        Tokens of the sequence on all ranks.
    """

    start: int
    stop: int
    first_query: int
    length: int


@dataclass(frozen=True, eq=False)
class LocalCall:
    """One call of the op on a rank.

    Attributes
    ----------
    rows : torch.Tensor
        ``[n]`` int64: which rows of the query take part.
    block_tables, seq_lens, query_start_loc : torch.Tensor
        What the op takes, of those sequences that take part.
    causal : bool
        Whether the rows are queries of the part itself.
    sliding_window : int, optional
        Of this call.
    distance : torch.Tensor
        ``[n]`` float32: by how many positions the op takes each row to stand too low.
    """

    rows: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    causal: bool
    sliding_window: int | None
    distance: torch.Tensor


@dataclass(frozen=True, eq=False)
class ContextBatch:
    """The index tensors of one step on one rank; made by `build_context_batch`.

    Attributes
    ----------
    slot_mapping : torch.Tensor
        ``[num_tokens]`` int64, for ``write_kv``: where this rank keeps each new token, -1 if
        another rank does.
    block_tables : torch.Tensor
        ``[batch, max_blocks_per_seq]`` int32: this rank's blocks of each sequence.
    parts : tuple of Part
        What this rank holds of each sequence.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    parts: tuple[Part, ...]
    _calls: dict[tuple[bool, int | None], list[LocalCall]] = field(default_factory=dict)

    def calls(self, causal: bool, sliding_window: int | None) -> list[LocalCall]:
        """Return the calls that attend to this rank's parts; no row is in two of them.

        Parameters
        ----------
        causal : bool
            As for the op.
        sliding_window : int, optional
            As for the op. Behind a window each distance needs a call of its own.
        """
        key = causal, sliding_window
        if key not in self._calls:
            self._calls[key] = self._plan(causal, sliding_window)
        return self._calls[key]

    def _plan(self, causal: bool, sliding_window: int | None) -> list[LocalCall]:
        """Group the runs of rows that one call can serve."""
        runs: dict[tuple[bool, int | None], list[tuple[int, int, int]]] = {}
        for sequence, part in enumerate(self.parts):
            if part.start == part.stop:
                continue
            # The last row that a window still lets see the part's last key.
            reach = part.length
            if sliding_window is not None:
                reach = min(reach, part.stop - 1 + sliding_window)
            first = part.first_query
            if causal:
                # New tokens are the last ones of a sequence, so these rows end where the part does.
                own = max(first, part.start)
                if own < part.stop:
                    runs.setdefault((True, sliding_window), []).append((sequence, own, part.stop))
                first = max(first, part.stop)
            if first < reach:
                distance = reach - part.stop
                window = None if sliding_window is None else sliding_window - distance
                runs.setdefault((False, window), []).append((sequence, first, reach))
        return [self._call(causal, window, rows) for (causal, window), rows in runs.items()]

    def _call(
        self, causal: bool, sliding_window: int | None, runs: list[tuple[int, int, int]]
    ) -> LocalCall:
        """Make the call of some runs: (sequence, first position, position behind the last)."""
        starts = [0, *itertools.accumulate(p.length - p.first_query for p in self.parts)]
        rows: list[int] = []
        distance: list[int] = []
        for sequence, first, end in runs:
            part = self.parts[sequence]
            row = starts[sequence] + first - part.first_query
            rows += range(row, row + end - first)
            distance += [end - part.stop] * (end - first)
        device = self.block_tables.device
        sequences = [sequence for sequence, _, _ in runs]
        lengths = [self.parts[sequence].stop - self.parts[sequence].start for sequence in sequences]
        ends = itertools.accumulate(end - first for _, first, end in runs)
        return LocalCall(
            rows=torch.tensor(rows, dtype=torch.int64, device=device),
            block_tables=self.block_tables[torch.tensor(sequences, device=device)],
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, *ends], dtype=torch.int32, device=device),
            causal=causal,
            sliding_window=sliding_window,
            distance=torch.tensor(distance, dtype=torch.float32, device=device),
        )


def split_context(num_tokens: int, block_size: int, num_ranks: int) -> list[int]:
    """Return how many tokens of a sequence each rank takes, in whole blocks as evenly as may be.

    Parameters
    ----------
    num_tokens : int
        Tokens of the sequence, 0 or more.
    block_size : int
        Tokens per block.
    num_ranks : int
        Ranks of the group.

    Returns
    -------
    list of int
        For each rank, to be given to its manager. Tokens that follow belong to the last rank that
        has any, or to a later one.

    Examples
    --------
    >>> split_context(70, block_size=16, num_ranks=2)
    [48, 22]
    >>> split_context(5, block_size=16, num_ranks=2)
    [5, 0]
    """
    num_tokens = checked_int("num_tokens", num_tokens, 0)
    block_size = checked_int("block_size", block_size, 1)
    num_ranks = checked_int("num_ranks", num_ranks, 1)
    blocks, more = divmod(-(-num_tokens // block_size), num_ranks)
    ends = [block_size * (rank * blocks + min(rank, more)) for rank in range(num_ranks + 1)]
    bounds = [min(end, num_tokens) for end in ends]
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def build_context_batch(
    manager: BlockManager,
    requests: Sequence[Hashable],
    query_lens: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> ContextBatch:
    """Build the index tensors of one step whose sequences lie on several ranks.

    Every rank of the group calls this, with its own manager, the same requests in the same order,
    and the same `query_lens`: the ranks tell each other how many tokens of each they hold. The new
    tokens must have been appended already, each on one rank; they are the last ones.

    Parameters
    ----------
    manager : BlockManager
        The books of this rank's pool, without a sliding window.
    requests : sequence of Hashable
        The requests, each once; a rank that holds nothing of one has it with 0 tokens.
    query_lens : sequence of int, optional
        New tokens of each request, on all ranks together. None: 1 each (decode).
    group : torch.distributed.ProcessGroup, optional
        The ranks. None: all.
    device : torch.device or str, optional
        Where the tensors go. None: torch's default device.

    Returns
    -------
    ContextBatch
        For ``write_kv`` and `context_parallel_attention`, of every layer.

    Raises
    ------
    UnknownRequest
        A request does not exist on this rank. The other ranks wait then, as for every collective.
    ValueError
        The ranks were given different numbers of requests or different `query_lens`; a request
        comes twice; or the manager has a sliding window.
    """
    new = checked_query_lens(requests, query_lens)
    if manager.sliding_window is not None:
        raise ValueError(
            f"manager has sliding_window {manager.sliding_window}, expected None: parts of a "
            f"sequence are kept whole"
        )
    with manager.lock, manager.ledger as ledger:
        held = [ledger.find(request).num_tokens for request in requests]
    given: list[tuple[list[int], list[int]]] = [([], [])] * dist.get_world_size(group)
    dist.all_gather_object(given, (new, held), group=group)
    rank = dist.get_rank(group)
    for other, (theirs, _) in enumerate(given):
        if theirs != new:
            raise ValueError(f"query_lens is {new} on rank {rank} and {theirs} on rank {other}")
    return place_parts(manager, requests, new, [lengths for _, lengths in given], rank, device)


def place_parts(
    manager: BlockManager,
    requests: Sequence[Hashable],
    query_lens: Sequence[int],
    held: Sequence[Sequence[int]],
    rank: int,
    device: torch.device | str | None = None,
) -> ContextBatch:
    """Build the step of one rank from what all ranks hold; `build_context_batch` without the talk.

    Parameters
    ----------
    manager, requests, query_lens, device
        As `build_context_batch`; of this rank.
    held : sequence of sequence of int
        For each rank, how many tokens of each request it holds.
    rank : int
        This rank.

    Returns
    -------
    ContextBatch
        The step.
    """
    parts = []
    for request, new in enumerate(query_lens):
        lengths = [of_rank[request] for of_rank in held]
        start, length = sum(lengths[:rank]), sum(lengths)
        parts.append(Part(start, start + lengths[rank], length - new, length))
    own = [min(part.stop - part.start, part.stop - part.first_query) for part in parts]
    local = build_batch(manager, requests, [max(0, new) for new in own], device=device)
    return ContextBatch(_slots(parts, local), local.block_tables, tuple(parts))


def _slots(parts: list[Part], local: Batch) -> torch.Tensor:
    """Return the slots of all new tokens, those of the tokens of other ranks being -1."""
    mine: list[bool] = []
    for part in parts:
        positions = range(part.first_query, part.length)
        mine += [part.start <= position < part.stop for position in positions]
    device = local.slot_mapping.device
    slots = torch.full((len(mine),), NO_SLOT, dtype=torch.int64, device=device)
    slots[torch.tensor(mine, dtype=torch.bool, device=device)] = local.slot_mapping
    return slots
