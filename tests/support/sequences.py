"""Attention cases, built in two steps.

`Sequences` is what is attended over: queries, keys, values and options, free of any paging.
`place` cuts it into the blocks of a pool, in a `Placement`: a block size, a layout in memory, a
random order of blocks, and garbage wherever nothing may be read. A property then says that two
placements, or two ways of cutting the same sequences into calls, agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paged_ops import reference
from tests.support.quantisation import Quantisation

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_LAYOUTS = (
    "NHD",
    "HND",
    "article NHD",
    "article HND",
    "keys then values",
    "slice",
    "joined heads",
)
QUERY_LAYOUTS = ("contiguous", "fused qkv", "transposed", "slice")
GARBAGE = ("nan", "inf", "-inf", "max", "mixed")
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep small tensor operations off the thread pool, which costs more than it saves.

    Also a decorator: ``@one_thread()``.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Sequences:
    """Sequences with their new queries, before any paging.

    ``query`` is ``[num_tokens, num_heads, head_dim]``; sequence ``i`` owns the next
    ``query_lens[i]`` rows of it, and ``keys[i]`` and ``values[i]`` are
    ``[seq_len, num_kv_heads, head_dim(_v)]``. With a quantisation a pool holds what that makes of
    them.
    """

    query: Tensor
    query_lens: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    num_kv_heads: int
    head_dim_v: int
    options: dict[str, Any] = field(default_factory=dict)
    quantisation: Quantisation | None = None

    @property
    def seq_lens(self) -> list[int]:
        return [len(keys) for keys in self.keys]

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    def as_read(self) -> Sequences:
        """Return the same with the keys and values that a pool holds, in float64."""
        store = self.quantisation
        keys, values = (
            tuple(t.double() if store is None else store.as_read(t) for t in tensors)
            for tensors in (self.keys, self.values)
        )
        return replace(self, query=self.query.double(), keys=keys, values=values, quantisation=None)

    def rows(self, sequence: int) -> slice:
        """Rows of ``query`` that belong to one sequence."""
        start = sum(self.query_lens[:sequence])
        return slice(start, start + self.query_lens[sequence])

    def select(self, chosen: Sequence[int]) -> Sequences:
        """Return the chosen sequences, in that order."""
        rows = [self.query[self.rows(i)] for i in chosen]
        return replace(
            self,
            query=torch.cat([self.query[:0], *rows]),
            query_lens=tuple(self.query_lens[i] for i in chosen),
            keys=tuple(self.keys[i] for i in chosen),
            values=tuple(self.values[i] for i in chosen),
        )

    def with_options(self, **options: Any) -> Sequences:
        return replace(self, options={**self.options, **options})

    def split_rows(self, cuts: Callable[[int], list[int]]) -> Sequences:
        """Cut each sequence's queries into chunks that come as sequences of their own.

        ``cuts(query_len)`` gives the inner chunk boundaries. A chunk has the keys up to its last
        query's position, so under the causal mask its rows see what they saw before.
        """
        query_lens, keys, values = [], [], []
        for query_len, key, value in zip(self.query_lens, self.keys, self.values, strict=True):
            bounds = [0, *cuts(query_len), query_len]
            for start, stop in pairwise(bounds):
                length = max(0, len(key) - query_len + stop)
                query_lens.append(stop - start)
                keys.append(key[:length])
                values.append(value[:length])
        return replace(self, query_lens=tuple(query_lens), keys=tuple(keys), values=tuple(values))


@dataclass(frozen=True)
class Placement:
    """How sequences lie in a pool."""

    block_size: int = 16
    cache_layout: str = "NHD"
    query_layout: str = "contiguous"
    garbage: str = "nan"
    spare_blocks: int = 2
    spare_columns: int = 1
    seed: int = 0


@dataclass(frozen=True)
class PagedCase:
    """Arguments for the attention ops."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Call the op; returns output and lse."""
        return torch.ops.paged.attention_with_lse(*self.tensors, **{**self.options, **options})

    def as_decode(self) -> PagedCase:
        """Return the same call without ``query_start_loc``, for one query per sequence."""
        return replace(self, query_start_loc=None)


def run(sequences: Sequences, placement: Placement | None = None) -> tuple[Tensor, Tensor]:
    """Place the sequences in a pool, call the op, and return output and lse."""
    return place(sequences, placement or Placement()).run()


