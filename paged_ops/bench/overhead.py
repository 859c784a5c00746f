"""``python -m paged_ops.bench overhead``: what a call costs beside its work, in microseconds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paged_ops import functional
from paged_ops.attention import PagedAttention
from paged_ops.batch.batch import build_batch

BOUND = 5.0
"""How many times an empty op any op may cost on a tiny call, in every mode; `run` holds it."""

CALLS = 100
NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 8, 16
STEPS_OF = (1, 64)
CHECKED = 64
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients on": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--samples", type=int, default=30, help="timed rounds; the least counts")


def run(options: argparse.Namespace) -> None:
    """Time a tiny call of each op, then steps of PagedAttention; exit with 1 above the bound."""
    torch.set_num_threads(1)
    print("Processor time of this thread, the least of all rounds.\n")
    print(f"one call, microseconds{'':12}" + "".join(f"{mode:>16}" for mode in MODES))
    times = {name: _in_every_mode(call, options.samples) for name, call in _calls().items()}
    for name, row in times.items():
        print(f"{name:34}" + "".join(f"{1e6 * seconds:16.2f}" for seconds in row))
    empty = times["an empty op"]
    worst = max(t / e for row in times.values() for t, e in zip(row, empty, strict=True))
    print(f"\nat most {worst:.1f} times an empty op; the bound is {BOUND}")
    check, call = _check_of_ids(options.samples)
    print(f"\nchecking the block ids of {CHECKED} sequences, microseconds: {1e6 * check:.1f} of a")
    print(f"decode call's {1e6 * call:.1f}")
    print("\na decode step of PagedAttention under no_grad, microseconds")
    print(f"{'requests':>8} {'whole step':>12} {'of it the ops':>14} {'the rest':>10}")
    for requests in STEPS_OF:
        with torch.no_grad():
            step, ops = _step(requests, options.samples)
        print(f"{requests:8} {1e6 * step:12.1f} {1e6 * ops:14.1f} {1e6 * (step - ops):10.1f}")
    if worst > BOUND:
        sys.exit(1)


def _least(call: Callable[[], object], samples: int) -> float:
    """Return the least processor time of a call: others on the machine only ever add to it."""
    times = []
    for _ in range(samples):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time() - start) / CALLS)
    return min(times)


def _in_every_mode(call: Callable[[], object], samples: int) -> list[float]:
    times = []
    for mode in MODES.values():
        with mode():
            times.append(_least(call, samples))
    return times


def _calls() -> dict[str, Callable[[], object]]:
    """Return a call of an empty op with attention's arguments, and one of each op of one token."""
    empty = _empty_op()
    cache = torch.randn(4, 2, BLOCK_SIZE, 1, HEAD_DIM)
    caches = cache[:, 0], cache[:, 1]
    tables = torch.tensor([[0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    query, out = torch.randn(2, 1, NUM_HEADS, HEAD_DIM)
    rows, slots = torch.randn(1, 1, HEAD_DIM), torch.tensor([1])
    copies, lse = torch.tensor([[0, 1]]), torch.zeros(1, NUM_HEADS)
    arguments = query, *caches, *tables
    return {
        "an empty op": lambda: empty(*arguments),
        "attention": lambda: functional.attention(*arguments),
        "attention, with out": lambda: functional.attention(*arguments, out=out),
        "attention_with_lse": lambda: functional.attention_with_lse(*arguments),
        "write_kv": lambda: functional.write_kv(rows, rows, *caches, slots),
        "merge_states": lambda: functional.merge_states(query, lse, query, lse),
        "copy_blocks": lambda: functional.copy_blocks(*caches, copies),
        "gather_kv": lambda: functional.gather_kv(*caches, *tables, num_tokens=2),
    }


def _check_of_ids(samples: int) -> tuple[float, float]:
    """Time what a call spends on the ids of long tables, and a decode call of such sequences.

    The first is the time that a refusal of the last id takes longer than one of the first id.
    """
    length, head_dim = 2048, 64
    columns = length // BLOCK_SIZE
    caches = torch.zeros(2, 1024, BLOCK_SIZE, 1, head_dim, dtype=torch.bfloat16)
    table = torch.randint(1024, (CHECKED, columns), dtype=torch.int32)
    lens = torch.full((CHECKED,), length, dtype=torch.int32)
    query = torch.zeros(CHECKED, 1, head_dim, dtype=torch.bfloat16)

    def call(tables: Tensor) -> None:
        with suppress(RuntimeError):
            torch.ops.paged.attention.default(query, *caches, tables, lens)

    def bad_at(entry: int) -> Tensor:
        changed = table.clone()
        changed.view(-1)[entry] = -1
        return changed

    with torch.inference_mode():
        last, first = (_least(partial(call, bad_at(entry)), samples) for entry in (-1, 0))
        start = time.thread_time()
        call(table)
        return last - first, time.thread_time() - start


def _empty_op() -> Callable[..., object]:
    """Define an op in Python that takes what attention takes and does nothing."""
    schema = str(torch.ops.paged.attention.default._schema)
    arguments = schema[schema.index("(") : schema.rindex("->")]
    library = torch.library.Library("paged_ops_bench", "FRAGMENT")
    library.define(f"empty{arguments}-> ()")
    library.impl("empty", lambda *arguments, **options: None, "CompositeExplicitAutograd")
    op: Any = torch.ops.paged_ops_bench.empty.default

    def call(*tensors: Tensor) -> object:
        return library and op(*tensors)  # a library that nobody holds takes its ops with it

    return call


def _step(num_requests: int, samples: int) -> tuple[float, float]:
    """Time decode steps from the first token on, each followed by its two ops alone."""
    layer = PagedAttention(NUM_HEADS, HEAD_DIM, BLOCK_SIZE, 32 * num_requests, 1)
    requests = [f"request {number}" for number in range(num_requests)]
    query = torch.randn(num_requests, NUM_HEADS, HEAD_DIM)
    rows = torch.randn(num_requests, 1, HEAD_DIM)
    caches = layer.cache.layer(0)
    steps, ops = [], []
    for _ in range(samples):
        for request in requests:
            layer.allocate(request, CALLS // 2)
        batch = build_batch(layer.manager, requests)
        index = batch.block_tables, batch.seq_lens
        step = alone = 0.0
        for _ in range(CALLS):
            start = time.thread_time()
            layer(query, rows, rows, requests)
            middle = time.thread_time()
            functional.write_kv(rows, rows, *caches, batch.slot_mapping)
            functional.attention(query, *caches, *index)
            step, alone = step + middle - start, alone + time.thread_time() - middle
        steps.append(step / CALLS)
        ops.append(alone / CALLS)
        for request in requests:
            layer.free(request)
    return min(steps), min(ops)
