"""The batches of decode steps in a row, where little changes from one to the next."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from operator import le
from typing import NamedTuple, NoReturn

import torch

from paged_ops.batch.batch import Batch, Rows, checked_query_lens, read_rows
from paged_ops.blocks.holding import NO_BLOCK, Holding
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager

_SPARE_COLUMNS = 16  # of a new table, so that it need not be made anew whenever a row gets longer


class DecodeRows(NamedTuple):
    """What the requests of a step held at one moment, and what of it is not yet in the tensors.

    Invariant: for each changed row, the entries of its table from `first` on are `blocks`.
    """

    held: list[Holding]
    versions: list[int]
    lengths: array[int]
    whole: bool  # whether these are the requests' own
    changed: Sequence[int] = ()
    last_blocks: Sequence[int] = ()  # where the new tokens lie; as the next, of the changed rows
    rewrites: Sequence[int] = ()
    first: Sequence[int] = ()
    blocks: Sequence[list[int]] = ()


class DecodeBatches:
    """Builds the batch of each decode step from that of the step before.

    The result is what `build_batch` gives for one new token per request, except that block_tables
    may have more columns than needed, filled with -1. A row of the tables is written only if the
    request's blocks have changed since the last call, or another request has taken the row; so an
    engine should keep requests in their rows. Where only lengths have changed, a step costs a few
    passes over the list of requests.

    Parameters
    ----------
    manager : BlockManager
        Who owns which block.
    device : torch.device or str, optional
        Where the tensors go. None: torch's default device.

    Attributes
    ----------
    manager : BlockManager
        As given.

    Examples
    --------
    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> _ = manager.allocate("a", 6), manager.allocate("b", 2)
    >>> batches = DecodeBatches(manager)
    >>> for _ in range(2):
    ...     _ = manager.append("a", 1), manager.append("b", 1)
    ...     batch = batches.build(["a", "b"])
    ...     print(batch.seq_lens.tolist(), batch.slot_mapping.tolist())
    [7, 3] [6, 10]
    [8, 4] [7, 11]
    """

    def __init__(self, manager: BlockManager, device: torch.device | str | None = None) -> None:
        self.manager = manager
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._held: list[Holding] = []  # of the last step, row by row; compared by identity
        self._versions: list[int] = []
        self._lengths = array("i")
        self._whole = True
        self._seq_lens = torch.empty(0, dtype=torch.int32, device="cpu")
        self._slots = torch.empty(0, dtype=torch.int64, device="cpu")
        self._tables = torch.empty(0, 0, dtype=torch.int32, device=self._device)
        self._starts = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._columns: list[int] = []  # entries of each row that are not padding
        self._rewrites: list[int] = []  # of each row's request, when its row was written

    def build(self, requests: Sequence[Hashable], seq_lens: Sequence[int] | None = None) -> Batch:
        """Build the index tensors of a step in which each request has one new token.

        Parameters
        ----------
        requests : sequence of Hashable
            The requests in the order of their rows, each once. Their new tokens must have been
            appended.
        seq_lens : sequence of int, optional
            Treat each request as if it ended after so many tokens. None: the whole request.

        Returns
        -------
        Batch
            The tensors. block_tables is changed in place by the next call; the others are new.

        Raises
        ------
        UnknownRequest, ValueError, TypeError
            As `build_batch`.
        """
        with self.manager.lock, self.manager.ledger as ledger:
            rows = self.read(ledger, requests, seq_lens)
        return self.next(rows)

    def read(
        self, ledger: Ledger, requests: Sequence[Hashable], seq_lens: Sequence[int] | None = None
    ) -> DecodeRows:
        """Read all rows of a step from the books, which are open; refuse them as `build`."""
        try:
            held = [ledger.requests[request] for request in requests]
            present = [request.num_tokens for request in held]
            given = present if seq_lens is None else list(seq_lens)
            lengths = array("i", given)
        except (KeyError, TypeError, OverflowError):
            _refuse(ledger, requests, seq_lens)
        same = held == self._held
        one_each = len(lengths) == len(held) and (same or len(set(requests)) == len(held))
        fit = seq_lens is None or (
            bool not in map(type, given)  # which an array takes for an integer
            and min(lengths, default=0) >= 0
            and all(map(le, lengths, present))
        )
        if not one_each or not fit or 0 in lengths:
            _refuse(ledger, requests, seq_lens)
        versions = [request.version for request in held]
        changed = self._changed_rows(held, versions, same)
        whole = seq_lens is None
        if not whole or not self._whole:
            changed = self._moved_rows(changed, lengths)
        if not changed:
            return DecodeRows(held, versions, lengths, whole)
        known = self._columns if len(held) == len(self._held) else [0] * len(held)
        rewrites = [held[row].rewrites for row in changed]
        first = [known[row] if self._only_grew(held[row], row) else 0 for row in changed]
        blocks = [held[r].table[start:] for r, start in zip(changed, first, strict=True)]
        if whole and self._whole:  # each of these tables has an entry that is new
            last_blocks = [entries[-1] for entries in blocks]
        else:
            size = ledger.block_size
            last_blocks = [held[row].table[(lengths[row] - 1) // size] for row in changed]
        if NO_BLOCK in last_blocks:
            _refuse(ledger, requests, seq_lens)
        return DecodeRows(
            held, versions, lengths, whole, changed, last_blocks, rewrites, first, blocks
        )

    def _only_grew(self, held: Holding, row: int) -> bool:
        """Say whether a row's table is that of the last step, with entries added."""
        return (
            row < len(self._held)
            and held is self._held[row]
            and held.rewrites == self._rewrites[row]
        )

    def _changed_rows(self, held: list[Holding], versions: list[int], same_rows: bool) -> list[int]:
        """Return the rows whose table is not what it was."""
        if same_rows and versions == self._versions:
            return []
        if len(held) != len(self._held):
            return list(range(len(held)))
        pairs = zip(held, self._held, versions, self._versions, strict=True)
        return [row for row, (a, b, new, old) in enumerate(pairs) if a is not b or new != old]

    def _moved_rows(self, changed: list[int], lengths: array[int]) -> list[int]:
        """Return the rows that changed, and those whose last token lies in another block now."""
        if len(changed) == len(lengths):
            return changed
        size, known = self.manager.block_size, set(changed)
        pairs = enumerate(zip(lengths, self._lengths, strict=True))
        return [r for r, (a, b) in pairs if r in known or (a - 1) // size != (b - 1) // size]

    def next(self, rows: DecodeRows) -> Batch:
        """Build the batch of what was read last.

        All tensors are ordinary ones, whatever mode the caller is in: they are used again by steps
        in other modes.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._next(rows)
        return self._next(rows)

    def _next(self, rows: DecodeRows) -> Batch:
        if not rows.held:
            return Rows([], [], [], self.manager.block_size).build(self._device)
        seq_lens = torch.frombuffer(rows.lengths, dtype=torch.int32)
        if len(rows.held) != len(self._held):
            self._resize(len(rows.held))
        self._held = []  # if this is broken off, the next step knows of no row
        # In the same last block the slot moves with the length; the other rows are set anew.
        slots = self._slots + (seq_lens - self._seq_lens)
        if rows.changed:
            self._write_tables(rows)
            size = self.manager.block_size
            pairs = zip(rows.changed, rows.last_blocks, strict=True)
            new = [block * size + (rows.lengths[row] - 1) % size for row, block in pairs]
            slots[_int64(rows.changed)] = _int64(new)
        self._versions, self._lengths, self._whole = rows.versions, rows.lengths, rows.whole
        self._seq_lens, self._slots = seq_lens, slots
        self._held = rows.held
        return Batch(
            block_tables=self._tables,
            seq_lens=seq_lens.to(self._device),
            query_start_loc=self._starts,
            slot_mapping=slots.to(self._device),
        )

    def _resize(self, batch: int) -> None:
        """Make room for another number of rows, all of which will be written."""
        self._seq_lens = torch.zeros(batch, dtype=torch.int32, device="cpu")
        self._slots = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=self._device)
        self._tables = torch.empty(batch, 0, dtype=torch.int32, device=self._device)
        self._columns, self._rewrites = [0] * batch, [0] * batch

    def _write_tables(self, rows: DecodeRows) -> None:
        """Write the new entries of the tables, all at once."""
        at_row: list[int] = []
        at_column: list[int] = []
        entries: list[int] = []
        changes = zip(rows.changed, rows.rewrites, rows.first, rows.blocks, strict=True)
        for row, rewrites, first, blocks in changes:
            self._columns[row] = first + len(blocks)
            self._rewrites[row] = rewrites
            at_row += [row] * len(blocks)
            at_column += range(first, first + len(blocks))
            entries += blocks
        width = max(self._columns)
        if width > self._tables.shape[1]:
            columns = width + _SPARE_COLUMNS - self._tables.shape[1]
            self._tables = torch.nn.functional.pad(self._tables, (0, columns), value=NO_BLOCK)
        rewritten = [row for row, first in zip(rows.changed, rows.first, strict=True) if not first]
        if rewritten:
            self._tables[_int64(rewritten).to(self._device)] = NO_BLOCK
        where = _int64(at_row).to(self._device), _int64(at_column).to(self._device)
        self._tables[where] = _int64(entries).to(self._device, torch.int32)


def _refuse(
    ledger: Ledger, requests: Sequence[Hashable], seq_lens: Sequence[int] | None
) -> NoReturn:
    """Refuse rows for the reason that `build_batch` has."""
    read_rows(ledger, requests, checked_query_lens(requests, None), seq_lens)
    raise AssertionError("rows that build_batch takes were refused")


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
