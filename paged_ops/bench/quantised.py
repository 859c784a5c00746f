"""``python -m paged_ops.bench quantised``: decode over 8-bit caches, and over latent rows (MLA)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops import PagedKVCache, write_kv
from paged_ops.bench.attention.limits import readings
from paged_ops.bench.attention.machine import describe
from paged_ops.bench.timing import Flusher, interleaved_medians
from paged_ops.bench.workloads import HEAD_DIM, WORKLOADS, Workload, scattered_tables

DECODES = ("D1-bf16", "D2", "D3", "D4")
CACHE_DTYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
LATENT_DIM, LATENT_DIM_V = 576, 512
LATENT_HEADS = (16, 128)
LATENT_LENS = (4096,) * 8
"""Tokens of each sequence whose latent rows are attended to."""

LEGEND = """\
bfloat16 queries; one scale per token and head. "speed" is bfloat16's time over the row's, "bytes"
the row's over bfloat16's, "% limit" the time of reading the same blocks in the order of the tables
over the row's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--samples", type=int, default=9, help="timed calls of each candidate")
    parser.add_argument("--block-size", type=int, default=32, help="tokens per block")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


@dataclass(frozen=True)
class Timed:
    """A call, and the bytes of the pool that it reads once: elements and scales."""

    call: Callable[[], object]
    num_bytes: int


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time each decode workload over each cache dtype, then MLA, each beside its limit."""
    about = describe()
    print(f"{about['machine']}, {about['threads']} threads, {about['date']}")
    print(f"CPU variant {about['cpu_isa']}, block size {options.block_size}\n")
    print(f"{LEGEND}\n")
    columns = f"{'speed':>6} {'bytes':>6} {'% limit':>8}"
    print(f"{'workload':10} {'cache':14} {'ms':>8} {'GB/s':>6} {columns}")
    flush, rows = Flusher(), []
    cases = {w.name: partial(_decode, w) for w in WORKLOADS if w.name in DECODES}
    cases |= {f"MLA {num_heads}": partial(_latent, num_heads) for num_heads in LATENT_HEADS}
    for name, make in cases.items():
        timed, limits = make(options.block_size)
        calls = {cache: each.call for cache, each in timed.items()}
        seconds = interleaved_medians(calls | limits, options.samples, flush)
        rows += _report(name, timed, seconds)
    settings = {"block_size": options.block_size, "samples": options.samples}
    return {**about, **settings, "results": rows}


def _report(name: str, timed: dict[str, Timed], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Print the rows of a workload, and return them."""
    base = next(iter(timed))
    rows = []
    for cache, each in timed.items():
        took, limit = seconds[cache], seconds.get(f"reading {cache}")
        figures = {
            "seconds": took,
            "GB/s": each.num_bytes / took / 1e9,
            "speed": seconds[base] / took,
            "bytes": each.num_bytes / timed[base].num_bytes,
        }
        share = None if limit is None else limit / took
        percent = "-" if share is None else f"{100 * share:.0f}"
        print(
            f"{name:10} {cache:14} {1e3 * took:8.2f} {figures['GB/s']:6.1f} "
            f"{figures['speed']:6.2f} {figures['bytes']:6.2f} {percent:>8}",
            flush=True,
        )
        rows.append({"workload": name, "cache": cache, **figures, "share_of_limit": share})
    return rows


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Pools = Iterator[tuple[str, Tensor, Tensor, Any, int]]
"""Name, caches and scales of pools with the same contents, and the bytes of a token in each."""


def _decode(workload: Workload, block_size: int) -> tuple[dict[str, Timed], dict[str, Any]]:
    """Return the calls over each cache dtype, and the reading of their blocks."""

    def pools(num_blocks: int) -> Pools:
        for dtype in CACHE_DTYPES:
            shape = 1, num_blocks, block_size, workload.num_kv_heads, HEAD_DIM
            pool = PagedKVCache(*shape, torch.bfloat16, cache_dtype=dtype)
            element = dtype.itemsize * 2 * HEAD_DIM + (8 if dtype.itemsize == 1 else 0)
            num_bytes = workload.num_kv_heads * element
            yield _name(dtype), *pool.layer(0), pool.scales(0), num_bytes

    query = torch.randn(len(workload.seq_lens), workload.num_heads, HEAD_DIM).bfloat16()
    return _candidates(query, workload.seq_lens, block_size, pools)


def _latent(num_heads: int, block_size: int) -> tuple[dict[str, Timed], dict[str, Any]]:
    """Return the same over latent rows: one KV head, values the begin of its keys."""

    def pools(num_blocks: int) -> Pools:
        for dtype in CACHE_DTYPES[:2]:
            latent = torch.zeros(num_blocks, block_size, 1, LATENT_DIM, dtype=dtype)
            scale = None if dtype == torch.bfloat16 else torch.zeros(latent.shape[:3])
            scales = {"key_scale": scale, "value_scale": scale}
            element = dtype.itemsize * LATENT_DIM + (0 if scale is None else 4)
            yield _name(dtype), latent, latent[..., :LATENT_DIM_V], scales, element

    query = torch.randn(len(LATENT_LENS), num_heads, LATENT_DIM).bfloat16()
    return _candidates(query, LATENT_LENS, block_size, pools)


def _candidates(
    query: Tensor, lens: tuple[int, ...], block_size: int, pools: Callable[[int], Pools]
) -> tuple[dict[str, Timed], dict[str, Any]]:
    """Fill each pool; return a call over it, and the reading of its blocks."""
    tables = scattered_tables(lens, block_size)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    attention: Any = torch.ops.paged.attention.default
    timed: dict[str, Timed] = {}
    limits: dict[str, Any] = {}
    for name, key_cache, value_cache, scales, num_bytes in pools(int((tables >= 0).sum())):
        _fill(key_cache, value_cache, scales)
        call = partial(attention, query, key_cache, value_cache, tables, seq_lens, **scales)
        timed[name] = Timed(call, sum(lens) * num_bytes)
        limits |= readings(key_cache, {f"reading {name}": tables})
    return timed, limits


def _fill(key_cache: Tensor, value_cache: Tensor, scales: Any) -> None:
    """Write normal keys and values everywhere, a part at a time: the same into every pool."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1024, num_kv_heads, head_dim, generator=generator).bfloat16()
    for slots in torch.arange(num_blocks * block_size).split(len(rows)):
        keys = rows[: len(slots)]
        values = keys[..., : value_cache.shape[3]]
        write_kv(keys, values, key_cache, value_cache, slots, **scales)
