"""``python -m paged_ops.bench memory``: pools against contiguous caches; what sharing saves."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paged_ops.bench.memory.lengths import DISTRIBUTIONS, Request, at_most, read_trace
from paged_ops.bench.memory.report import (
    COLUMNS,
    Row,
    as_text,
    draw_reuse,
    draw_usage,
    usage_row,
    write_csv,
)
from paged_ops.bench.memory.reuse import replay
from paged_ops.bench.memory.saturated import contiguous, paged, power_of_two
from paged_ops.bench.memory.sharing import beam_search, parallel_sampling

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
WATERMARKS = (0.0, 0.02)
PAPER_SLOTS = 15_700  # of OPT-13B on a GPU of 40 GB
TRACE_SLOTS = 100_000
POOL_BLOCKS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)

# Percent of blocks saved on Alpaca, by the vLLM paper (arXiv 2309.06180, figure 15).
PAPER_SAVED = {
    "parallel sampling": {2: 6.09, 4: 8.53, 6: 9.79},
    "beam search": {2: 37.56, 4: 53.13, 6: 55.16},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a trace to study too: CSV, or one JSON object per line; may be given several times",
    )
    parser.add_argument("--requests", type=int, default=4000, help="requests of each workload")
    parser.add_argument("--slots", type=int, default=TRACE_SLOTS, help="pool of the traces")
    parser.add_argument("--max-length", type=int, help="leave out longer requests of the traces")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write CSV and PNG files")


def run(options: argparse.Namespace) -> None:
    """Run every part of the study and print its table as it is done."""
    print("percent of the pool's slots, averaged over the steps at which a request waits:")
    for name, meaning in COLUMNS.items():
        print(f"  {name:12} {meaning}")
    traces = {path.stem: read_trace(path) for path in options.trace}
    usage: list[Row] = []
    for workload, requests, slots in _workloads(options, traces):
        rows = list(usage_rows(workload, requests, slots))
        print(f"\n{workload}, {len(requests)} requests, {slots} slots\n{as_text(rows)}", flush=True)
        usage += rows
    sharing = sharing_rows(options.requests)
    print(f"\nblocks saved, alpaca-means, block size 16, percent\n{as_text(sharing)}", flush=True)
    reuse: list[Row] = []
    for workload, requests in traces.items():
        if _has_prefixes(requests):
            rows_found = reuse_rows(workload, requests)
            print(f"\n{workload}: prompt blocks found, percent\n{as_text(rows_found)}", flush=True)
            reuse += rows_found
    if options.output is not None:
        _write(options.output, {"usage": usage, "sharing": sharing, "reuse": reuse})


def _workloads(
    options: argparse.Namespace, traces: dict[str, list[Request]]
) -> Iterator[tuple[str, list[Request], int]]:
    """List the queues to run: name, requests, slots of the pool.

    Traces with prefix blocks are for the other part: of their lengths, up to 100,000 tokens and
    more, a contiguous cache of this size holds none.
    """
    name = "sharegpt-means"
    yield name, DISTRIBUTIONS[name].draw(options.requests), PAPER_SLOTS
    for name, requests in traces.items():
        if _has_prefixes(requests):
            continue
        limit = options.slots if options.max_length is None else options.max_length
        yield name, at_most(requests, limit, options.requests), options.slots


def _has_prefixes(requests: Sequence[Request]) -> bool:
    return all(request.prefix_blocks for request in requests)


def usage_rows(workload: str, requests: Sequence[Request], slots: int) -> Iterator[Row]:
    """Run a queue in every way: contiguous with three kinds of reserve, and paged."""
    longest = max(request.prompt + request.output for request in requests)
    reserves: dict[str, Callable[[Request], int]] = {
        "Max": lambda request: longest,
        "Pow2": lambda request: min(longest, request.prompt + power_of_two(request.output)),
        "Oracle": lambda request: request.prompt + request.output,
    }
    for method, reserve in reserves.items():
        usage = contiguous(requests, slots, reserve)
        yield usage_row(workload, method, usage, None, 0.0)
    for watermark in WATERMARKS:
        for block_size in BLOCK_SIZES:
            usage = paged(requests, slots, block_size, watermark)
            yield usage_row(workload, "paged", usage, block_size, watermark)


def sharing_rows(count: int) -> list[Row]:
    """Answer prompts of the paper's Alpaca means several times each.

    Of `count` requests a fourth is sampled, and a tenth, which takes as long, is searched.
    """
    draw = DISTRIBUTIONS["alpaca-means"].draw
    ways = {
        "parallel sampling": (parallel_sampling, draw(max(1, count // 4))),
        "beam search": (beam_search, draw(max(1, count // 10))),
    }
    return [
        {"method": name, "width": width, "saved": answer(requests, width).percent, "paper": paper}
        for name, (answer, requests) in ways.items()
        for width, paper in PAPER_SAVED[name].items()
    ]


def reuse_rows(workload: str, requests: Sequence[Request]) -> list[Row]:
    """Replay a trace before pools of several sizes, and before one without a limit."""
    return [
        {
            "workload": workload,
            "num_blocks": size,
            "found": (reuse := replay(requests, size)).percent,
            "evictions": reuse.evictions,
        }
        for size in (*POOL_BLOCKS, None)
    ]


def _write(folder: Path, tables: dict[str, Sequence[Row]]) -> None:
    """Write what there is as CSV and, where matplotlib is installed, as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        if rows:
            write_csv(folder / f"memory-{name}.csv", rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("\nno pictures: matplotlib is missing; install paged-ops[plots]")
        return
    for name, draw in (("usage", draw_usage), ("reuse", draw_reuse)):
        if tables[name]:
            draw(folder / f"memory-{name}.png", tables[name])
