"""Decoding at equal batch and equal lengths, where only the caches differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from transformers import LlamaForCausalLM

from paged_ops.bench.serving.contiguous import decode, dynamic_cache, static_cache
from paged_ops.engine import Engine
from paged_ops.integrations.transformers import PackedModel, PagedCache, register


def speeds(
    build: Callable[[], LlamaForCausalLM],
    prompts: Sequence[Sequence[int]],
    num_new: int,
    block_size: int,
) -> dict[str, float]:
    """Return each cache's tokens per second in decode steps.

    All ways take their steps in turn, because the speed of a shared machine changes within seconds;
    the lower quartile of each one's steps counts, because others on the machine only add to it.

    Parameters
    ----------
    build : callable
        Makes the model.
    prompts : sequence
        One for each row, all of the same length.
    num_new : int
        Tokens of each answer; the first comes with the prefill, which isn't timed.
    block_size : int
        Tokens per block of the paged caches.
    """
    contiguous, paged = build(), build()
    register()
    contiguous.set_attn_implementation("sdpa")
    length = len(prompts[0]) + num_new
    num_blocks = len(prompts) * -(-length // block_size)
    engine = Engine(
        PackedModel(paged), num_blocks=num_blocks, block_size=block_size, max_batch=len(prompts)
    )
    for prompt in prompts:
        engine.submit(list(prompt), num_new)
    dynamic, static = dynamic_cache(contiguous, length), static_cache(contiguous, length)
    ways: dict[str, Iterator[object]] = {
        "dynamic": decode(contiguous, prompts, dynamic, num_new),
        "static": decode(contiguous, prompts, static, num_new),
        "PagedCache": decode(paged, prompts, PagedCache(paged, num_blocks, block_size), num_new),
        "engine": engine.run(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for steps in ways.values():
        next(steps)
    for _ in range(num_new - 1):
        for name, steps in ways.items():
            start = time.perf_counter()
            next(steps)
            seconds[name].append(time.perf_counter() - start)
    return {
        name: len(prompts) / statistics.quantiles(each, n=4)[0] for name, each in seconds.items()
    }