@one_thread()
def exact(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return output and lse of the reference in float64."""
    case = place(sequences.as_read(), Placement(block_size=64, spare_blocks=0))
    return reference.attention_with_lse(*case.tensors, **case.options)


# Placing sequences in a pool


@one_thread()
def place(sequences: Sequences, placement: Placement) -> PagedCase:
    """Cut the sequences into blocks in random order, with garbage around them."""
    generator = torch.Generator().manual_seed(placement.seed)
    block_size, seq_lens = placement.block_size, sequences.seq_lens
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + placement.spare_blocks
    order = torch.randperm(num_blocks, generator=generator).tolist()

    width = max(needed, default=0) + placement.spare_columns
    block_tables = _garbage_ids(len(seq_lens), width, num_blocks, generator)
    key_cache, value_cache = _empty_caches(sequences, num_blocks, placement)
    for cache in (key_cache, value_cache):
        _fill_with_garbage(cache, placement.garbage)
    scales = _empty_scales(sequences, key_cache, placement)

    for sequence, count in enumerate(needed):
        blocks, order = order[:count], order[count:]
        block_tables[sequence, :count] = torch.tensor(blocks, dtype=torch.int32)
        position = torch.arange(seq_lens[sequence])
        slots = torch.tensor(blocks).long()[position // block_size], position % block_size
        for cache, name, rows in (
            (key_cache, "key_scale", sequences.keys[sequence]),
            (value_cache, "value_scale", sequences.values[sequence]),
        ):
            if sequences.quantisation is None:
                cache[slots] = rows
                continue
            elements, row_scales = sequences.quantisation.stored(rows)
            cache.view(torch.uint8)[slots] = elements.view(torch.uint8)
            if sequences.quantisation.granularity == "token":
                scales[name][slots] = row_scales

    starts = torch.tensor([0, *sequences.query_lens]).cumsum(0)
    return PagedCase(
        query=_in_query_layout(sequences.query, placement.query_layout),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=starts.to(torch.int32),
        options={**sequences.options, **scales},
    )


def _empty_scales(sequences: Sequences, cache: Tensor, placement: Placement) -> dict[str, Tensor]:
    """Return the scales of both caches; those per token are garbage as yet."""
    store = sequences.quantisation
    if store is None or store.granularity == "none":
        return {}
    scales = {}
    for name in ("key_scale", "value_scale"):
        if store.granularity == "token":
            scales[name] = _hnd(cache.shape[:3], 1, torch.float32)[..., 0]
            if placement.cache_layout == "NHD":
                scales[name] = torch.empty(cache.shape[:3])
            _fill_with_garbage(scales[name], placement.garbage)
        else:
            scales[name] = store.fixed_scale(sequences.num_kv_heads)
    return scales


def _empty_caches(
    sequences: Sequences, num_blocks: int, placement: Placement
) -> tuple[Tensor, Tensor]:
    head_dim, head_dim_v = sequences.query.shape[2], sequences.head_dim_v
    shape = (num_blocks, placement.block_size, sequences.num_kv_heads)
    layout, dtype = placement.cache_layout, sequences.dtype
    if sequences.quantisation is not None:
        dtype = sequences.quantisation.dtype
    if head_dim_v != head_dim and layout in ("article NHD", "article HND", "keys then values"):
        layout = {"article NHD": "NHD", "article HND": "HND", "keys then values": "slice"}[layout]
    return make_caches(layout, shape, head_dim, head_dim_v, dtype)


def make_caches(
    layout: str, shape: tuple[int, int, int], head_dim: int, head_dim_v: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return uninitialised caches ``[*shape, head_dim]`` and ``[*shape, head_dim_v]``.

    ``shape`` is ``(num_blocks, block_size, num_kv_heads)``. The layouts that hold keys and values
    in one tensor need equal head dimensions.
    """
    num_blocks, block_size, num_kv_heads = shape
    if layout == "article NHD":
        blocks = torch.empty(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype)
        return blocks[:, 0], blocks[:, 1]
    if layout == "article HND":
        blocks = torch.empty(num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
        return blocks[:, 0].transpose(1, 2), blocks[:, 1].transpose(1, 2)
    if layout == "keys then values":
        blocks = torch.empty(2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype)
        return blocks[0], blocks[1]
    make = {"NHD": _nhd, "HND": _hnd, "slice": _slice, "joined heads": _joined_heads}[layout]
    return make(shape, head_dim, dtype), make(shape, head_dim_v, dtype)


def _nhd(shape: tuple[int, int, int], head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, head_dim, dtype=dtype)


def _hnd(shape: tuple[int, int, int], head_dim: int, dtype: torch.dtype) -> Tensor:
    num_blocks, block_size, num_kv_heads = shape
    return torch.empty(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype).transpose(1, 2)


def _slice(shape: tuple[int, int, int], head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return a cache whose rows start at odd offsets in a larger tensor."""
    num_blocks, block_size, num_kv_heads = shape
    larger = torch.empty(
        num_blocks + 2, block_size + 1, num_kv_heads + 2, head_dim + 3, dtype=dtype
    )
    return larger[1:-1, 1:, 1:-1, 1:-2]


def _joined_heads(shape: tuple[int, int, int], head_dim: int, dtype: torch.dtype) -> Tensor:
    num_blocks, block_size, num_kv_heads = shape
    joined = torch.empty(num_blocks, block_size, num_kv_heads * head_dim, dtype=dtype)
    return joined.unflatten(2, (num_kv_heads, head_dim))


def _in_query_layout(query: Tensor, layout: str) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    if layout == "contiguous":
        return query.contiguous()
    if layout == "fused qkv":
        fused = query.new_empty(num_tokens, (num_heads + 2) * head_dim)
        view = fused[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    elif layout == "transposed":
        view = query.new_empty(num_heads, num_tokens, head_dim).transpose(0, 1)
    else:
        view = query.new_empty(num_tokens + 1, num_heads + 1, head_dim + 3)[1:, 1:, 1:-2]
    return view.copy_(query)


def _fill_with_garbage(cache: Tensor, kind: str) -> None:
    if cache.dtype == torch.int8:
        cache.fill_({"-inf": -128, "max": 127, "zero": 0}.get(kind, 85))
        return
    largest = torch.finfo(cache.dtype).max
    values = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "max": largest, "zero": 0.0}
    if kind == "mixed":
        pattern = torch.tensor([math.nan, largest, -math.inf, 1.0, -largest, math.inf, math.nan])
        repeats = -(-cache.numel() // len(pattern))
        cache.copy_(pattern.to(cache.dtype).repeat(repeats)[: cache.numel()].view(cache.shape))
    elif cache.dtype.itemsize == 1:  # which torch can't fill
        cache.copy_(torch.full(cache.shape, values[kind]).to(cache.dtype))
    else:
        cache.fill_(values[kind])


def _garbage_ids(batch: int, width: int, num_blocks: int, generator: torch.Generator) -> Tensor:
    """Return a table whose every entry is an id that a bad reader would follow or fault on."""
    candidates = torch.tensor(
        [INT32_MIN, -1, 0, num_blocks - 1, num_blocks, INT32_MAX], dtype=torch.int32
    )
    chosen = torch.randint(len(candidates), (batch, width), generator=generator)
    return candidates[chosen]


# Values


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, magnitude: float = 1.0) -> Tensor:
    """Return seeded normal values with the given standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * magnitude).to(dtype)


@one_thread()
def make_sequences(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    magnitude: float = 1.0,
    seed: int = 0,
    quantisation: Quantisation | None = None,
    **options: Any,
) -> Sequences:
    """Return sequences with normal values; ``query_lens`` None means one query for each."""
    query_lens = tuple([1] * len(seq_lens) if query_lens is None else query_lens)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    total = sum(seq_lens)
    query = normal((sum(query_lens), num_heads, head_dim), dtype, seed, magnitude)
    keys = normal((total, num_kv_heads, head_dim), dtype, seed + 1, magnitude)
    values = normal((total, num_kv_heads, head_dim_v), dtype, seed + 2)
    lengths = list(seq_lens)
    return Sequences(
        query=query,
        query_lens=query_lens,
        keys=keys.split(lengths) if lengths else (),
        values=values.split(lengths) if lengths else (),
        num_kv_heads=num_kv_heads,
        head_dim_v=head_dim_v,
        options=options,
        quantisation=quantisation,
    )
