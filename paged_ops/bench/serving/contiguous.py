"""Serving with transformers' contiguous caches: rectangular batches, one after another.

This is what ``model.generate`` does with a padded batch: every row runs until the longest answer
is done. How many rows fit into the memory is up to the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from paged_ops.bench.serving.outcome import Outcome
from paged_ops.bench.serving.workload import Job

NewCache = Callable[[LlamaForCausalLM, int], Cache]
"""Makes a cache for rows of so many tokens at most."""


def dynamic_cache(model: LlamaForCausalLM, max_length: int) -> Cache:
    """Make a cache that is concatenated anew, longer by the new tokens, in every step."""
    return DynamicCache(config=model.config)


def static_cache(model: LlamaForCausalLM, max_length: int) -> Cache:
    """Make a cache of full length from the start."""
    return StaticCache(config=model.config, max_cache_len=max_length)


def rows_at_full_length(jobs: Sequence[Job], num_slots: int, max_length: int) -> int:
    """Return how many jobs form the next batch if each row reserves the full length."""
    return min(len(jobs), num_slots // max_length)


def rows_at_longest(jobs: Sequence[Job], num_slots: int, max_length: int) -> int:
    """Return how many jobs form the next batch if each row takes as much as the longest will.

    No server knows that length when the batch begins; here it is given to the contiguous cache.
    """
    longest = rows = 0
    for job in jobs:
        longest = max(longest, _padded_length([*jobs[:rows], job]))
        if (rows + 1) * longest > num_slots:
            break
        rows += 1
    return rows


WAYS = {
    "static": (static_cache, rows_at_full_length),
    "dynamic": (dynamic_cache, rows_at_longest),
}
"""The caches, and how many jobs fit each."""


def serve(
    model: LlamaForCausalLM,
    jobs: Sequence[Job],
    num_slots: int,
    max_length: int,
    new_cache: NewCache,
    rows_that_fit: Callable[[Sequence[Job], int, int], int],
) -> Outcome:
    """Serve all jobs in batches that fit the memory."""
    model.set_attn_implementation("sdpa")
    outcome, waiting = Outcome(num_slots), list(jobs)
    start = time.perf_counter()
    while waiting:
        rows = rows_that_fit(waiting, num_slots, max_length)
        batch, waiting = waiting[:rows], waiting[rows:]
        outcome.most_running = max(outcome.most_running, rows)
        prompts, num_new = [job.prompt for job in batch], max(job.num_new for job in batch)
        steps = decode(model, prompts, new_cache(model, max_length), num_new)
        for done, _ in enumerate(steps, 1):
            if done == 1:
                outcome.first_token_seconds += [time.perf_counter() - start] * len(batch)
            unfinished = [job for job in batch if done <= job.num_new]
            outcome.tokens += len(unfinished)
            outcome.live.append(sum(len(job.prompt) + done - 1 for job in unfinished))
    outcome.seconds = time.perf_counter() - start
    return outcome


def decode(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], cache: Cache, num_new: int
) -> Iterator[Tensor]:
    """Yield the likeliest next token of every row, `num_new` times; prompts are padded left."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real = torch.arange(width) >= width - torch.tensor([[len(prompt)] for prompt in prompts])
    mask = real.long()
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    for _ in range(num_new):
        output = model(
            tokens, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1
        )
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = positions[:, -1:] + 1
        yield tokens


def _padded_length(jobs: Sequence[Job]) -> int:
    """Return the columns that a batch has at its end."""
    return max(len(job.prompt) for job in jobs) + max(job.num_new for job in jobs) - 1
