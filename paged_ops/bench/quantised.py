"""``python -m paged_ops.bench quantised``: decode over 8-bit caches, and over latent rows (MLA).

Beside ours stand the 8-bit caches of the peers that have some, and their kernels for latent rows,
each compared with our bfloat16 first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops import PagedKVCache, write_kv
from paged_ops.bench.attention.limits import readings
from paged_ops.bench.attention.machine import describe
from paged_ops.bench.attention.measure import disagreement, present
from paged_ops.bench.peers import PEERS, Latent, Unsupported
from paged_ops.bench.timing import Flusher, Samples, interleaved_samples, median_ratio
from paged_ops.bench.workloads import HEAD_DIM, WORKLOADS, Inputs, Workload, scattered_tables

DECODES = ("D1-bf16", "D2", "D3", "D4")
CACHE_DTYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
LATENT_DIM, LATENT_DIM_V = 576, 512
LATENT_HEADS = (16, 128)
LATENT_LENS = (4096,) * 8
"""Tokens of each sequence whose latent rows are attended to."""
CASES = (*DECODES, *(f"MLA-{num_heads}" for num_heads in LATENT_HEADS))

LEGEND = """\
bfloat16 queries; ours has one scale per token and head. "ms" and all that follows from it are of
calls after a flush of the caches, "warm" of calls in a row. "speed" is our bfloat16's time over the
row's, "bytes" the row's over bfloat16's, "% limit" the time of reading the same blocks in the order
of the tables over the row's."""

