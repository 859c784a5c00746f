"""One request, several pools: for models whose layers have different sliding windows.

A model with full-attention layers and layers of a window needs a pool, and tables, for each kind:
the former keep every block, the latter give back what has left the window. `LayerGroups` keeps one
`BlockManager` per kind in step: a call happens in all of them or in none, and a prompt hits only as
far as every kind still has what its layers need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from paged_ops.blocks.digest import ExtraKeys
from paged_ops.blocks.manager import BlockManager, Tokens


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


class LayerGroups:
    """A `BlockManager` for each group of layers, changed together.

    Look at a single one through ``groups[name]``, which is what `build_batch` takes; change them
    through this class only. Every call is atomic over all groups, among threads as well.

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
        self._managers = {
            name: BlockManager(
                group.num_blocks,
                block_size,
                prefix_caching,
                watermark,
                sliding_window=group.sliding_window,
            )
            for name, group in groups.items()
        }
        self._first = next(iter(self._managers.values()))

    def __getitem__(self, name: str) -> BlockManager:
        """Return the manager of a group, to look at."""
        return self._managers[name]

    def __iter__(self) -> Iterator[str]:
        """List the names of the groups."""
        return iter(self._managers)

    def allocate(self, request: Hashable, tokens: Tokens, extra_keys: ExtraKeys = ()) -> int:
        """As `BlockManager.allocate`, in every group; a hit is one that all groups have."""
        prompt = self._first._read_prompt(tokens, extra_keys)
        with self._locked() as managers:
            for manager in managers:
                manager._refuse_existing("request", request)
            hit_blocks = manager._most_hits(prompt)
            # Each pass cuts the hit to what some group has; when none cuts it, all have it.
            while (least := min(m._match(prompt, hit_blocks) for m in managers)) < hit_blocks:
                hit_blocks = least
            for manager in managers:
                manager._refuse_admission(prompt, hit_blocks)
            for manager in managers:
                ids = None if prompt.tokens is None else prompt.tokens[:]
                own = replace(prompt, tokens=ids, digests=prompt.digests.copy())
                manager._admit(request, own, hit_blocks)
            return hit_blocks * manager.block_size

    def append(self, request: Hashable, tokens: Tokens) -> dict[str, list[tuple[int, int]]]:
        """As `BlockManager.append`; returns the block copies to make in each group's pool."""
        return self._append_all([(request, tokens)])

    def _append_all(
        self, growth: Sequence[tuple[Hashable, Tokens]]
    ) -> dict[str, list[tuple[int, int]]]:
        """Append to several requests, each named once, in every group, or to none of them."""
        read = [(request, *self._first._read_tokens(tokens)) for request, tokens in growth]
        with self._locked() as managers:
            grown = [
                [(manager._find(request), count, ids) for request, count, ids in read]
                for manager in managers
            ]
            for manager, rows in zip(managers, grown, strict=True):
                manager._refuse_beyond_free(manager._blocks_to_grow(rows))
            copies = [
                [copy for row in rows for copy in manager._grow(*row)]
                for manager, rows in zip(managers, grown, strict=True)
            ]
        return dict(zip(self._managers, copies, strict=True))

    def commit(self, request: Hashable, num_tokens: int | None = None) -> None:
        """As `BlockManager.commit`, in every group."""
        with self._locked() as managers:
            held = self._first._find(request)
            written = self._first._checked_written(held, num_tokens)
            for manager in managers:
                manager._commit(manager._find(request), written)

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """As `BlockManager.fork`, in every group."""
        with self._locked() as managers:
            held = [manager._find(parent) for manager in managers]
            self._first._refuse_existing("child", child)
            for manager, parents in zip(managers, held, strict=True):
                manager._fork(parents, child)

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """As `BlockManager.truncate`; no group may have released what the new end sees."""
        with self._locked() as managers:
            cuts = [(manager, manager._find(request)) for manager in managers]
            keep = [manager._checked_keep(held, num_tokens) for manager, held in cuts]
            for manager, held in cuts:
                manager._cut(held, keep[0])

    def free(self, request: Hashable) -> None:
        """As `BlockManager.free`, in every group."""
        with self._locked() as managers:
            for manager in managers:
                manager._end(request)

    def flush(self) -> dict[str, int]:
        """As `BlockManager.flush`; returns the blocks that requests still hold in each group."""
        with self._locked() as managers:
            return dict(zip(self._managers, [m._flush() for m in managers], strict=True))

    def num_tokens(self, request: Hashable) -> int:
        """Return the length of a request in tokens."""
        return self._first.num_tokens(request)

    def check(self) -> None:
        """Prove that every group's books are in order, and that all hold the same requests.

        Raises
        ------
        AssertionError
            Something is wrong, with what it is.
        """
        for manager in self._managers.values():
            manager.check()
        lengths = [
            {request: held.num_tokens for request, held in manager._requests.items()}
            for manager in self._managers.values()
        ]
        if any(other != lengths[0] for other in lengths):
            raise AssertionError(f"the groups hold different requests: {lengths}")

    @contextmanager
    def _locked(self) -> Iterator[list[BlockManager]]:
        """Hold the locks of all managers, always taken in the same order."""
        with ExitStack() as stack:
            for manager in self._managers.values():
                stack.enter_context(manager._lock)
            yield list(self._managers.values())
