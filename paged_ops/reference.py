"""The definition of every op of this package, in readable torch.

Each function here has the signature and the meaning of the compiled op of the same name; what its
arguments are stands with the function of that name in `paged_ops`. The tests hold the ops against
these functions, and the documentation points at them. Nothing is done for speed: one sequence and
one query token at a time. Arguments are taken to be valid: checks are the ops'.

Attention
---------
A sequence of ``n`` tokens has its keys and values in ``ceil(n / block_size)`` blocks, named in
order by its row of ``block_tables``. Its last ``m`` tokens are new and have queries. New token
``j`` sits at position ``p = n - m + j`` and sees key ``k`` if and only if

    0 <= k < n   and   (not causal or k <= p)   and   (no window or k > p - sliding_window)

Those keys are one range. With ``row`` the row of the query, key ranges cut it shorter, to
``key_ranges[row, 0] <= k < key_ranges[row, 1]``, and a tree mask hides some of the new tokens in
it: token ``i`` is seen only if ``tree_mask[row, i]``. Query head ``h`` reads KV head
``h // (num_heads // num_kv_heads)``. With ``q`` the query and ``K``, ``V`` what it sees::

    s_k = scale * dot(q, K_k)                        scale
    s_k = softcap * tanh(s_k / softcap)              softcap, when it is not 0
    s_k = s_k + alibi_slopes[h] * (k - p)            ALiBi: 0 at the query itself
    Z   = sum_k exp(s_k) + exp(sinks[h])             the sink: one more logit, without a value
    output = sum_k exp(s_k) * V_k / Z
    lse    = log(Z)

A query that sees no key has output 0; its ``lse`` is the sink, or ``-inf`` where there is none.
Because ``lse`` is the log of the whole denominator, results over disjoint sets of keys can be
merged exactly (`merge_states`), provided that only one of them carries the sink.

Quantised caches
----------------
An element of an int8, float8_e4m3fn or float8_e5m2 cache stands for itself times its scale. Scales
are ``[]`` (one for all), ``[num_kv_heads]`` or ``[num_blocks, block_size, num_kv_heads]``; without
them a float8 cache has the scale 1, and an int8 cache is refused by a ValueError. `write_kv` writes
``x / scale``, rounded to nearest even; what is too large becomes the largest element. A scale per
token and head it chooses itself, by row::

    scale = max(abs(row)) / largest element        127, 448 or 57344

and NaN where the row isn't finite, so that it reads as NaN.

Precision
---------
The arithmetic is float64 when the input is float64, and float32 for every other dtype. Outputs
have the dtype of ``query``; ``lse`` has the dtype of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from paged_ops.dtypes import LARGEST_ELEMENT, as_bytes
from paged_ops.ops.checks import AttentionOptions, refuse_unknown

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "gather_kv",
    "merge_states",
    "write_kv",
]


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attend over a paged KV cache; see the module's text for the formulas.

    Returns
    -------
    Tensor
        ``[num_tokens, num_heads, head_dim_v]``, the dtype of ``query``.

    Examples
    --------
    One sequence of three tokens in blocks 2 and 0 of a pool with blocks of two. All keys are
    equal, so the output is the mean of the values 1, 2 and 6; what lies past the third token is
    never read.

    >>> import torch
    >>> from paged_ops import reference
    >>> key_cache = torch.zeros(3, 2, 1, 4)
    >>> value_cache = torch.full((3, 2, 1, 1), float("nan"))
    >>> value_cache[2, 0], value_cache[2, 1], value_cache[0, 0] = 1.0, 2.0, 6.0
    >>> block_tables = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([3], dtype=torch.int32)
    >>> query = torch.ones(1, 1, 4)
    >>> output = reference.attention(query, key_cache, value_cache, block_tables, seq_lens)
    >>> output.round(decimals=4)
    tensor([[[3.]]])
    """
    output, _ = attention_with_lse(
        query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, **options
    )
    return output


def attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """Attend over a paged KV cache and return the log of the denominator too.

    Returns
    -------
    output : Tensor
        ``[num_tokens, num_heads, head_dim_v]``, the dtype of ``query``.
    lse : Tensor
        ``[num_tokens, num_heads]``: natural log of the softmax denominator, the sink included;
        ``-inf`` for a row without keys and without a sink.

    Examples
    --------
    The second of two new tokens sees two equal keys with score 0, so Z = 2.

    >>> import torch
    >>> from paged_ops import reference
    >>> cache = torch.zeros(1, 2, 1, 4)
    >>> table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    >>> start = torch.tensor([0, 2], dtype=torch.int32)
    >>> query = torch.ones(2, 1, 4)
    >>> output, lse = reference.attention_with_lse(query, cache, cache, table, length, start)
    >>> lse.exp()
    tensor([[1.],
            [2.]])
    """
    refuse_unknown("attention_with_lse", options)
    key_half, value_half = halves(key_cache, value_cache, options)
    visible, rule = Visibility.of(options), ScoreRule.of(query, options)
    sinks = in_arithmetic(options.get("sinks"), query)
    output, lse = empty_results(query, value_cache)

    for sequence, rows in sequences(query, seq_lens, query_start_loc):
        length = int(seq_lens[sequence])
        keys = key_half.gather(block_tables[sequence], length, output.dtype)
        values = value_half.gather(block_tables[sequence], length, output.dtype)
        for row in rows:
            position = length - (rows.stop - row)
            seen = visible.keys(row, position, length, length - len(rows))
            output[row], lse[row] = _softmax_of_one_query(
                rule.scores(query[row].to(output.dtype), keys[seen], seen - position),
                values[seen],
                sinks,
            )
    if query_start_loc is not None and sinks is not None:
        lse[int(query_start_loc[-1]) :] = sinks  # of rows past the last start
    return output.to(query.dtype), lse


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the cache, in place.

    Of tokens with the same slot the last one stays.

    Examples
    --------
    >>> import torch
    >>> from paged_ops import reference
    >>> cache = torch.zeros(2, 2, 1, 1)
    >>> key = torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1)
    >>> reference.write_kv(key, key, cache, cache.clone(), torch.tensor([3, -1, 0]))
    >>> cache.flatten()
    tensor([9., 0., 0., 7.])
    """
    key_half, value_half = Half(key_cache, key_scale), Half(value_cache, value_scale)
    block_size = key_cache.shape[1]
    # A quantised row has one scale, so it is written once.
    is_one_row = key_half.is_quantised and value_cache.data_ptr() == key_cache.data_ptr()
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            block, offset = divmod(slot, block_size)
            key_half.write(block, offset, key[token])
            if not is_one_row:
                value_half.write(block, offset, value[token])


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over both.

    With ``lse = log(exp(lse_a) + exp(lse_b))`` the merged output is
    ``out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``. A state whose ``lse`` is ``-inf`` saw
    nothing and adds nothing, whatever its output holds. Nor does one that is finite beside one of
    ``inf``; two of ``inf`` count the same.

    Returns
    -------
    out : Tensor
        ``[num_tokens, num_heads, head_dim_v]``, the dtype of ``out_a``.
    lse : Tensor
        ``[num_tokens, num_heads]``; ``-inf`` where both are, and ``out`` is 0 there.

    Examples
    --------
    One key with value 2 and three keys with value 6, all with score 0.

    >>> import torch
    >>> from paged_ops import reference
    >>> out, lse = reference.merge_states(
    ...     torch.full((1, 1, 1), 2.0), torch.zeros(1, 1),
    ...     torch.full((1, 1, 1), 6.0), torch.full((1, 1), 3.0).log(),
    ... )
    >>> out.round(decimals=4), lse.exp()
    (tensor([[[5.]]]), tensor([[4.]]))
    """
    dtype = _arithmetic_dtype(out_a)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    top = torch.maximum(lse_a, lse_b)

    def weight(lse_of_part: Tensor) -> Tensor:
        weights = torch.where(lse_of_part == top, 1.0, torch.exp(lse_of_part - top))
        return torch.where(lse_of_part == -math.inf, 0.0, weights)

    total = weight(lse_a) + weight(lse_b)

    def share(out: Tensor, lse_of_part: Tensor) -> Tensor:
        weights = weight(lse_of_part).unsqueeze(-1)
        return torch.where(weights == 0.0, 0.0, out.to(dtype) * (weights / total.unsqueeze(-1)))

    lse = top + torch.log(total)
    return (share(out_a, lse_a) + share(out_b, lse_b)).to(out_a.dtype), lse


