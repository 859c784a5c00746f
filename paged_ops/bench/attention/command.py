"""``python -m paged_ops.bench attention``: attention against its peers and the machine's limits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paged_ops.bench.attention.machine import describe
from paged_ops.bench.attention.measure import (
    INDEX_COPY,
    measure_attention,
    measure_write,
    present,
)
from paged_ops.bench.attention.pictures import draw_curves, draw_workloads
from paged_ops.bench.attention.report import LEGEND, Table, notes
from paged_ops.bench.attention.result import Result
from paged_ops.bench.peers import PEERS, Peer
from paged_ops.bench.timing import Flusher, interleaved_samples
from paged_ops.bench.workloads import CURVES, WORKLOADS, WRITES, Workload

_USUAL_PEERS = [name for name, peer in PEERS.items() if not peer.on_request]
_NAMES = [*(workload.name for workload in (*WORKLOADS, *WRITES)), *CURVES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--samples", type=int, default=9, help="timed calls of each candidate")
    parser.add_argument("--block-size", type=int, default=32, help="tokens per block")
    names, peers = ", ".join(_NAMES), ", ".join(PEERS)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=_NAMES, help=names)
    parser.add_argument(
        "--peers",
        nargs="+",
        metavar="PEER",
        choices=PEERS,
        default=_USUAL_PEERS,
        help=f"{peers}; by default {', '.join(_USUAL_PEERS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write pictures there")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time every chosen workload and print a row for each, as it is done."""
    peers, absent = present({name: PEERS[name] for name in options.peers})
    about = describe()
    print(f"{about['machine']}, {about['threads']} threads, {about['date']}")
    print(f"CPU variant {about['cpu_isa']}, block size {options.block_size}")
    print(", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    for name, reason in absent.items():
        print(f"{name} left out: {reason}")
    print(f"\n{LEGEND}\n")
    results, curves = _measure(options, peers)
    if options.png is not None:
        _draw(options.png, results, curves)
    settings = {"block_size": options.block_size, "samples": options.samples}
    rows = [*results, *(result for curve in curves.values() for result in curve)]
    return {**about, **settings, "absent": absent, "results": [r.as_dict() for r in rows]}


@torch.inference_mode()
def _measure(
    options: argparse.Namespace, peers: Mapping[str, Peer]
) -> tuple[list[Result], dict[str, list[Result]]]:
    """Run what was asked for: the workloads, and the curves by name."""
    table = Table([*peers, INDEX_COPY])
    clock = partial(interleaved_samples, samples=options.samples, flush=Flusher())
    print(table.header())

    def rows(measure: Callable[..., Result], workloads: Iterable[Workload]) -> list[Result]:
        found = []
        for workload in workloads:
            result = measure(workload, peers, options.block_size, clock)
            print("\n".join([*table.rows(result), *notes(result)]), flush=True)
            found.append(result)
        return found

    def is_chosen(name: str) -> bool:
        return options.only is None or name in options.only

    results = rows(measure_attention, [w for w in WORKLOADS if is_chosen(w.name)])
    results += rows(measure_write, [w for w in WRITES if is_chosen(w.name)])
    curves = {name: curve for name, curve in CURVES.items() if is_chosen(name)}
    return results, {name: rows(measure_attention, curve) for name, curve in curves.items()}


def _draw(folder: Path, results: Sequence[Result], curves: Mapping[str, Sequence[Result]]) -> None:
    """Write a picture of the workloads, and one of the curves."""
    if find_spec("matplotlib") is None:
        print("\nno pictures: matplotlib is missing; install paged-ops[plots]")
        return
    folder.mkdir(parents=True, exist_ok=True)
    if results:
        draw_workloads(folder / "attention.png", results)
    if curves:
        draw_curves(folder / "attention-cost.png", curves)
