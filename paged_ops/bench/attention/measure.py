"""Timing one workload: ours, every peer that gives the same result, and the limits, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.attention.limits import fastest_unit, limits
from paged_ops.bench.attention.result import OURS, Result
from paged_ops.bench.peers import Call, Peer, Unsupported
from paged_ops.bench.timing import Samples
from paged_ops.bench.workloads import Inputs, Workload, make_inputs

Clock = Callable[[dict[str, Callable[[], object]]], dict[str, Samples]]
"""Times calls in rotation."""

INDEX_COPY = "index_copy"
"""What torch itself writes a cache with."""

# How far a row may be from ours, as a share of its length: several times the rounding of K and V.
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


def present(peers: Mapping[str, Peer]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can serve here, and for each of the others why it can't."""
    absences = {name: peer.absence() for name, peer in peers.items()}
    absent = {name: reason for name, reason in absences.items() if reason is not None}
    return {name: peer for name, peer in peers.items() if name not in absent}, absent


def measure_attention(
    workload: Workload, peers: Mapping[str, Peer], block_size: int, clock: Clock
) -> Result:
    """Time attention. A peer whose result differs from ours is reported, not timed."""
    inputs = make_inputs(workload, block_size)
    calls, notes = checked(inputs, peers)
    result = _timed(workload, {OURS: ours(inputs), **calls}, limits(inputs), notes, clock)
    result.kernels = _kernels(inputs, {name: peers[name] for name in calls})
    unit = fastest_unit(workload.dtype)
    if unit is not None:
        result.kernels["unit"] = unit[0]
    return result


def measure_write(
    workload: Workload, peers: Mapping[str, Peer], block_size: int, clock: Clock
) -> Result:
    """Time writing K and V into the pool, against torch, the peers that write and a plain copy."""
    inputs = make_inputs(workload, block_size)
    writers = {name: peer.write for name, peer in peers.items() if peer.write is not None}
    agreeing, notes = checked(inputs, {name: peers[name] for name in writers})
    made = {name: writers[name](inputs) for name in agreeing}
    key, value = inputs.gathered()
    target = torch.empty_like(key), torch.empty_like(value)
    copy = {"copy": lambda: (target[0].copy_(key), target[1].copy_(value))}
    torch_writes = {INDEX_COPY: _index_copy(inputs, key, value)}
    mine = {OURS: _our_write(inputs, key, value)}
    result = _timed(workload, {**mine, **torch_writes, **made}, copy, notes, clock)
    result.is_write = True
    result.kernels = _kernels(inputs, {name: peers[name] for name in made})
    return result


def _kernels(inputs: Inputs, peers: Mapping[str, Peer]) -> dict[str, str]:
    """Return which of its kernels each peer took, if it has several."""
    return {name: peer.kernel(inputs) for name, peer in peers.items() if peer.kernel is not None}


def ours(inputs: Inputs) -> Call:
    """Return a call of ``torch.ops.paged.attention``."""
    caches, attention = (inputs.key_cache, inputs.value_cache), torch.ops.paged.attention.default
    index = inputs.block_tables, inputs.seq_lens, inputs.query_start_loc
    call: Call = partial(attention, inputs.query, *caches, *index)
    return call


def checked(inputs: Inputs, peers: Mapping[str, Peer]) -> tuple[dict[str, Call], dict[str, str]]:
    """Make the calls of the peers whose results agree with ours; say what is wrong with others."""
    expected = ours(inputs)()
    tolerance = _TOLERANCES[inputs.workload.dtype]
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for name, peer in peers.items():
        try:
            call = peer.attention(inputs)
        except Unsupported as reason:
            notes[name] = str(reason)
            continue
        wrong = disagreement(call(), expected, tolerance)
        if wrong is None:
            calls[name] = call
        else:
            notes[name] = wrong
    return calls, notes


def disagreement(result: Any, expected: Any, tolerance: float) -> str | None:
    """Say by how much a row differs from ours, if that is more than a share of its length."""
    error = _distance(_rows(result), _rows(expected))
    if error <= tolerance:  # which NaN is not
        return None
    return f"wrong: differs from ours by {error:.2g} of a row, limit {tolerance}"


def _rows(result: Any) -> Tensor:
    rows: Tensor = result if isinstance(result, Tensor) else torch.cat(list(result))
    return rows.float()


def _distance(result: Tensor, expected: Tensor) -> float:
    """Return the largest distance between rows, as a share of the expected row's length."""
    return float(((result - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _our_write(inputs: Inputs, key: Tensor, value: Tensor) -> Callable[[], object]:
    caches, write_kv = (inputs.key_cache, inputs.value_cache), torch.ops.paged.write_kv.default
    return partial(write_kv, key, value, *caches, inputs.slots())


def _index_copy(inputs: Inputs, key: Tensor, value: Tensor) -> Callable[[], object]:
    """Return a call that copies rows into caches ``[slots, heads, head_dim]`` by their index."""
    slots = inputs.slots()
    num_blocks, block_size = inputs.key_cache.shape[:2]
    caches = torch.zeros(2, num_blocks * block_size, *key.shape[1:], dtype=key.dtype)
    return lambda: (caches[0].index_copy_(0, slots, key), caches[1].index_copy_(0, slots, value))


def _timed(
    workload: Workload,
    calls: Mapping[str, Callable[[], object]],
    bounds: Mapping[str, Callable[[], object]],
    notes: dict[str, str],
    clock: Clock,
) -> Result:
    times = clock({**calls, **bounds})
    samples = {name: times[name] for name in calls}
    return Result(workload, samples, {name: times[name] for name in bounds}, notes)