def copy_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Copy whole blocks of the cache, in place, all reads before any write.

    Because of that order a chain (0 to 1, 1 to 2) moves the old contents along, and a swap
    (0 to 1, 1 to 0) exchanges two blocks.

    Examples
    --------
    >>> import torch
    >>> from paged_ops import reference
    >>> cache = torch.arange(3.0).view(3, 1, 1, 1).clone()
    >>> reference.copy_blocks(cache, cache.clone(), torch.tensor([[0, 1], [1, 2]]))
    >>> cache.flatten()
    tensor([0., 0., 1.])
    """
    source, destination = block_mapping.long().unbind(1)
    written = [key_cache, value_cache]
    written += [s for s in (key_scale, value_scale) if s is not None and s.dim() == 3]
    # Indexing with a tensor copies: all is read before anything is written. V may be a view of K.
    contents = [as_bytes(tensor)[source] for tensor in written]
    for tensor, content in zip(written, contents, strict=True):
        as_bytes(tensor)[destination] = content


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Collect the keys and values of all sequences into contiguous tensors.

    Returns
    -------
    key : Tensor
        ``[sum(seq_lens), num_kv_heads, head_dim]``, sequence after sequence; float32 from a
        quantised cache.
    value : Tensor
        ``[sum(seq_lens), num_kv_heads, head_dim_v]``, the same.

    Raises
    ------
    ValueError
        If ``num_tokens`` is not ``sum(seq_lens)``, or a cache is int8 and has no scale.

    Examples
    --------
    >>> import torch
    >>> from paged_ops import reference
    >>> cache = torch.arange(6.0).view(3, 2, 1, 1)
    >>> table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    >>> key, _ = reference.gather_kv(cache, cache, table, torch.tensor([3, 1], dtype=torch.int32))
    >>> key.flatten()
    tensor([4., 5., 0., 2.])
    """
    lengths = seq_lens.tolist()
    if num_tokens is not None and num_tokens != sum(lengths):
        raise ValueError(f"num_tokens is {num_tokens}, expected sum(seq_lens) = {sum(lengths)}")

    def pack(cache: Tensor, scale: Tensor | None) -> Tensor:
        half = Half(cache, scale)
        dtype = torch.float32 if half.is_quantised else cache.dtype
        nothing = cache.new_empty(0, *cache.shape[2:], dtype=dtype)
        rows = zip(block_tables, lengths, strict=True)
        return torch.cat([nothing, *(half.gather(table, length, dtype) for table, length in rows)])

    return pack(key_cache, key_scale), pack(value_cache, value_scale)


