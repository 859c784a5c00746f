"""``python -m paged_ops.bench compile``: decoder steps under torch.compile; what a clone costs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import paged_ops
from paged_ops.bench.decoder import LLAMA_SHAPED, TINY, decode_batch, make_step
from paged_ops.bench.peak_memory import peak_growth
from paged_ops.bench.pool_forms import POOL_BYTES, SEQUENCES, forms
from paged_ops.bench.timing import interleaved_medians
from paged_ops.demo.model import ModelConfig

BATCHES = ((1, 8), (8, 16), (64, 32))
"""Sequences, and blocks of each: the shapes of the timed steps."""

MODELS = {
    "tiny, float32": (TINY, torch.float32),
    "Llama-shaped, float32": (LLAMA_SHAPED, torch.float32),
    "Llama-shaped, bfloat16": (LLAMA_SHAPED, torch.bfloat16),
}


class Compiled(NamedTuple):
    """A compiled function, and what its compilation has come to so far."""

    call: Callable[..., Any]
    num_graphs: Callable[[], int]
    missed_bytes: Callable[[], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--samples", type=int, default=31, help="timed calls per candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    """Time steps of every model, then one write and attention on pools reached in many ways.

    Processor time of one thread: what others do on the machine is not in it.
    """
    info = paged_ops.backend_info()
    torch.set_num_threads(1)
    print(f"torch {info.torch}, {info.cpu_isa}; processor time of one thread, medians\n")
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        steps = [
            row
            for name, (config, dtype) in MODELS.items()
            for row in _steps(name, config, dtype, options.samples)
        ]
        return {"steps": steps, "clones": _clones(options.samples)}


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Compiled:
    """Compile a function, counting graphs and the bytes that could not be written in place."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import ReinplaceCounters

    torch._dynamo.reset()
    ReinplaceCounters.clear()
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(function, fullgraph=True, backend=counter)
    return Compiled(call, lambda: counter.frame_count, ReinplaceCounters.get_total_missed_bytes)


def _steps(
    name: str, config: ModelConfig, dtype: torch.dtype, samples: int
) -> list[dict[str, object]]:
    """Time eager and compiled steps of one model, all compiled ones from one graph."""
    step = make_step(config, num_blocks=64 * 32, block_size=16, dtype=dtype)
    fast = compiled(step)
    first = decode_batch(step, 2, 2)
    first[2].mark_batch_dynamic(*first[:2])
    start = time.perf_counter()
    fast.call(*first)
    print(f"{name}: four layers, compiled in {time.perf_counter() - start:.1f} s")
    print(f"{'batch':>7} {'eager ms':>9} {'compiled ms':>12} {'compiled / eager':>17}")
    rows: list[dict[str, object]] = []
    for batch, width in BATCHES:
        seconds = _times(step, fast, decode_batch(step, batch, width), samples)
        eager, graph = seconds["eager"], seconds["compiled"]
        print(f"{batch:7} {1e3 * eager:9.2f} {1e3 * graph:12.2f} {graph / eager:17.2f}", flush=True)
        rows.append({"model": name, "batch": batch, **seconds})
    print(f"graphs {fast.num_graphs()}, bytes not written in place {fast.missed_bytes()}\n")
    return rows


def _times(
    function: Callable[..., Any], fast: Compiled, inputs: tuple[Any, ...], samples: int
) -> dict[str, float]:
    calls = {"eager": partial(function, *inputs), "compiled": partial(fast.call, *inputs)}
    return interleaved_medians(calls, samples, lambda: None, time.process_time)


def _clones(samples: int) -> list[dict[str, object]]:
    """Time one write and one attention for every way of getting at the pool."""
    print(f"one write and attention, {SEQUENCES} sequences, a pool of {POOL_BYTES >> 20} MiB")
    print(f"{'eager ms':>9} {'compiled ms':>12} {'MiB taken':>10} {'MiB counted':>12}")
    results: list[dict[str, object]] = []
    for form in forms():
        fast = compiled(form.function, form.backend)
        seconds = _times(form.function, fast, form.inputs, samples)
        taken, missed = peak_growth(partial(fast.call, *form.inputs)), fast.missed_bytes()
        times = f"{1e3 * seconds['eager']:9.3f} {1e3 * seconds['compiled']:12.3f}"
        print(f"{times} {taken >> 20:10} {missed >> 20:12}  {form.name}", flush=True)
        results.append({"form": form.name, "bytes_taken": taken, "bytes_missed": missed, **seconds})
    return results
