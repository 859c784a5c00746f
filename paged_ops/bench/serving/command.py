"""``python -m paged_ops.bench serving``: the paged cache against transformers' contiguous ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import paged_ops

if TYPE_CHECKING:
    from paged_ops.bench.serving.outcome import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""

    def add(flag: str, default: int, what: str) -> None:
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")

    add("--requests", 64, "requests of the queue")
    add("--max-length", 512, "tokens of a request, at most")
    add("--rows", 4, "rows of full length that the memory holds")
    add("--block-size", 16, "tokens per block")
    add("--layers", 4, "layers of the model")
    add("--heads", 8, "query heads of the model; a fourth as many KV heads, head_dim 64")
    add("--batch", 8, "rows of the comparison at equal batch")
    add("--context", 1024, "tokens of each row there")
    add("--steps", 64, "decode steps there")
    add("--threads", torch.get_num_threads(), "threads of torch")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write JSON and PNG files")


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    """Serve the same queue in every way, then compare decode steps at equal batch."""
    # transformers, an extra, is imported by these.
    from paged_ops.bench.serving import equal_batch, report
    from paged_ops.bench.serving.workload import Shape, make_jobs

    torch.set_num_threads(options.threads)
    shape = Shape(options.layers, options.heads, max(1, options.heads // 4))
    positions = max(options.max_length, options.context + options.steps)
    model = shape.build(positions)
    jobs = make_jobs(options.requests, options.max_length, shape.vocab_size)
    num_slots = options.rows * options.max_length
    parameters = sum(parameter.numel() for parameter in model.parameters())
    info = paged_ops.backend_info()
    head = (
        f"torch {info.torch}, CPU variant {info.cpu_isa}, {options.threads} threads; "
        f"{parameters:,} parameters, float32\n"
        f"{len(jobs)} requests, {sum(len(job.prompt) for job in jobs)} prompt tokens and "
        f"{sum(job.num_new for job in jobs)} new ones; "
        f"memory for {num_slots} tokens ({num_slots * shape.bytes_per_token / 2**20:.0f} MiB)"
    )
    print(head + "\n", flush=True)
    rows = []
    for name, serve in _ways(model, jobs, num_slots, options).items():
        rows.append(report.as_row(name, serve()))
    print(report.as_text(rows), flush=True)
    prompts = [[i % shape.vocab_size] * options.context for i in range(options.batch)]
    speeds = equal_batch.speeds(
        lambda: shape.build(positions), prompts, options.steps, options.block_size
    )
    equal = [{"cache": name, "tokens/s": round(speed, 1)} for name, speed in speeds.items()]
    print(f"\ndecode steps, {options.batch} rows of {options.context} tokens and more")
    print(report.as_text(equal), flush=True)
    if options.output is not None:
        given = {name: value for name, value in vars(options).items() if type(value) is int}
        results = {"machine": head, "options": given, "serving": rows, "equal batch": equal}
        report.write(options.output, results)


def _ways(
    model: Any, jobs: Any, num_slots: int, options: argparse.Namespace
) -> dict[str, Callable[[], Outcome]]:
    """Return the ways to serve the queue."""
    from paged_ops.bench.serving import contiguous, paged

    def in_batches(new_cache: Any, rows_that_fit: Any) -> Outcome:
        model.set_attn_implementation("sdpa")
        length = options.max_length
        return contiguous.serve(model, jobs, num_slots, length, new_cache, rows_that_fit)

    return {
        "static": lambda: in_batches(contiguous.static_cache, contiguous.rows_at_full_length),
        "dynamic": lambda: in_batches(contiguous.dynamic_cache, contiguous.rows_at_longest),
        "paged": lambda: paged.serve(model, jobs, num_slots, options.block_size),
    }
