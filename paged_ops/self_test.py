"""A quick check of an installation: every op on small inputs, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import functional, reference
from paged_ops.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 32, 6, 2, 24
SEQ_LENS, QUERY_LENS = (37, 1, 0, 12), (5, 1, 0, 12)


class Finding(NamedTuple):
    """How far one op was from the reference.

    Attributes
    ----------
    name : str
        The op and the dtype, of the caches where it has any.
    error : float
        The largest difference, relative to the largest element of the reference; inf if the
        shapes differ, or where there is a NaN.
    bound : float
        What it may be.
    """

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound


def self_test() -> Iterator[Finding]:
    """Run every op on the CPU on every dtype, and compare it with `reference` in float64.

    Yields
    ------
    Finding
        One for each op and dtype.

    Examples
    --------
    >>> all(finding.passed for finding in self_test())
    True
    """
    for dtype in (*FLOAT_DTYPES, *QUANTISED_DTYPES):
        for name, results in CHECKS.items():
            if name == "merge_states" and dtype in QUANTISED_DTYPES:
                continue
            got, want = (
                results(ops, dtype, torch.Generator().manual_seed(0))
                for ops in (functional, reference)
            )
            error = max(map(_error, got, want))
            bound = 0.0 if name in MOVES else _rounding(dtype)
            yield Finding(f"{name}, {str(dtype).removeprefix('torch.')}", error, bound)


MOVES = ("write_kv", "copy_blocks", "gather_kv")
"""The ops that move elements and change none."""


def _rounding(dtype: torch.dtype) -> float:
    """Return what an op that computes may be off by: float32 sums come in another order."""
    dtype = _row_dtype(dtype)
    return 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


def _row_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of query, key and value for a cache."""
    return torch.float32 if dtype in QUANTISED_DTYPES else dtype


# Each of these runs an op of `functional` or of `reference` on random numbers, and returns what it
# gave. The reference computes in the dtype of its arguments: it gets them in float64.


def _attention(ops: Any, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Run a mixed batch with every option."""
    caches, scales = _pool(dtype, generator)
    query = _normal(_row_dtype(dtype), generator, sum(QUERY_LENS), NUM_HEADS, HEAD_DIM)
    query = _exact(ops, query)
    if not scales:
        caches = [_exact(ops, cache) for cache in caches]
    index = _block_tables(generator), _int32(*SEQ_LENS), _int32(0, *QUERY_LENS).cumsum(0).int()
    per_head = _normal(torch.float32, generator, NUM_HEADS)
    tree_mask = _normal(torch.float32, generator, sum(QUERY_LENS), max(QUERY_LENS)) > 0
    results: list[Tensor] = []
    options: dict[str, Any]
    for options in (
        {},
        {"causal": False, "scale": 0.3},
        {"tree_mask": tree_mask},
        {"sliding_window": 5, "softcap": 3.0, "alibi_slopes": per_head.abs(), "sinks": per_head},
    ):
        results += ops.attention_with_lse(query, *caches, *index, **options, **scales)
    return results


def _merge_states(ops: Any, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    outs = _exact(ops, _normal(dtype, generator, 2, 5, NUM_HEADS, HEAD_DIM))
    lses = _normal(torch.float32, generator, 2, 5, NUM_HEADS)
    return list(ops.merge_states(outs[0], lses[0], outs[1], lses[1]))


def _write_kv(ops: Any, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    rows = _normal(_row_dtype(dtype), generator, 2, 5, NUM_KV_HEADS, HEAD_DIM)
    slots = torch.tensor([9, -1, 0, NUM_BLOCKS * BLOCK_SIZE - 1, 2])
    caches, scales = _pool(dtype, generator)
    ops.write_kv(*rows, *caches, slots, **scales)
    return [*caches, *scales.values()]


def _copy_blocks(ops: Any, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    caches, scales = _pool(dtype, generator)
    mapping = torch.tensor([[0, 1], [1, 0], [NUM_BLOCKS - 1, 7]])
    ops.copy_blocks(*caches, mapping, **scales)
    return [*caches, *scales.values()]


def _gather_kv(ops: Any, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    caches, scales = _pool(dtype, generator)
    return list(ops.gather_kv(*caches, _block_tables(generator), _int32(*SEQ_LENS), **scales))


CHECKS: dict[str, Callable[[Any, torch.dtype, torch.Generator], list[Tensor]]] = {
    "attention": _attention,
    "merge_states": _merge_states,
    "write_kv": _write_kv,
    "copy_blocks": _copy_blocks,
    "gather_kv": _gather_kv,
}


def _exact(ops: Any, tensor: Tensor) -> Tensor:
    return tensor.double() if ops is reference else tensor


def _pool(dtype: torch.dtype, generator: torch.Generator) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the caches of a pool, and the scales per token that quantised ones have."""
    shape = NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS
    rows = _normal(torch.float32, generator, 2, *shape, HEAD_DIM)
    if dtype not in QUANTISED_DTYPES:
        return list(rows.to(dtype).unbind(0)), {}
    key_scale, value_scale = _normal(torch.float32, generator, 2, *shape).abs() / 20
    elements = (20 * rows).to(dtype).unbind(0)
    return list(elements), {"key_scale": key_scale, "value_scale": value_scale}


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest finite element."""
    if got.shape != want.shape:
        return float("inf")
    got, want = got.double(), want.double()
    difference = (got - want).where(got != want, 0.0)  # equal infinities differ by NaN
    scale = want.where(want.isfinite(), 0.0).abs().max()
    return float(difference.abs().nan_to_num(nan=torch.inf).max() / scale)


def _block_tables(generator: torch.Generator) -> Tensor:
    """Return a table of distinct blocks for the sequences."""
    width = -(-max(SEQ_LENS) // BLOCK_SIZE)
    blocks = torch.stack(
        [torch.randperm(NUM_BLOCKS, generator=generator)[:width] for _ in SEQ_LENS]
    )
    return blocks.to(torch.int32)


def _normal(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu").to(dtype)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