def halves(key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> tuple[Half, Half]:
    """Return K and V of the pool with their scales."""
    return Half(key_cache, options.get("key_scale")), Half(value_cache, options.get("value_scale"))


class Half:
    """K or V of the pool: a cache and, where it is quantised, its scales."""

    def __init__(self, cache: Tensor, scale: Tensor | None) -> None:
        self.cache = cache
        self.is_quantised = cache.dtype in LARGEST_ELEMENT
        if scale is None and cache.dtype == torch.int8:
            raise ValueError("an int8 cache means nothing without its scales")
        self.chooses_scales = scale is not None and scale.dim() == 3
        if scale is None:
            scale = torch.ones((), device=cache.device)
        # [num_blocks, block_size, num_kv_heads], a view in any case.
        self.scale = scale if scale.dim() == 3 else scale.expand(cache.shape[:3])

    def rows(self, block: Tensor | int, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of some tokens, ``[n, num_kv_heads, ...]``."""
        rows = as_bytes(self.cache)[block, offset].view(self.cache.dtype).to(dtype)
        if not self.is_quantised:
            return rows
        return rows * self.scale[block, offset].to(dtype).unsqueeze(-1)

    def gather(self, block_table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``length`` tokens of a sequence, ``[length, num_kv_heads, ...]``."""
        positions = torch.arange(length, device=block_table.device)
        block_size = self.cache.shape[1]
        return self.rows(block_table[positions // block_size].long(), positions % block_size, dtype)

    def write(self, block: int, offset: int, rows: Tensor) -> None:
        """Write the ``[num_kv_heads, ...]`` rows of one token."""
        if not self.is_quantised:
            self.cache[block, offset] = rows
            return
        rows = rows.float()
        largest = LARGEST_ELEMENT[self.cache.dtype]
        if self.chooses_scales:
            scale = rows.abs().amax(dim=1) / largest
            self.scale[block, offset] = torch.where(scale.isfinite(), scale, math.nan)
        scale = self.scale[block, offset].unsqueeze(-1)
        ratio = torch.where((scale == 0.0) | scale.isnan(), 0.0, rows / scale)
        if self.cache.dtype == torch.int8:
            elements = ratio.nan_to_num(nan=0.0).round().clamp(-128, 127)
        else:
            elements = ratio.clamp(-largest, largest)
        self.cache[block, offset] = elements.to(self.cache.dtype)


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees."""

    causal: bool
    sliding_window: int | None
    tree_mask: Tensor | None
    key_ranges: Tensor | None

    @classmethod
    def of(cls, options: AttentionOptions) -> Visibility:
        """Read the rule from the options of a call."""
        window, mask = options.get("sliding_window"), options.get("tree_mask")
        return cls(options.get("causal", True), window, mask, options.get("key_ranges"))

    def keys(self, row: int, position: int, length: int, first_new: int) -> Tensor:
        """Return the positions of the keys that one row, at ``position``, sees, in order.

        The sequence has ``length`` keys, the new tokens among them from ``first_new`` on.
        """
        window = self.sliding_window
        start = 0 if window is None else max(0, position - window + 1)
        stop = position + 1 if self.causal else length
        if self.key_ranges is not None:
            first, end = self.key_ranges[row].tolist()
            start, stop = max(start, first), min(stop, end)
        seen = torch.arange(start, max(start, stop))
        if self.tree_mask is None:
            return seen
        shown = [k < first_new or bool(self.tree_mask[row, k - first_new]) for k in seen.tolist()]
        return seen[torch.tensor(shown, dtype=torch.bool)]


@dataclass(frozen=True)
class ScoreRule:
    """How a dot product becomes a score: scale, then softcap, then ALiBi."""

    scale: float
    softcap: float
    alibi_slopes: Tensor | None

    @classmethod
    def of(cls, query: Tensor, options: AttentionOptions) -> ScoreRule:
        """Read the rule from the query and the options of a call."""
        scale = options.get("scale")
        return cls(
            query.shape[2] ** -0.5 if scale is None else scale,
            options.get("softcap", 0.0),
            in_arithmetic(options.get("alibi_slopes"), query),
        )

    def scores(self, query: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
        """Score one query token against some keys.

        ``query`` is ``[num_heads, head_dim]``, ``keys`` is ``[n, num_kv_heads, head_dim]``, and
        ``offsets`` are the keys' positions minus that of the query. Returns ``[num_heads, n]``.
        """
        num_heads, num_kv_heads = query.shape[0], keys.shape[1]
        # Consecutive query heads share a KV head, so a reshape brings them together.
        grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, query.shape[1])
        scores = torch.einsum("hgd,khd->hgk", grouped, keys).reshape(num_heads, keys.shape[0])
        scores = scores * self.scale
        if self.softcap > 0.0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi_slopes is not None:
            scores = scores + self.alibi_slopes.unsqueeze(1) * offsets.to(scores)
        return scores


def _softmax_of_one_query(
    scores: Tensor, values: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weigh ``values [n, num_kv_heads, head_dim_v]`` by the softmax of ``scores [num_heads, n]``.

    Returns ``[num_heads, head_dim_v]`` and the log of the denominator, ``[num_heads]``. A score of
    -inf weighs nothing, whatever the denominator is, and one of inf or NaN makes a NaN of all.
    """
    logits = scores if sinks is None else torch.cat([scores, sinks.unsqueeze(1)], dim=1)
    lse = torch.logsumexp(logits, dim=1)
    lse = torch.where((scores == math.inf).any(dim=1), math.nan, lse)
    weights = torch.exp(scores - lse.unsqueeze(1))
    return weigh(torch.where(scores == -math.inf, 0.0, weights), values), lse


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Sum ``values [n, num_kv_heads, head_dim_v]`` with ``weights [num_heads, n]``."""
    num_heads, num_kv_heads = weights.shape[0], values.shape[1]
    grouped = weights.reshape(num_kv_heads, num_heads // num_kv_heads, weights.shape[1])
    return torch.einsum("hgk,khd->hgd", grouped, values).reshape(num_heads, values.shape[2])


def sequences(
    query: Tensor, seq_lens: Tensor, query_start_loc: Tensor | None
) -> Iterator[tuple[int, range]]:
    """Yield each sequence's index and its rows of ``query``."""
    batch = seq_lens.shape[0]
    bounds = list(range(batch + 1)) if query_start_loc is None else query_start_loc.tolist()
    for sequence in range(batch):
        yield sequence, range(bounds[sequence], bounds[sequence + 1])


def empty_results(query: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse of rows that see nothing, in the dtype of the arithmetic."""
    num_tokens, num_heads = query.shape[:2]
    output = query.new_zeros(
        num_tokens, num_heads, value_cache.shape[3], dtype=_arithmetic_dtype(query)
    )
    return output, output.new_full((num_tokens, num_heads), -math.inf)


def _arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def in_arithmetic(per_head: Tensor | None, query: Tensor) -> Tensor | None:
    return None if per_head is None else per_head.to(_arithmetic_dtype(query))
