"""``python -m paged_ops.bench attention``: attention against torch and the memory limit."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import paged_ops
from paged_ops.bench.peers import PEERS
from paged_ops.bench.timing import Flusher, interleaved_medians
from paged_ops.bench.workloads import WORKLOADS, Workload, make_inputs

_HEADER = (
    f"{'workload':9} {'paged ms':>9} {'GB/s':>6} {'GFLOP/s':>8} "
    f"{'/ gather+sdpa':>13} {'/ sdpa':>7} {'/ read':>7}"
)


def add_parser(benchmarks: Any) -> None:
    """Add this benchmark's command line to the program's."""
    parser = benchmarks.add_parser("attention", help=__doc__)
    parser.add_argument("--samples", type=int, default=7, help="timed calls per candidate")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="workloads, all if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds there too")
    parser.set_defaults(run=run)


def _chosen(names: Iterable[str] | None) -> list[Workload]:
    if names is None:
        return list(WORKLOADS)
    known = {workload.name: workload for workload in WORKLOADS}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"no workload {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


def _row(workload: Workload, seconds: dict[str, float]) -> str:
    paged = seconds["paged"]
    ratios = [paged / seconds[peer] for peer in ("gather+sdpa", "sdpa", "read")]
    # Reading memory limits decode only; a ratio to it says nothing about prefill.
    read = f"{ratios[2]:7.2f}" if workload.is_decode else f"{'-':>7}"
    return (
        f"{workload.name:9} {paged * 1e3:9.2f} {workload.kv_bytes / paged / 1e9:6.1f} "
        f"{workload.flops / paged / 1e9:8.0f} {ratios[0]:13.2f} {ratios[1]:7.2f} {read}"
    )


def run(options: argparse.Namespace) -> None:
    """Time every chosen workload and print a row for each, as it is done."""
    info = paged_ops.backend_info()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"torch {info.torch}, CPU variant {info.cpu_isa}, block size {options.block_size}")
    print("A ratio below 1 means that paged attention is the faster one.\n")
    print(_HEADER)
    flush = Flusher()
    results: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for workload in _chosen(options.only):
            inputs = make_inputs(workload, options.block_size)
            candidates = {name: peer(inputs) for name, peer in PEERS.items()}
            results[workload.name] = interleaved_medians(candidates, options.samples, flush)
            print(_row(workload, results[workload.name]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
