"""From requests to the index tensors of one call of the ops."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paged_ops.arguments import INT32_MAX, checked_int
from paged_ops.blocks.holding import NO_BLOCK
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager

NO_SLOT = -1
"""Padding of slot_mapping: ``write_kv`` writes nothing there."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The index tensors of one call: of ``write_kv`` and then of ``attention``.

    Attributes
    ----------
    block_tables : torch.Tensor
        ``[batch, max_blocks_per_seq]`` int32: the blocks of each sequence, then -1. Also -1 where
        a block has left the sliding window.
    seq_lens : torch.Tensor
        ``[batch]`` int32: tokens of each sequence, the new ones included.
    query_start_loc : torch.Tensor
        ``[batch + 1]`` int32: where the new tokens of each sequence begin among all of them.
    slot_mapping : torch.Tensor
        ``[num_tokens]`` int64: block * block_size + offset of each new token.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor

    def mark_batch_dynamic(self, *per_token: torch.Tensor) -> None:
        """Let one graph of ``torch.compile`` serve batches of every size.

        Number of sequences, number of new tokens and width of the table are taken to be unknown,
        1 included, where torch would compile anew for the second size, for 1, and again for others.
        Only the call that compiles looks at the marks: mark the first batch that a function sees.
        Marking others as well does no harm.

        Parameters
        ----------
        *per_token : torch.Tensor
            What else the function takes with one row per new token: token ids, positions.

        Raises
        ------
        ValueError
            One of `per_token` has another number of rows than this batch has new tokens.

        Examples
        --------
        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> _ = manager.allocate("a", 5)
        >>> batch, tokens = build_batch(manager, ["a"]), torch.tensor([7])
        >>> batch.mark_batch_dynamic(tokens)
        """
        from torch._dynamo.decorators import mark_unbacked  # takes seconds to import

        num_tokens = len(self.slot_mapping)
        for i, rows in enumerate(per_token):
            if rows.dim() == 0 or len(rows) != num_tokens:
                raise ValueError(
                    f"per_token[{i}] has shape {list(rows.shape)}, expected {num_tokens} rows, one "
                    f"per new token"
                )
        for tensor in (*per_token, self.slot_mapping, self.seq_lens, self.query_start_loc):
            mark_unbacked(tensor, 0)
        mark_unbacked(self.block_tables, [0, 1])

    def pad_to(
        self,
        *,
        batch: int | None = None,
        num_tokens: int | None = None,
        max_blocks_per_seq: int | None = None,
    ) -> Batch:
        """Return the same batch in a larger shape, for a graph that was captured at that shape.

        Padding sequences are empty. Padding tokens belong to padding sequences, one each as long
        as they last and the rest to the last one: they write nothing (slot -1), see nothing, and
        their rows of the output are 0 (without sinks).

        Parameters
        ----------
        batch, num_tokens, max_blocks_per_seq : int, optional
            Sizes of the result. None: as it is.

        Returns
        -------
        Batch
            New tensors on the same device. Nothing is read back from the device.

        Raises
        ------
        ValueError
            A size is below the present one, or there are padding tokens but no padding sequence
            to hold them.

        Examples
        --------
        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> _ = manager.allocate("a", 5)
        >>> padded = build_batch(manager, ["a"]).pad_to(batch=3, num_tokens=3)
        >>> padded.seq_lens.tolist(), padded.query_start_loc.tolist()
        ([5, 0, 0], [0, 1, 2, 3])
        >>> padded.slot_mapping.tolist()
        [4, -1, -1]
        """
        old_batch, old_width = self.block_tables.shape
        old_tokens = self.slot_mapping.shape[0]
        sequences = _padding("batch", batch, old_batch)
        tokens = _padding("num_tokens", num_tokens, old_tokens)
        columns = _padding("max_blocks_per_seq", max_blocks_per_seq, old_width)
        if tokens and not sequences:
            raise ValueError(
                f"batch is {old_batch}, expected at least {old_batch + 1}: {tokens} padding tokens "
                f"need a padding sequence"
            )
        starts = torch.arange(1, sequences + 1, device=self.seq_lens.device).clamp(max=tokens)
        starts[-1:] = tokens
        starts += old_tokens
        pad = torch.nn.functional.pad
        return Batch(
            block_tables=pad(self.block_tables, (0, columns, 0, sequences), value=NO_BLOCK),
            seq_lens=pad(self.seq_lens, (0, sequences)),
            query_start_loc=torch.cat([self.query_start_loc, starts.to(torch.int32)]),
            slot_mapping=pad(self.slot_mapping, (0, tokens), value=NO_SLOT),
        )


