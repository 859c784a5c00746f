"""One request, several pools: for models whose layers have different sliding windows.

A model with full-attention layers and layers of a window needs a pool, and tables, for each kind:
the former keep every block, the latter give back what has left the window. `LayerGroups` keeps the
books of all kinds in step: a call happens in all of them or in none, and a prompt hits only as far
as every kind still has what its layers need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paged_ops.blocks.books import Books, Tokens
from paged_ops.blocks.journal import Journal
from paged_ops.blocks.manager import BlockManager


class LayerGroup(NamedTuple):
    """The layers of a model that share a pool and its tables.

    Attributes
    ----------
    num_blocks : int
        Blocks of the pool.
    sliding_window : int, optional
        How many keys a query sees in these layers, its own included. None: all.
    """

    num_blocks: int
    sliding_window: int | None = None


class LayerGroups(Books):
    """The books of each group of layers, changed together by the calls of a `BlockManager`.

    Look at a single group through ``groups[name]``, which is what `build_batch` takes; change them
    through this class only.

    Parameters
    ----------
    groups : mapping of str to LayerGroup
        The groups, one or more.
    block_size : int
        Tokens per block, in every group.
    prefix_caching, watermark
        As `BlockManager`, for each group.

    Raises
    ------
    ValueError, TypeError
        There is no group, or an argument is refused by `BlockManager`.

    Examples
    --------
    >>> groups = LayerGroups({"full": LayerGroup(8), "window": LayerGroup(4, 4)}, block_size=2)
    >>> groups.allocate("a", [1, 2, 3, 4, 5, 6, 7])
    0
    >>> groups.commit("a")
    >>> groups["full"].block_table("a"), groups["window"].block_table("a")
    ([0, 1, 2, 3], [-1, -1, 2, 3])
    >>> groups.free("a")
    >>> groups.allocate("b", [1, 2, 3, 4, 5, 6, 8])
    6
    >>> groups["window"].block_table("b")
    [-1, 1, 2, 3]
    """

    def __init__(
        self,
        groups: Mapping[str, LayerGroup],
        block_size: int,
        prefix_caching: bool = True,
        watermark: float = 0.0,
    ) -> None:
        if not groups:
            raise ValueError("groups is empty, expected at least one group")
        journal = Journal()
        self._managers = {
            name: BlockManager(
                group.num_blocks,
                block_size,
                prefix_caching,
                watermark,
                sliding_window=group.sliding_window,
                journal=journal,
            )
            for name, group in groups.items()
        }
        super().__init__([manager.ledger for manager in self._managers.values()])

    def __getitem__(self, name: str) -> BlockManager:
        """Return the manager of a group, to look at."""
        return self._managers[name]

    def __iter__(self) -> Iterator[str]:
        """List the names of the groups."""
        return iter(self._managers)

    def append(self, request: Hashable, tokens: Tokens) -> dict[str, list[tuple[int, int]]]:
        """As `BlockManager.append`; returns the block copies to make in each group's pool."""
        return self.append_all([(request, tokens)])

    def append_all(
        self, growth: Sequence[tuple[Hashable, Tokens]]
    ) -> dict[str, list[tuple[int, int]]]:
        """As `BlockManager.append_all`; returns the block copies to make in each group's pool."""
        return dict(zip(self._managers, self._append_all(growth), strict=True))

    def flush(self) -> dict[str, int]:
        """As `BlockManager.flush`; returns the blocks that requests still hold in each group."""
        return dict(zip(self._managers, self._flush(), strict=True))
