"""Calls in the form that the driver reads, and their results."""

from __future__ import annotations

import math
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.checks import same_bits
from tests.support.quantisation import CACHE_DTYPES
from tests.support.sequences import DTYPES, PagedCase

State = tuple[Tensor, Tensor]
Results = tuple[Tensor, ...]

_ATTENTION, _WRITE_KV, _GATHER_KV, _MERGE_STATES = range(4)


@dataclass(frozen=True)
class Call:
    """One call: what the driver reads, the shapes and dtypes of the results, and the op's own."""

    text: bytes
    results: tuple[tuple[Sequence[int], torch.dtype], ...]
    by_op: Callable[[], Results]


@dataclass(frozen=True)
class Pool:
    """Contiguous caches, and the scales by name that a quantised one has."""

    key_cache: Tensor
    value_cache: Tensor
    scales: dict[str, Tensor]

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.key_cache, self.value_cache

    def clone(self) -> Pool:
        scales = {name: scale.clone() for name, scale in self.scales.items()}
        return Pool(self.key_cache.clone(), self.value_cache.clone(), scales)


def attention(case: PagedCase, num_threads: int = 1) -> Call:
    """Describe a call of ``attention_with_lse``."""
    known = {"scale", "causal", "sliding_window", "softcap", "alibi_slopes", "sinks"}
    known |= {"key_scale", "value_scale", "tree_mask"}
    options = case.options
    assert set(options) <= known
    num_tokens, num_heads, head_dim = case.query.shape
    scale = options.get("scale")
    text = struct.pack(
        "=6q2d",
        _ATTENTION,
        DTYPES.index(case.query.dtype),
        (DTYPES + CACHE_DTYPES).index(case.key_cache.dtype),
        num_threads,
        options.get("causal", True),
        options.get("sliding_window") or 0,
        head_dim**-0.5 if scale is None else scale,
        options.get("softcap", 0.0),
    )
    assert case.query_start_loc is not None
    query, key_cache, value_cache, *index = case.tensors
    tensors = [*_pool_tensors(Pool(key_cache, value_cache, options)), query, *index]
    tensors += [options.get(name) for name in ("alibi_slopes", "sinks", "tree_mask")]
    output = (num_tokens, num_heads, case.value_cache.shape[3]), case.query.dtype
    lse = (num_tokens, num_heads), torch.float32

    def by_op() -> Results:
        results = case.run()
        without_lse = torch.ops.paged.attention(*case.tensors, **options)
        assert same_bits(without_lse, results[0])
        return results

    return Call(text + _pack(tensors), (output, lse), by_op)


def write_kv(key: Tensor, value: Tensor, pool: Pool, slots: Tensor, num_threads: int = 1) -> Call:
    """Describe a call of ``write_kv``; its results are the pool's caches and its flat scales."""
    tensors = _pool_tensors(pool)
    text = struct.pack(
        "=5q",
        _WRITE_KV,
        DTYPES.index(key.dtype),
        (DTYPES + CACHE_DTYPES).index(pool.key_cache.dtype),
        num_threads,
        any(scale.dim() == 3 for scale in pool.scales.values()),
    )
    caches = tuple((cache.shape, cache.dtype) for cache in pool.caches)
    scales = tuple(((scale.untyped_storage().nbytes() // 4,), scale.dtype) for scale in tensors[2:])

    def by_op() -> Results:
        written = pool.clone()
        torch.ops.paged.write_kv(key, value, *written.caches, slots, **written.scales)
        return *written.caches, *(scale.flatten() for scale in written.scales.values())

    return Call(text + _pack([*tensors, key, value, slots]), caches + scales, by_op)


def gather_kv(pool: Pool, block_tables: Tensor, seq_lens: Tensor, num_threads: int = 1) -> Call:
    """Describe a call of ``gather_kv`` from a quantised pool."""
    num_tokens, num_kv_heads = int(seq_lens.sum()), pool.key_cache.shape[2]
    text = struct.pack(
        "=5q",
        _GATHER_KV,
        DTYPES.index(torch.float32),
        (DTYPES + CACHE_DTYPES).index(pool.key_cache.dtype),
        num_threads,
        num_tokens,
    )
    index = block_tables, seq_lens
    return Call(
        text + _pack([*_pool_tensors(pool), *index]),
        tuple(((num_tokens, num_kv_heads, cache.shape[3]), torch.float32) for cache in pool.caches),
        lambda: torch.ops.paged.gather_kv(*pool.caches, *index, **pool.scales),
    )


def merge_states(a: State, b: State, num_threads: int = 1) -> Call:
    """Describe a call of ``merge_states``."""
    text = struct.pack("=3q", _MERGE_STATES, DTYPES.index(a[0].dtype), num_threads)
    results = (a[0].shape, a[0].dtype), (a[1].shape, a[1].dtype)
    return Call(text + _pack([*a, *b]), results, lambda: torch.ops.paged.merge_states(*a, *b))


def run(command: Sequence[str], calls: Sequence[Call], isa: str) -> tuple[str, list[Results]]:
    """Run the driver by a command, under the cap ``isa``.

    Returns the ISA variant that it chose, and the results of each call.
    """
    result = subprocess.run(
        command,
        input=b"".join(call.text for call in calls),
        env=os.environ | {"PAGED_CPU_ISA": isa},
        stdout=subprocess.PIPE,
        check=True,
    )
    chosen, rest = result.stdout[:16].rstrip(b"\0").decode(), bytearray(result.stdout[16:])
    made = []
    for call in calls:
        tensors = []
        for shape, dtype in call.results:
            size = math.prod(shape) * dtype.itemsize
            tensors.append(torch.frombuffer(rest[:size], dtype=torch.uint8).view(dtype).view(shape))
            rest = rest[size:]
        made.append(tuple(tensors))
    assert not rest
    return chosen, made


def _pool_tensors(pool: Pool) -> list[Tensor | None]:
    """Return the caches and their scales, viewed as one per token and head."""
    tensors: list[Tensor | None] = [*pool.caches]
    for name in ("key_scale", "value_scale"):
        scale = pool.scales.get(name, torch.ones(()))
        if pool.key_cache.dtype not in CACHE_DTYPES:
            tensors.append(None)
        else:
            tensors.append(scale if scale.dim() == 3 else scale.expand(pool.key_cache.shape[:3]))
    return tensors


def _pack(tensors: Sequence[Tensor | None]) -> bytes:
    return b"".join(_pack_one(tensor) for tensor in tensors)


def _pack_one(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return struct.pack("=10q", *[0] * 10)
    unused = [0] * (4 - tensor.dim())
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    offset = tensor.storage_offset() * tensor.element_size()
    header = struct.pack(
        "=10q", *tensor.shape, *unused, *tensor.stride(), *unused, offset, storage.numel()
    )
    return header + storage.numpy().tobytes()
