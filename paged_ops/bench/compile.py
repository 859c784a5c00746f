"""``python -m paged_ops.bench compile``: decoder steps under torch.compile; what a clone costs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paged_ops
from paged_ops import PagedKVCache
from paged_ops.bench.decoder import LLAMA_SHAPED, TINY, decode_batch, make_step
from paged_ops.bench.peak_memory import peak_growth
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
    """A function under Inductor, and what its compilation has come to so far."""

    call: Callable[..., Any]
    num_graphs: Callable[[], int]
    missed_bytes: Callable[[], int]


def add_parser(benchmarks: Any) -> None:
    """Add this benchmark's command line to the program's."""
    parser = benchmarks.add_parser("compile", help=__doc__)
    parser.add_argument("--samples", type=int, default=31, help="timed calls per candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Time steps of every model, then one write and attention with and without clones.

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
        clones = _clones(options.samples)
    if options.json is not None:
        options.json.write_text(json.dumps({"steps": steps, "clones": clones}, indent=2) + "\n")


def compiled(function: Callable[..., Any]) -> Compiled:
    """Compile with Inductor, counting graphs and the bytes that could not be written in place."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import ReinplaceCounters

    torch._dynamo.reset()
    ReinplaceCounters.clear()
    counter = CompileCounterWithBackend("inductor")
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
        inputs = decode_batch(step, batch, width)
        candidates = {
            "eager": lambda inputs=inputs: step(*inputs),
            "compiled": lambda inputs=inputs: fast.call(*inputs),
        }
        seconds = interleaved_medians(candidates, samples, lambda: None, time.process_time)
        eager, graph = seconds["eager"], seconds["compiled"]
        print(f"{batch:7} {1e3 * eager:9.2f} {1e3 * graph:12.2f} {graph / eager:17.2f}", flush=True)
        rows.append({"model": name, "batch": batch, **seconds})
    print(f"graphs {fast.num_graphs()}, bytes not written in place {fast.missed_bytes()}\n")
    return rows


def _write_and_attend(caches: tuple[Tensor, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Write one row for each sequence of one block, and attend to it."""
    paged_ops.write_kv(rows, rows * 2, *caches, slots)
    block_tables = (slots // caches[0].shape[1]).to(torch.int32)[:, None]
    return paged_ops.attention(rows + 1, *caches, block_tables, torch.ones_like(block_tables[:, 0]))


def _clones(samples: int) -> list[dict[str, object]]:
    """Time the same work with the views of a pool taken inside and outside of the graph."""
    cache = PagedKVCache(1, num_blocks=4096, block_size=16, num_kv_heads=4, head_dim=64)
    cache.kv_blocks(0).fill_(1)  # every page committed
    both = torch.ones(2, 4096, 16, 4, 64)
    rows, slots = torch.randn(4, 4, 64), torch.arange(4) * 16
    outside = both[0], both[1]
    forms: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
        "views of the layer's buffer, taken inside": (
            lambda rows, slots: _write_and_attend(cache.layer(0), rows, slots),
            (rows, slots),
        ),
        "views of one buffer, taken outside": (_write_and_attend, (outside, rows, slots)),
    }
    print(f"one write and attention, 4 sequences, a pool of {cache.num_bytes >> 20} MiB")
    print(f"{'eager ms':>9} {'compiled ms':>12} {'MiB taken':>10}")
    results: list[dict[str, object]] = []
    for name, (function, inputs) in forms.items():
        fast = compiled(function)
        candidates = {
            "eager": lambda call=function, inputs=inputs: call(*inputs),
            "compiled": lambda call=fast.call, inputs=inputs: call(*inputs),
        }
        seconds = interleaved_medians(candidates, samples, lambda: None, time.process_time)
        taken = peak_growth(candidates["compiled"])
        times = f"{1e3 * seconds['eager']:9.3f} {1e3 * seconds['compiled']:12.3f}"
        print(f"{times} {taken >> 20:10}  {name}", flush=True)
        results.append({"form": name, "bytes_taken": taken, **seconds})
    return results