def build_batch(
    manager: BlockManager,
    requests: Sequence[Hashable],
    query_lens: Sequence[int] | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Batch:
    """Build the index tensors of one call from what the manager knows.

    The new tokens must have been appended already: they are the last ones of each request.

    Parameters
    ----------
    manager : BlockManager
        Who owns which block.
    requests : sequence of Hashable
        The requests in the order of their rows. None may come twice, because both rows would
        write the same slots. May be empty.
    query_lens : sequence of int, optional
        New tokens of each request, 0 to its length. None: 1 each (decode).
    seq_lens : sequence of int, optional
        Treat each request as if it ended after so many tokens. For a prompt that is allocated
        at once and computed in chunks. None: the whole request.
    device : torch.device or str, optional
        Where the tensors go. None: torch's default device.

    Returns
    -------
    Batch
        The tensors. They hold good until a request in them is changed.

    Raises
    ------
    UnknownRequest
        A request does not exist.
    ValueError
        A request comes twice, a length is out of its range, the numbers of requests and of
        lengths differ, or a new token lies in a block that has left the sliding window.
    TypeError
        A length is no integer.

    Examples
    --------
    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> _ = manager.allocate("a", 6), manager.allocate("b", 2)
    >>> batch = build_batch(manager, ["a", "b"], query_lens=[3, 2])
    >>> batch.block_tables.tolist()
    [[0, 1], [2, -1]]
    >>> batch.seq_lens.tolist(), batch.query_start_loc.tolist()
    ([6, 2], [0, 3, 5])
    >>> batch.slot_mapping.tolist()
    [3, 4, 5, 8, 9]
    """
    new = checked_query_lens(requests, query_lens)
    with manager.lock, manager.ledger as ledger:
        rows = read_rows(ledger, requests, new, seq_lens)
    return rows.build(device)


class Rows(NamedTuple):
    """What the requests of a call hold at one moment.

    Attributes
    ----------
    tables : list of list of int
        The blocks that hold the tokens of each sequence.
    seq_lens, query_lens : list of int
        Tokens of each sequence, and how many of them are new.
    block_size : int
        Tokens per block.
    """

    tables: list[list[int]]
    seq_lens: list[int]
    query_lens: list[int]
    block_size: int

    def build(self, device: torch.device | str | None = None) -> Batch:
        """Build the index tensors, as `build_batch`."""
        query_start_loc = _int32([0, *itertools.accumulate(self.query_lens)])
        seq_lens, block_tables = _int32(self.seq_lens), _stack(self.tables)
        slot_mapping = _slots(block_tables, seq_lens, query_start_loc, self.block_size)
        device = torch.get_default_device() if device is None else device
        return Batch(
            block_tables=block_tables.to(device),
            seq_lens=seq_lens.to(device),
            query_start_loc=query_start_loc.to(device),
            slot_mapping=slot_mapping.to(device),
        )


def read_rows(
    ledger: Ledger,
    requests: Sequence[Hashable],
    query_lens: list[int],
    seq_lens: Sequence[int] | None = None,
) -> Rows:
    """Read what requests hold, or refuse them.

    Parameters
    ----------
    ledger : Ledger
        The books; they are open.
    requests : sequence of Hashable
        The requests in the order of their rows.
    query_lens : list of int
        New tokens of each, from `checked_query_lens`.
    seq_lens : sequence of int, optional
        As `build_batch`.

    Raises
    ------
    UnknownRequest, ValueError, TypeError
        As `build_batch`.
    """
    held = [ledger.find(request) for request in requests]
    limits = [min(one.num_tokens, INT32_MAX) for one in held]
    whole = [one.num_tokens for one in held]
    lengths = _checked_lens("seq_lens", whole if seq_lens is None else seq_lens, limits)
    _checked_lens("query_lens", query_lens, lengths)
    pairs = zip(held, lengths, strict=True)
    tables = [one.table[: ledger.blocks_for(length)] for one, length in pairs]
    _refuse_released(tables, lengths, query_lens, ledger.block_size)
    return Rows(tables, lengths, query_lens, ledger.block_size)


def checked_query_lens(requests: Sequence[Hashable], query_lens: Sequence[int] | None) -> list[int]:
    """Return the number of new tokens of each request, or refuse the two lists."""
    if len(set(requests)) != len(requests):
        twice = next(r for i, r in enumerate(requests) if r in requests[:i])
        raise ValueError(f"requests has {twice!r} twice, expected each request once")
    if query_lens is None:
        return [1] * len(requests)
    if len(query_lens) != len(requests):
        raise ValueError(
            f"query_lens has {len(query_lens)} entries, expected {len(requests)}, one per request"
        )
    return [checked_int(f"query_lens[{i}]", length, 0) for i, length in enumerate(query_lens)]


def _checked_lens(name: str, lengths: Sequence[int], limits: list[int]) -> list[int]:
    """Return lengths as ints, each from 0 to its limit, or refuse them."""
    if len(lengths) != len(limits):
        raise ValueError(
            f"{name} has {len(lengths)} entries, expected {len(limits)}, one per request"
        )
    return [
        checked_int(f"{name}[{i}]", length, 0, limit)
        for i, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def _refuse_released(
    tables: list[list[int]], lengths: list[int], new: list[int], block_size: int
) -> None:
    """Refuse new tokens where the request's block has left the sliding window already."""
    for i, (table, length, count) in enumerate(zip(tables, lengths, new, strict=True)):
        if count and table[(length - count) // block_size] == NO_BLOCK:
            released = table.count(NO_BLOCK)
            raise ValueError(
                f"query_lens[{i}] is {count}, expected at most {length - released * block_size}: "
                f"the first {released} blocks have left the sliding window"
            )


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _stack(tables: list[list[int]]) -> torch.Tensor:
    """Stack tables of different lengths into one tensor, padded with NO_BLOCK.

    Block ids pass from list to tensor through an array, several times faster than torch.tensor
    on nested lists: long contexts have more block ids than anything else here.
    """
    blocks = array("i")
    for table in tables:
        blocks.fromlist(table)
    counts = torch.tensor([len(table) for table in tables], dtype=torch.int64, device="cpu")
    width = max(map(len, tables), default=0)
    stacked = torch.full((len(tables), width), NO_BLOCK, dtype=torch.int32, device="cpu")
    if blocks:
        held = torch.arange(width, device="cpu") < counts[:, None]
        stacked.masked_scatter_(held, torch.frombuffer(blocks, dtype=torch.int32))
    return stacked


def _slots(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Return the slot of each new token: token j of m in a sequence of n is at n - m + j."""
    new = query_start_loc.diff()
    rows = torch.repeat_interleave(new)  # [num_tokens]: the sequence of each token
    tokens = torch.arange(len(rows), device="cpu")
    positions = tokens - query_start_loc[rows] + (seq_lens - new)[rows]
    blocks = block_tables[rows, positions // block_size].to(torch.int64)
    return blocks * block_size + positions % block_size


def _padding(name: str, size: int | None, present: int) -> int:
    """Return by how much a dimension grows."""
    return 0 if size is None else checked_int(name, size, present) - present
