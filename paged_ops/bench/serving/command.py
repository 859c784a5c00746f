"""``python -m paged_ops.bench serving``: the paged cache against transformers' contiguous ones."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

import paged_ops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""

    def add(flag: str, default: int, what: str) -> None:
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")

    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="of transformers, such as `make chat` leaves; default: one of random weights",
    )
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
    from paged_ops.bench.serving import contiguous, equal_batch, paged, report
    from paged_ops.bench.serving.workload import Shape, bytes_per_token, load, make_jobs

    torch.set_num_threads(options.threads)
    shape = Shape(options.layers, options.heads, max(1, options.heads // 4))
    positions = max(options.max_length, options.context + options.steps)
    build = partial(load, options.model) if options.model else partial(shape.build, positions)
    model = build()
    vocab_size = model.config.vocab_size
    jobs = make_jobs(options.requests, options.max_length, vocab_size)
    num_slots = options.rows * options.max_length
    parameters = sum(parameter.numel() for parameter in model.parameters())
    info = paged_ops.backend_info()
    head = (
        f"torch {info.torch}, CPU variant {info.cpu_isa}, {options.threads} threads; "
        f"{parameters:,} parameters, float32\n"
        f"{len(jobs)} requests, {sum(len(job.prompt) for job in jobs)} prompt tokens and "
        f"{sum(job.num_new for job in jobs)} new ones; "
        f"memory for {num_slots} tokens ({num_slots * bytes_per_token(model) / 2**20:.0f} MiB)"
    )
    print(head + "\n", flush=True)
    outcomes = {
        name: contiguous.serve(model, jobs, num_slots, options.max_length, *way)
        for name, way in contiguous.WAYS.items()
    }
    outcomes["paged"] = paged.serve(model, jobs, num_slots, options.block_size)
    rows = [report.as_row(name, outcome) for name, outcome in outcomes.items()]
    print(report.as_text(rows), flush=True)
    prompts = [[i % vocab_size] * options.context for i in range(options.batch)]
    speeds = equal_batch.speeds(build, prompts, options.steps, options.block_size)
    equal = [{"cache": name, "tokens/s": round(speed, 1)} for name, speed in speeds.items()]
    print(f"\ndecode steps, {options.batch} rows of {options.context} tokens and more")
    print(report.as_text(equal), flush=True)
    if options.output is not None:
        given = {name: value for name, value in vars(options).items() if type(value) is int}
        results = {"machine": head, "options": given, "serving": rows, "equal batch": equal}
        report.write(options.output, results)