# How far a row of a peer's may be from that of our bfloat16, as a share of its length. float8 has 3
# bits behind the point.
_TOLERANCE = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--samples", type=int, default=9, help="timed calls of each candidate")
    parser.add_argument("--block-size", type=int, default=32, help="tokens per block")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CASES, help=", ".join(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


@dataclass(frozen=True)
class Timed:
    """A call, and the bytes of the pool that it reads once: elements and scales."""

    call: Callable[[], Any]
    num_bytes: float


Made = tuple[dict[str, Timed], dict[str, Callable[[], object]], dict[str, str]]
"""What is timed, by cache; the reading of blocks; why a peer isn't timed."""


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time each decode workload over each cache, then MLA, each beside its limit."""
    about = describe()
    print(f"{about['machine']}, {about['threads']} threads, {about['date']}")
    print(f"CPU variant {about['cpu_isa']}, block size {options.block_size}\n")
    print(f"{LEGEND}\n")
    columns = f"{'warm':>8} {'GB/s':>6} {'speed':>6} {'bytes':>6} {'% limit':>8}"
    print(f"{'workload':10} {'cache':15} {'ms':>8} {columns}")
    flush, rows = Flusher(), []
    cases = {w.name: partial(_decode, w) for w in WORKLOADS if w.name in DECODES}
    cases |= {f"MLA-{num_heads}": partial(_latent, num_heads) for num_heads in LATENT_HEADS}
    for name, make in cases.items():
        if options.only is not None and name not in options.only:
            continue
        timed, limits, notes = make(options.block_size)
        calls = {cache: each.call for cache, each in timed.items()}
        samples = interleaved_samples(calls | limits, options.samples, flush)
        rows += _report(name, timed, samples, notes)
    settings = {"block_size": options.block_size, "samples": options.samples}
    return {**about, **settings, "results": rows}


def _report(
    name: str, timed: dict[str, Timed], samples: dict[str, Samples], notes: dict[str, str]
) -> list[dict[str, Any]]:
    """Print the rows of a workload, and return them."""
    base = next(iter(timed))
    rows = []
    for cache, each in timed.items():
        cold, limit = samples[cache].cold, samples.get(f"reading {cache}")
        took = statistics.median(cold)
        figures = {
            "seconds": took,
            "warm_seconds": statistics.median(samples[cache].warm),
            "GB/s": each.num_bytes / took / 1e9,
            "speed": median_ratio(samples[base].cold, cold),
            "bytes": each.num_bytes / timed[base].num_bytes,
        }
        share = None if limit is None else median_ratio(limit.cold, cold)
        percent = "-" if share is None else f"{100 * share:.0f}"
        print(
            f"{name:10} {cache:15} {1e3 * took:8.3f} {1e3 * figures['warm_seconds']:8.3f} "
            f"{figures['GB/s']:6.1f} {figures['speed']:6.2f} {figures['bytes']:6.2f} {percent:>8}",
            flush=True,
        )
        row = {"workload": name, "cache": cache, **figures, "share_of_limit": share}
        rows.append({**row, "samples": asdict(samples[cache])})
    for cache, reason in notes.items():
        print(f"  {cache} not timed: {reason}", flush=True)
        rows.append({"workload": name, "cache": cache, "not_timed": reason})
    return rows


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Pools = Iterator[tuple[str, Tensor, Tensor, Any, int]]
"""Name, caches and scales of pools with the same contents, and the bytes of a token in each."""

Peers = Iterator[tuple[str, Callable[[], Callable[[], Any]], float]]
"""Name, what makes the call, and the bytes of a token in a peer's cache."""


def _decode(workload: Workload, block_size: int) -> Made:
    """Return the calls over each cache dtype, and the reading of their blocks."""

    def pools(num_blocks: int) -> Pools:
        for dtype in CACHE_DTYPES:
            shape = 1, num_blocks, block_size, workload.num_kv_heads, HEAD_DIM
            pool = PagedKVCache(*shape, torch.bfloat16, cache_dtype=dtype)
            element = dtype.itemsize * 2 * HEAD_DIM + (8 if dtype.itemsize == 1 else 0)
            num_bytes = workload.num_kv_heads * element
            yield _name(dtype), *pool.layer(0), pool.scales(0), num_bytes

    query = torch.randn(len(workload.seq_lens), workload.num_heads, HEAD_DIM).bfloat16()

    def peers(key_cache: Tensor, value_cache: Tensor, tables: Tensor, seq_lens: Tensor) -> Peers:
        starts = torch.arange(len(query) + 1, dtype=torch.int32)
        inputs = Inputs(workload, query, key_cache, value_cache, tables, seq_lens, starts)
        for name, peer in present(PEERS)[0].items():
            for dtype, cache in peer.quantised.items():
                num_bytes = workload.num_kv_heads * cache.bytes_per_row
                yield f"{name} {dtype}", partial(cache.attention, inputs), num_bytes

    return _candidates(query, workload.seq_lens, block_size, pools, peers)


def _latent(num_heads: int, block_size: int) -> Made:
    """Return the same over latent rows: one KV head, values the begin of its keys."""

    def pools(num_blocks: int) -> Pools:
        for dtype in CACHE_DTYPES[:2]:
            latent = torch.zeros(num_blocks, block_size, 1, LATENT_DIM, dtype=dtype)
            scale = None if dtype == torch.bfloat16 else torch.zeros(latent.shape[:3])
            scales = {"key_scale": scale, "value_scale": scale}
            element = dtype.itemsize * LATENT_DIM + (0 if scale is None else 4)
            yield _name(dtype), latent, latent[..., :LATENT_DIM_V], scales, element

    query = torch.randn(len(LATENT_LENS), num_heads, LATENT_DIM).bfloat16()

    def peers(key_cache: Tensor, value_cache: Tensor, tables: Tensor, seq_lens: Tensor) -> Peers:
        rows = Latent(query, key_cache, LATENT_DIM_V, tables, seq_lens)
        for name, peer in present(PEERS)[0].items():
            if peer.latent is not None:
                yield f"{name} bfloat16", partial(peer.latent, rows), 2 * LATENT_DIM

    return _candidates(query, LATENT_LENS, block_size, pools, peers)


def _candidates(
    query: Tensor,
    lens: tuple[int, ...],
    block_size: int,
    pools: Callable[[int], Pools],
    peers: Callable[[Tensor, Tensor, Tensor, Tensor], Peers],
) -> Made:
    """Fill each pool; return a call over it and the reading of its blocks, and the peers' calls."""
    tables = scattered_tables(lens, block_size)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    attention: Any = torch.ops.paged.attention.default
    timed: dict[str, Timed] = {}
    limits: dict[str, Callable[[], object]] = {}
    offered: Peers = iter(())
    for name, key_cache, value_cache, scales, num_bytes in pools(int((tables >= 0).sum())):
        _fill(key_cache, value_cache, scales)
        call = partial(attention, query, key_cache, value_cache, tables, seq_lens, **scales)
        timed[name] = Timed(call, sum(lens) * num_bytes)
        limits |= readings(key_cache, {f"reading {name}": tables})
        if len(timed) == 1:
            offered = peers(key_cache, value_cache, tables, seq_lens)
    expected, notes = next(iter(timed.values())).call(), {}
    for name, make, row_bytes in offered:
        try:
            peer = make()
        except Unsupported as reason:
            notes[name] = str(reason)
            continue
        wrong = disagreement(peer(), expected, _TOLERANCE)
        if wrong is None:
            timed[name] = Timed(peer, sum(lens) * row_bytes)
        else:
            notes[name] = wrong
    return timed, limits, notes


def _fill(key_cache: Tensor, value_cache: Tensor, scales: Any) -> None:
    """Write normal keys and values everywhere, a part at a time: the same into every pool."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1024, num_kv_heads, head_dim, generator=generator).bfloat16()
    for slots in torch.arange(num_blocks * block_size).split(len(rows)):
        keys = rows[: len(slots)]
        values = keys[..., : value_cache.shape[3]]
        write_kv(keys, values, key_cache, value_cache, slots, **scales)
