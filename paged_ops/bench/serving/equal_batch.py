"""Decoding at equal batch and equal lengths, where only the caches differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from transformers import LlamaForCausalLM

from paged_ops.bench.serving.contiguous import decode, dynamic_cache, static_cache
from paged_ops.demo.engine import Engine
from paged_ops.integrations.transformers import PackedModel, PagedCache

Steps = Callable[[], Iterator[object]]
"""Begins a run of so many steps: a prefill, then one token for each row in every step."""


def speeds(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    block_size: int,
    repeats: int,
) -> dict[str, float]:
    """Return each cache's tokens per second in decode steps, the median of interleaved runs."""
    length = len(prompts[0]) + num_new
    num_blocks = len(prompts) * -(-length // block_size)

    def contiguous(new_cache: Callable[[LlamaForCausalLM, int], object]) -> Steps:
        def begin() -> Iterator[object]:
            model.set_attn_implementation("sdpa")
            return decode(model, prompts, new_cache(model, length), num_new)  # type: ignore[arg-type]

        return begin

    def paged_cache() -> Iterator[object]:
        model.set_attn_implementation("paged_ops")
        return decode(model, prompts, PagedCache(model, num_blocks, block_size), num_new)

    def engine() -> Iterator[object]:
        engine = Engine(
            PackedModel(model),
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch=len(prompts),
        )
        for prompt in prompts:
            engine.submit(list(prompt), num_new)
        return engine.run()

    ways: dict[str, Steps] = {
        "dynamic": contiguous(dynamic_cache),
        "static": contiguous(static_cache),
        "PagedCache": paged_cache,
        "engine": engine,
    }
    runs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, begin in ways.items():
            runs[name].append(len(prompts) / _median_step(begin()))
    return {name: statistics.median(each) for name, each in runs.items()}


def _median_step(steps: Iterator[object]) -> float:
    """Return the median seconds of a decode step; the prefill, which comes first, isn't one."""
    times: list[float] = []
    next(steps)
    last = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return statistics.median(times)
