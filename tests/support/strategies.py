"""Hypothesis strategies for attention cases.

Hypothesis draws the shapes, the options and a seed; the values come from a seeded normal
generator, so shrinking works on what matters.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.quantisation import QUANTISATIONS
from tests.support.sequences import (
    CACHE_LAYOUTS,
    DTYPES,
    GARBAGE,
    QUERY_LAYOUTS,
    Placement,
    Sequences,
    make_sequences,
    normal,
)

# What `sequences` draws from; a device without kernels for quantised caches empties it.
drawn_quantisations = QUANTISATIONS
_SEEDS = st.integers(0, 2**16)
_GROUPS = (1, 2, 3, 4, 7, 8, 71)
_HEAD_DIMS = (8, 16, 32, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512, 576, 9, 17, 33, 65, 127, 255)
_BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 24, 32, 64, 128, 256)
# Lengths on both sides of where blocks, tiles and KV splits may end.
_LENGTHS_AT_EDGES = tuple(edge + d for edge in (16, 64, 128, 512, 1024) for d in (-1, 0, 1))


def placements(**fixed: Any) -> st.SearchStrategy[Placement]:
    """Strategy for placements; keyword arguments fix fields."""
    fields: dict[str, st.SearchStrategy[Any]] = {
        "block_size": st.sampled_from(_BLOCK_SIZES),
        "cache_layout": st.sampled_from(CACHE_LAYOUTS),
        "query_layout": st.sampled_from(QUERY_LAYOUTS),
        "garbage": st.sampled_from(GARBAGE),
        "spare_blocks": st.integers(0, 3),
        "spare_columns": st.integers(0, 3),
        "seed": _SEEDS,
    }
    fields.update({name: st.just(value) for name, value in fixed.items()})
    return st.builds(Placement, **fields)


@st.composite
def attention_options(draw: st.DrawFn, num_heads: int, *, causal: bool | None = None) -> dict:
    """Draw options for attention, each of them off in many examples."""
    options: dict[str, Any] = {"causal": draw(st.booleans()) if causal is None else causal}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.2, 0.05, 0.3]))
    if draw(st.booleans()):
        options["sliding_window"] = draw(
            st.one_of(st.integers(1, 8), st.sampled_from([20, 64, 65, 500, 600, 2**40]))
        )
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    if draw(st.booleans()):
        slopes = normal((num_heads,), torch.float32, draw(_SEEDS), 0.2)
        options["alibi_slopes"] = slopes.abs() if draw(st.booleans()) else slopes
    if draw(st.booleans()):
        options["sinks"] = normal((num_heads,), torch.float32, draw(_SEEDS), 2.0)
    return options


@st.composite
def sequences(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    causal: bool | None = None,
    options: bool = True,
    min_batch: int = 0,
    max_batch: int = 4,
    min_query_len: int = 0,
) -> Sequences:
    """Draw ragged sequences of every shape, with options.

    The lengths are limited so that one example costs milliseconds in the reference.
    """
    num_kv_heads = draw(st.sampled_from([1, 1, 2, 3, 4]))
    group = draw(st.sampled_from(_GROUPS))
    head_dim = draw(st.sampled_from(_HEAD_DIMS))
    head_dim_v = draw(st.one_of(st.just(head_dim), st.sampled_from(_HEAD_DIMS)))
    num_heads = num_kv_heads * group

    longest = max(70, min(1100, 300_000 // (num_kv_heads * (head_dim + head_dim_v))))
    lengths = st.one_of(
        st.just(0),
        st.integers(1, 40),
        st.sampled_from([length for length in _LENGTHS_AT_EDGES if length <= longest]),
        st.integers(1, longest),
    )
    batch = draw(st.integers(min_batch, max_batch))
    seq_lens = [draw(lengths) for _ in range(batch)]
    query_lens = [draw(_query_lengths(length, num_heads, min_query_len)) for length in seq_lens]
    return make_sequences(
        seq_lens,
        query_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=draw(st.sampled_from(dtypes)),
        magnitude=draw(st.sampled_from([0.1, 1.0, 1.0, 3.0])),
        seed=draw(_SEEDS),
        quantisation=draw(st.sampled_from((None,) * 8 + drawn_quantisations)),
        **(draw(attention_options(num_heads, causal=causal)) if options else {}),
    )


def _query_lengths(seq_len: int, num_heads: int, least: int) -> st.SearchStrategy[int]:
    """Strategy: decode, a few, a chunk, the whole prompt, or more queries than keys."""
    most = 48 if num_heads * seq_len < 4000 else 12
    kinds = [st.just(1), st.integers(least, 6), st.integers(1, most)]
    if seq_len <= most:
        kinds.append(st.just(max(seq_len, least)))
        kinds.append(st.integers(seq_len + 1, seq_len + 5))
    return st.one_of(kinds)


@st.composite
def article_sequences(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Sequences:
    """Draw decode steps with the article's shapes: one query per sequence, no options."""
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    head_dim = draw(st.sampled_from([32, 64, 80, 96, 128]))
    batch = draw(st.integers(1, 6))
    longest = 100_000 // (num_kv_heads * head_dim)
    lengths = st.one_of(st.integers(1, 40), st.integers(1, longest))
    return make_sequences(
        [draw(lengths) for _ in range(batch)],
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4, 7, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(_SEEDS),
    )
