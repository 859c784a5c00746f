"""The pool as conversations share it: who holds which block, and what is kept for a later turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_ops.blocks.manager import BlockManager
from paged_ops.demo.pool_picture import DIM, RESET, letter, paint

LEGEND = "A held by A, 2 shared by 2, a kept for A, * for all, . free"


class PoolMap:
    """Follows a pool from step to step, and draws it.

    Attributes
    ----------
    holders : list of list of int
        For each block the conversations that held it in the last step.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._last_holder: dict[int, int] = {}
        self.holders: list[list[int]] = [[] for _ in range(manager.num_blocks)]

    @property
    def num_held(self) -> int:
        """Blocks that a conversation holds."""
        return sum(map(bool, self.holders))

    def update(self, owners: Sequence[int], conversations: Mapping[int, int]) -> None:
        """Note who holds what after a step.

        Parameters
        ----------
        owners : sequence of int
            The request that held each block in the step, or -1: some have left since.
        conversations : mapping
            From the requests to their conversations.
        """
        for block, request in enumerate(owners):
            if request >= 0:
                self._last_holder[block] = conversations[request]
        self.holders = [[] for _ in self.holders]
        with self._manager.lock, self._manager.ledger as ledger:
            for request, conversation in conversations.items():
                held = ledger.requests.get(request)
                for block in held.table if held is not None else ():
                    self.holders[block].append(conversation)

    def draw(self, *, per_row: int = 32, in_colour: bool = False) -> list[str]:
        """Draw a cell for each block, in rows."""
        with self._manager.lock, self._manager.ledger as ledger:
            kept = set(ledger.stock.prefix.idle_blocks())
        cells = [self._cell(block, kept, in_colour) for block in range(len(self.holders))]
        rows = [cells[start : start + per_row] for start in range(0, len(cells), per_row)]
        return [" ".join(row) for row in rows]

    def _cell(self, block: int, kept: set[int], in_colour: bool) -> str:
        holders = self.holders[block]
        if len(holders) > 1:
            count = str(len(holders)) if len(holders) < 10 else "+"
            return f"\x1b[1m{count}{RESET}" if in_colour else count
        if holders:
            return paint(letter(holders[0]), holders[0], in_colour=in_colour)
        owner = self._last_holder.get(block)
        if block in kept and owner is not None:
            return paint(letter(owner).lower(), owner, in_colour=in_colour)
        if block in kept:
            return "*"
        return f"{DIM}.{RESET}" if in_colour else "."

    def account(self) -> list[str]:
        """Count the blocks, and the prompt tokens that were found, in short lines."""
        stats = self._manager.stats()
        shared = sum(len(each) > 1 for each in self.holders)
        return [
            f"{self.num_held} of {stats.num_blocks} blocks held, {shared} shared,",
            f"{stats.num_cached} kept for later turns;",
            f"{stats.hit_tokens} of {stats.prompt_tokens} prompt tokens",
            f"found in the pool ({stats.hit_rate:.0%})",
        ]
