"""How much of the prompts of a trace a prefix cache finds, for pools of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_ops.arguments import INT32_MAX
from paged_ops.bench.memory.lengths import Request
from paged_ops.blocks.manager import BlockManager


@dataclass(frozen=True)
class Reuse:
    """What a pool of so many blocks gave; None: no limit."""

    num_blocks: int | None
    prompt_blocks: int
    hit_blocks: int
    evictions: int

    @property
    def percent(self) -> float:
        """Blocks found, in percent of the prompts' blocks."""
        return 100 * self.hit_blocks / self.prompt_blocks


def replay(requests: Sequence[Request], num_blocks: int | None) -> Reuse:
    """Let the requests of a trace come one after the other, and count what is found.

    The ids of a prompt's prefix blocks stand for its tokens, one token a block, followed by one
    token that is never found: the one that is left to compute.

    Parameters
    ----------
    requests : sequence of Request
        The trace; each request must have prefix blocks.
    num_blocks : int, optional
        Blocks of the pool. None: no limit. A prompt that is longer than the pool is computed
        without it.
    """
    manager = BlockManager(INT32_MAX if num_blocks is None else num_blocks, block_size=1)
    prompt_blocks = hit_blocks = 0
    for number, request in enumerate(requests):
        prompt_blocks += len(request.prefix_blocks)
        if len(request.prefix_blocks) < manager.num_blocks:
            hit_blocks += manager.allocate(number, [*request.prefix_blocks, -1 - number])
            manager.commit(number, len(request.prefix_blocks))
            manager.free(number)
    return Reuse(num_blocks, prompt_blocks, hit_blocks, manager.stats().evictions)
