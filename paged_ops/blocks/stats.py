"""The books of a pool at one moment."""

from __future__ import annotations

from dataclasses import dataclass


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
