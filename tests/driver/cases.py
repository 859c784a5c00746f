"""What the driver is given: every way through the kernels, in small."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.driver.calls import Pool, State
from tests.support.quantisation import QUANTISATIONS, Quantisation
from tests.support.sequences import (
    GARBAGE,
    Placement,
    Sequences,
    make_sequences,
    normal,
)
from tests.support.trees import tree_mask

# Two pieces of 512 keys and a rest; a partial tile; a sequence without keys.
DECODE_LENS = (1100, 37, 1, 0)
# Chunked prefill, prefill, and more queries than keys, with more rows than are scored at a time.
PREFILL_LENS, QUERY_LENS = (130, 45, 3), (41, 45, 5)
# Multiples of nothing, of what vectors hold, and an odd mix.
HEAD_DIMS = ((53, 37), (64, 64), (1, 130))


def attention_cases(dtype: torch.dtype) -> list[tuple[Sequences, Placement]]:
    """Return sequences, and how they lie in a pool with garbage wherever they don't."""
    made = []
    for head_dim, head_dim_v in HEAD_DIMS:
        shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "head_dim_v": head_dim_v}
        made.append(make_sequences(DECODE_LENS, dtype=dtype, **shape))
        made.append(make_sequences(PREFILL_LENS, QUERY_LENS, dtype=dtype, **shape))
    decode, prefill = made[:2]
    *options, together = each_option(shape["num_heads"])
    made += [prefill.with_options(**option) for option in options]
    made += [each.with_options(**together) for each in (decode, prefill)]
    for store in QUANTISATIONS:
        made += [replace(each, quantisation=store) for each in (decode, prefill)]
    made.append(prefill.with_options(tree_mask=tree_mask(QUERY_LENS)))
    # Scores so far apart that a weight overflows unless it is relative to the largest.
    made.append(make_sequences(PREFILL_LENS, QUERY_LENS, dtype=dtype, magnitude=8.0, **shape))
    placements = [
        Placement(block_size, layout, query_layout, garbage)
        for block_size, layout, query_layout in (
            (16, "HND", "contiguous"),
            (7, "slice", "slice"),
            (1, "NHD", "fused qkv"),
        )
        for garbage in GARBAGE
    ]
    return [(each, placements[i % len(placements)]) for i, each in enumerate(made)]


def each_option(num_heads: int) -> list[dict]:
    """Return the options one by one, then those that go together."""
    slopes = torch.linspace(0.01, 0.3, num_heads)
    options = [
        {"sliding_window": 20},
        {"alibi_slopes": slopes},
        {"softcap": 1.5},
        {"sinks": torch.linspace(-2.0, 3.0, num_heads)},
        {"causal": False},
        {"scale": -0.3},
    ]
    together: dict = {}
    for option in options[:4]:
        together |= option
    return [*options, together]


def long_sequences(dtype: torch.dtype) -> Sequences:
    """Return sequences that several threads cut, by rows and by pieces."""
    return make_sequences(
        (1100, 150), (2, 70), num_heads=4, num_kv_heads=1, head_dim=53, dtype=dtype
    )


def with_last_value(made: Sequences, value: float) -> Sequences:
    """Return sequences whose last value vectors are all ``value``, which few rows see."""
    values = tuple(values.clone() for values in made.values)
    for each in values:
        each[-1] = value
    return replace(made, values=values)


def states(dtype: torch.dtype) -> tuple[State, State]:
    """Return two states to merge, with rows that saw no key and hold NaN."""
    pair = []
    for seed in (0, 1):
        out = normal((9, 7, 53), dtype, seed)
        lse = normal((9, 7), torch.float32, seed + 2, magnitude=3.0)
        empty = normal((9, 7), torch.float32, seed + 4) > 0.5
        lse[empty], out[empty] = -math.inf, math.nan
        pair.append((out, lse))
    return pair[0], pair[1]


@dataclass(frozen=True)
class QuantisedRows:
    """New keys and values, the slots of a pool that they go to, and that pool before and after."""

    key: Tensor
    value: Tensor
    slots: Tensor
    empty: Pool
    written: Pool


def quantised_rows(dtype: torch.dtype) -> list[QuantisedRows]:
    """Return rows for every kind of quantised pool, in every width."""
    return [_rows(dtype, store, dims) for store in QUANTISATIONS for dims in HEAD_DIMS]


def _rows(dtype: torch.dtype, store: Quantisation, head_dims: tuple[int, int]) -> QuantisedRows:
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    slots[2] = -1
    key, value = (normal((24, 3, width), dtype, seed=width) for width in head_dims)
    for rows in (key, value):
        rows[3] = 0.0
        rows[7] *= 1000.0
        rows[5, 1, 0], rows[9, 0, -1] = math.inf, -math.inf
    pools = []
    for stored in (slots[:0], slots):
        caches, scales = [], {}
        for name, rows in (("key_scale", key), ("value_scale", value)):
            cache, scale = _stored(store, rows[: len(stored)], stored, rows.shape[2])
            caches.append(cache)
            if scale is not None:
                scales[name] = scale
        pools.append(Pool(*caches, scales))
    return QuantisedRows(key, value, slots, *pools)


def _stored(
    store: Quantisation, rows: Tensor, slots: Tensor, width: int
) -> tuple[Tensor, Tensor | None]:
    """Return the cache and the scales of a pool that holds just these rows."""
    shape = 6, 4, 3
    held = slots >= 0
    elements, row_scales = store.stored(rows)
    cache = torch.zeros(*shape, width, dtype=store.dtype)
    cache.view(torch.uint8).flatten(0, 1)[slots[held]] = elements.view(torch.uint8)[held]
    if store.granularity == "none":
        return cache, None
    if store.granularity != "token":
        return cache, store.fixed_scale(shape[2])
    scale = torch.full(shape, math.nan)
    scale.flatten(0, 1)[slots[held]] = row_scales[held]
    return cache, scale
