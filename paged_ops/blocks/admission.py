"""Who runs and who waits: the decisions around a full pool that every scheduler has to make.

These are choices among requests, made from what a `BlockManager` says; they change nothing by
themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum

from paged_ops.arguments import checked_int
from paged_ops.blocks.manager import BlockManager


class Preemption(Enum):
    """How a request steps aside."""

    RECOMPUTE = "recompute"
    """`BlockManager.preempt` it, and allocate it again, with what it has generated, later."""
    SWAP = "swap"
    """`SwapSpace.swap_out` it, and swap it in later."""


def victims(manager: BlockManager, running: Sequence[Hashable], num_blocks: int) -> list[Hashable]:
    """Choose which requests must step aside so that so many blocks are free.

    The youngest go first: they have the least to lose, and as the oldest always stays, the queue
    moves on. Blocks that several requests share come free only with the last of them, which is
    counted.

    Parameters
    ----------
    manager : BlockManager
        The books.
    running : sequence of Hashable
        The requests that may be chosen, the oldest first.
    num_blocks : int
        Blocks that shall be free, 0 or more.

    Returns
    -------
    list of Hashable
        The chosen ones, the youngest first; all of `running` if even that is too little.

    Examples
    --------
    >>> manager = BlockManager(num_blocks=6, block_size=4)
    >>> for request in "abc":
    ...     _ = manager.allocate(request, 8)
    >>> victims(manager, "abc", num_blocks=3)
    ['c', 'b']
    >>> for request in victims(manager, "abc", num_blocks=3):
    ...     manager.preempt(request)
    >>> manager.num_free
    4
    """
    missing = checked_int("num_blocks", num_blocks, 0)
    chosen: list[Hashable] = []
    with manager._lock:
        missing -= manager._count_free()
        left: dict[int, int] = {}  # owners of a block that would remain
        for request in reversed(running):
            if missing <= 0:
                break
            chosen.append(request)
            for block in manager._find(request).blocks:
                left[block] = left.get(block, manager._ref_counts[block]) - 1
                missing -= not left[block]
    return chosen


def cheaper_preemption(
    num_tokens: int,
    *,
    bytes_per_token: float,
    copy_bytes_per_second: float,
    compute_tokens_per_second: float,
) -> Preemption:
    """Say whether a request is brought back faster by copying or by computing.

    Parameters
    ----------
    num_tokens : int
        Length of the request, less what will probably still be cached.
    bytes_per_token : float
        Size of a token's keys and values over all layers.
    copy_bytes_per_second : float
        Speed of the link to the host's pool. A token goes over it twice.
    compute_tokens_per_second : float
        Speed of a prefill.

    Examples
    --------
    >>> cheaper_preemption(1000, bytes_per_token=2**17, copy_bytes_per_second=2e10,
    ...                    compute_tokens_per_second=2e4)
    <Preemption.SWAP: 'swap'>
    """
    copying = 2 * num_tokens * bytes_per_token / copy_bytes_per_second
    computing = num_tokens / compute_tokens_per_second
    return Preemption.SWAP if copying < computing else Preemption.RECOMPUTE
