"""Serving from one pool of blocks, with the engine of the demo and of docs/examples/serve.py."""

from __future__ import annotations

import time
from collections.abc import Sequence

from transformers import LlamaForCausalLM

from paged_ops.bench.serving.outcome import Outcome
from paged_ops.bench.serving.workload import Job
from paged_ops.engine import Engine
from paged_ops.integrations.transformers import PackedModel


def serve(model: LlamaForCausalLM, jobs: Sequence[Job], num_slots: int, block_size: int) -> Outcome:
    """Serve all jobs, as many at once as have blocks."""
    num_blocks = num_slots // block_size
    engine = Engine(
        PackedModel(model), num_blocks=num_blocks, block_size=block_size, max_batch=len(jobs)
    )
    outcome = Outcome(num_slots)
    first: dict[int, float] = {}
    start = time.perf_counter()
    for job in jobs:
        engine.submit(job.prompt, job.num_new)
    for report in engine.run():
        now = time.perf_counter() - start
        for index in report.tokens:
            first.setdefault(index, now)
        outcome.most_running = max(outcome.most_running, len(report.tokens))
        outcome.live.append(report.occupancy.live_tokens)
    outcome.seconds = time.perf_counter() - start
    outcome.tokens = sum(job.num_new for job in jobs)
    outcome.first_token_seconds = list(first.values())
    return outcome
