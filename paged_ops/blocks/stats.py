"""The books of a pool at one moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paged_ops.blocks.ledger import Ledger


@dataclass(frozen=True)
class BlockStats:
    """The books of a pool at one moment, in blocks and in token slots.

    Attributes
    ----------
    block_size : int
        Slots per block.
    num_blocks, num_free, num_used : int
        Blocks of the pool, free ones, and distinct ones that requests hold.
    num_requests : int
        Requests that exist, those of 0 tokens included.
    request_tokens : int
        Sum of the requests' lengths: a token shared by two requests counts twice.
    live_tokens : int
        Distinct tokens: a shared token counts once. Of a block whose owners fill it differently,
        the fullest owner counts.
    num_cached : int
        Those of the free blocks whose content can be found by a prompt.
    prompt_tokens, hit_tokens : int
        Since the start: tokens of the prompts that were allocated by their ids, and how many of
        them were found.
    evictions : int
        Since the start: cached blocks that were given up for new content.
    preemptions : int
        Since the start: requests that were preempted, for recomputing or by swapping out.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_used: int
    num_requests: int
    request_tokens: int
    live_tokens: int
    num_cached: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0

    @property
    def num_slots(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def allocated_slots(self) -> int:
        """Slots of the blocks in use, whether filled or not."""
        return self.num_used * self.block_size

    @property
    def internal_waste(self) -> int:
        """Slots of blocks in use that hold no token: at most block_size - 1 per request."""
        return self.allocated_slots - self.live_tokens

    @property
    def pool_utilisation(self) -> float:
        """Share of all slots that hold a token, 0 to 1."""
        return self.live_tokens / self.num_slots

    @property
    def allocation_utilisation(self) -> float:
        """Share of the slots in use that hold a token, 0 to 1; 1 when no block is in use."""
        return self.live_tokens / self.allocated_slots if self.num_used else 1.0

    @property
    def effective_utilisation(self) -> float:
        """Tokens served per slot of the pool; above 1 when sharing saves more than waste costs."""
        return self.request_tokens / self.num_slots

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found, 0 to 1; 0 when there were none."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def count_blocks(ledger: Ledger) -> BlockStats:
    """Count what the books hold; they are open. Costs O(requests)."""
    stock = ledger.stock
    present = [*ledger.requests.values(), *ledger.arriving.values()]
    return BlockStats(
        block_size=ledger.block_size,
        num_blocks=stock.num_blocks,
        num_free=stock.num_free,
        num_used=stock.num_used,
        num_requests=len(present),
        request_tokens=sum(held.num_tokens for held in present),
        live_tokens=stock.num_used * ledger.block_size - _unfilled_slots(ledger),
        num_cached=stock.prefix.num_idle,
        prompt_tokens=ledger.prompt_tokens,
        hit_tokens=ledger.hit_tokens,
        evictions=stock.evictions,
        preemptions=ledger.preemptions,
    )


def _unfilled_slots(ledger: Ledger) -> int:
    """Count the slots of blocks in use that no owner fills.

    A block has such slots only if it is the partial last block of each of its owners: an owner that
    holds it further forward, or as a full last block, fills it.
    """
    fill: dict[int, int] = {}
    partial_owners: Counter[int] = Counter()
    for _, held in ledger.holders():
        if tail := held.num_tokens % ledger.block_size:
            last = held.table[-1]
            fill[last] = max(fill.get(last, 0), tail)
            partial_owners[last] += 1
    return sum(
        ledger.block_size - tail
        for block, tail in fill.items()
        if partial_owners[block] == ledger.stock.counts[block]
    )
