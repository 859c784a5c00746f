"""The batches of decode steps in a row, where little changes from one to the next."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from paged_ops.batch.batch import Batch, build_batch
from paged_ops.blocks.manager import NO_BLOCK, BlockManager, _Request

_SPARE_COLUMNS = 16  # of a new table, so that it need not be made anew whenever a row gets longer


class _Rows(NamedTuple):
    """What the requests of a step held at one moment, and what of it is not yet in the tensors.

    Invariant: for each changed row, the entries of its table from `first` on are `blocks`.
    """

    held: list[_Request]
    versions: list[int]
    lengths: array[int]
    changed: list[int]
    rewrites: list[int]  # as the next two, of the changed rows only
    first: list[int]
    blocks: list[list[int]]


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
        self._held: list[_Request] = []  # of the last step, row by row; compared by identity
        self._versions: list[int] = []
        self._seq_lens = torch.empty(0, dtype=torch.int32, device="cpu")
        self._slots = torch.empty(0, dtype=torch.int64, device="cpu")
        self._tables = torch.empty(0, 0, dtype=torch.int32, device=self._device)
        self._starts = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._columns: list[int] = []  # entries of each row that are not padding
        self._rewrites: list[int] = []  # of each row's request, when its row was written

    def build(self, requests: Sequence[Hashable]) -> Batch:
        """Build the index tensors of a step in which each request has one new token.

        Parameters
        ----------
        requests : sequence of Hashable
            The requests in the order of their rows, each once. Their new tokens must have been
            appended.

        Returns
        -------
        Batch
            The tensors. block_tables is changed in place by the next call; the others are new.

        Raises
        ------
        UnknownRequest, ValueError
            As `build_batch`.
        """
        rows = self._read(requests)
        if rows is None:  # no rows, or a reason to refuse them, which build_batch will find
            return build_batch(self.manager, requests, device=self._device)
        return self._next(rows)

    def _read(self, requests: Sequence[Hashable]) -> _Rows | None:
        """Read all rows at one moment; None if one can't be read, or there are none."""
        with self.manager._lock:
            try:
                held = [self.manager._requests[request] for request in requests]
                lengths = array("i", [request.num_tokens for request in held])
            except (KeyError, TypeError, OverflowError):
                return None
            same = held == self._held
            if not held or 0 in lengths or not (same or len(set(requests)) == len(requests)):
                return None
            versions = [request.version for request in held]
            changed = self._changed_rows(held, versions, same)
            known = self._columns if len(held) == len(self._held) else [0] * len(held)
            rewrites = [held[row].rewrites for row in changed]
            first = [known[row] if self._only_grew(held[row], row) else 0 for row in changed]
            blocks = [held[r].table[start:] for r, start in zip(changed, first, strict=True)]
        return _Rows(held, versions, lengths, changed, rewrites, first, blocks)

    def _only_grew(self, held: _Request, row: int) -> bool:
        """Say whether a row's table is that of the last step, with entries added."""
        return (
            row < len(self._held)
            and held is self._held[row]
            and held.rewrites == self._rewrites[row]
        )

    def _changed_rows(
        self, held: list[_Request], versions: list[int], same_rows: bool
    ) -> list[int]:
        """Return the rows whose table is not what it was."""
        if same_rows and versions == self._versions:
            return []
        if len(held) != len(self._held):
            return list(range(len(held)))
        pairs = zip(held, self._held, versions, self._versions, strict=True)
        return [row for row, (a, b, new, old) in enumerate(pairs) if a is not b or new != old]

    def _next(self, rows: _Rows) -> Batch:
        """Build the batch, and remember what it was built from."""
        seq_lens = torch.frombuffer(rows.lengths, dtype=torch.int32)
        if len(rows.held) != len(self._held):
            self._resize(len(rows.held))
        # In the same last block the slot moves with the length; the other rows are set anew.
        slots = self._slots + (seq_lens - self._seq_lens)
        if rows.changed:
            self._write_tables(rows)
            size = self.manager.block_size
            pairs = zip(rows.changed, rows.blocks, strict=True)
            new = [blocks[-1] * size + (rows.lengths[row] - 1) % size for row, blocks in pairs]
            slots[_int64(rows.changed)] = _int64(new)
        self._held, self._versions = rows.held, rows.versions
        self._seq_lens, self._slots = seq_lens, slots
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

    def _write_tables(self, rows: _Rows) -> None:
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


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
