"""What FlashAttention's functions over a KV cache, of either version, have in common.

Queries and new rows lie one sequence after another here, whichever form the caller has them in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from paged_ops.arguments import checked_float, checked_int
from paged_ops.dtypes import FLOAT_DTYPES
from paged_ops.functional import write_kv
from paged_ops.integrations.refusals import check_lengths, check_offsets, check_slopes, check_tensor
from paged_ops.integrations.rotary import apply_rotary
from paged_ops.integrations.windows import Cut, Keys, Window, attention_in_window
from paged_ops.ops.checks import AttentionOptions

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def refusing_as_flash_attn(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Let a function refuse values by RuntimeError, as FlashAttention's own does."""

    @functools.wraps(function)
    def refusing(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except ValueError as refusal:
            raise RuntimeError(str(refusal)) from None

    return refusing


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is dense, as FlashAttention makes its inputs.

    What is no tensor is returned as it is, for a check to refuse it.
    """
    is_sparse = isinstance(tensor, Tensor) and tensor.dim() and tensor.stride(-1) != 1
    return tensor.clone(memory_format=torch.contiguous_format) if is_sparse else tensor


class NewRows(NamedTuple):
    """What is appended: rows of all sequences, and how many each gets, ``[batch]`` int32."""

    k: Tensor
    v: Tensor
    counts: Tensor


class Places(NamedTuple):
    """Of rows that lie one sequence after another: whose each is, and its place among them."""

    owners: Tensor
    within: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> Places:
        """Return the places of so many rows for each sequence."""
        owners = torch.repeat_interleave(counts)
        begins = counts.cumsum(0) - counts
        return cls(owners, torch.arange(len(owners), device=counts.device) - begins[owners])


def score_options(
    scale: float | None, softcap: float, slopes: Tensor | None, batch: int, q: Tensor
) -> AttentionOptions:
    """Return what makes the scores, or refuse it; no sequence has no slopes."""
    check_slopes(slopes, batch, q)
    return {
        "scale": None if scale is None else checked_float("softmax_scale", scale),
        "softcap": checked_float("softcap", softcap, 0),
        "alibi_slopes": None if slopes is None or not batch else slopes.float(),
    }


def cache_tables(
    k_cache: Tensor, batch: int, q: Tensor, named: str, table: Tensor | None, index: Tensor | None
) -> Tensor:
    """Return block tables; without pages a row of the cache is one block.

    With an index the table has a row for each row of the cache, of which that one is taken.
    """
    int32 = (torch.int32,)
    if index is not None:
        check_tensor("cache_batch_idx", index, {"batch": batch}, int32, q)
    if table is None:
        if index is not None:
            return index[:, None]
        if k_cache.shape[0] != batch:
            raise ValueError(f"k_cache.shape[0] is {k_cache.shape[0]}, expected {batch}, as q's")
        return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]
    sizes = {"batch": batch if index is None else None, "max_blocks_per_seq": None}
    check_tensor(named, table, sizes, int32, q)
    if index is None:
        return table
    check_lengths("cache_batch_idx", index, len(table) - 1, f"{named} has {len(table)} rows")
    return table[index.long()]


def lengths_before(
    k_cache: Tensor,
    tables: Tensor,
    cache_seqlens: int | Tensor | None,
    counts: Tensor | None,
    named: str,
) -> Tensor:
    """Return how many tokens each sequence has in the cache before the call."""
    columns, size = tables.shape[1], k_cache.shape[1]
    room = columns * size
    new = [0] * len(tables) if counts is None else counts.tolist()
    most = max(new, default=0)
    if cache_seqlens is None:
        if counts is not None:
            raise ValueError("cache_seqlens is None, expected a number or a tensor: k is given")
        cache_seqlens = room
    where = f"{named} has {columns} blocks of {size} tokens in a row"
    if most > room:
        raise ValueError(f"k has {most} tokens for a sequence, expected at most {room}: {where}")
    if not isinstance(cache_seqlens, Tensor):
        length = checked_int("cache_seqlens", cache_seqlens, 0, room - most)
        return torch.full(tables.shape[:1], length, dtype=torch.int32, device=k_cache.device)
    check_tensor("cache_seqlens", cache_seqlens, {"batch": len(tables)}, (torch.int32,), tables)
    for i, (length, count) in enumerate(zip(cache_seqlens.tolist(), new, strict=True)):
        if not 0 <= length <= room - count:
            more = f", {count} of them new" if count else ""
            raise ValueError(
                f"cache_seqlens[{i}] is {length}, expected 0 to {room - count}: {where}{more}"
            )
    return cache_seqlens


def checked_leftpad(leftpad: Tensor | None, before: Tensor) -> Tensor | None:
    """Return where sequences begin, or refuse it."""
    if leftpad is None:
        return None
    check_tensor("cache_leftpad", leftpad, {"batch": len(before)}, (torch.int32,), before)
    wrong = ((leftpad < 0) | (leftpad > before)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"cache_leftpad[{i}] is {int(leftpad[i])}, expected 0 to {int(before[i])}, the length"
        )
    return leftpad


class Rotary(NamedTuple):
    """Angles, and ``[batch]``, the position of the first new token of each sequence."""

    cos: Tensor
    sin: Tensor
    begins: Tensor
    is_interleaved: bool


def checked_rotary(
    cos: Tensor | None,
    sin: Tensor | None,
    begins: Tensor,
    is_interleaved: bool,
    q: Tensor,
    has_new_rows: bool,
) -> Rotary | None:
    """Return the angles, or refuse them."""
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin: expected both or none")
    if cos is None or sin is None:
        return None
    if not has_new_rows:
        raise ValueError("rotary_cos is a tensor, expected None: there is no k to append")
    sizes: dict[str, int | None] = {"num_positions": None, "rotary_dim / 2": None}
    check_tensor("rotary_cos", cos, sizes, FLOAT_DTYPES, q)
    check_tensor("rotary_sin", sin, dict(zip(sizes, cos.shape, strict=True)), FLOAT_DTYPES, q)
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos.shape[1] is {cos.shape[1]}, expected at most {q.shape[-1] // 2}, half of "
            "q's head_dim"
        )
    return Rotary(cos, sin, begins, is_interleaved)


def rotated(
    query: Tensor, query_counts: Tensor, new: NewRows, rotary: Rotary, is_local: bool
) -> tuple[Tensor, NewRows]:
    """Return queries and new keys turned by the angles of their positions.

    Where queries see no end of what follows, all of a sequence's are turned alike.
    """
    of_q, of_k = Places.of(query_counts), Places.of(new.counts)
    places = [of_k.within + rotary.begins[of_k.owners], rotary.begins[of_q.owners]]
    if is_local:
        places[1] = places[1] + of_q.within
    last = max((int(at.max()) + 1 for at in places if len(at)), default=0)
    if last > rotary.cos.shape[0]:
        raise ValueError(
            f"rotary_cos.shape[0] is {rotary.cos.shape[0]}, expected {last} or more: positions of "
            "the call"
        )

    def turned(rows: Tensor, at: Tensor) -> Tensor:
        angles = rotary.cos, rotary.sin, at[None], rotary.is_interleaved
        return apply_rotary(rows[None], *angles)[0]

    return turned(query, places[1]), NewRows(turned(new.k, places[0]), new.v, new.counts)


def append(new: NewRows, keys: Keys, before: Tensor) -> None:
    """Write new keys and values behind those that are there."""
    size = keys.key_cache.shape[1]
    owners, within = Places.of(new.counts)
    positions = before[owners] + within
    blocks = keys.block_tables[owners, positions // size].to(torch.int64)
    slots = blocks * size + positions % size
    k, v = new.k, new.v
    if k.dtype not in FLOAT_DTYPES:  # float8, which a float is stored as without a change
        k, v = k.float(), v.float()
    write_kv(k, v, keys.key_cache, keys.value_cache, slots)


def attend(
    query: Tensor,
    starts: Tensor,
    keys: Keys,
    window: Window,
    options: AttentionOptions,
    cut: Cut,
    is_paged: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in one call, or in one for each sequence where sequences differ beyond lengths."""
    slopes = options.get("alibi_slopes")
    batch = keys.seq_lens.shape[0]
    has_own_slopes = slopes is not None and slopes.dim() == 2
    # Where a row of the cache is one block, what it holds from the pad on is a cache as well.
    is_cut_by_view = cut.leftpad is not None and not cut.chunk and not is_paged
    if not batch or not (has_own_slopes or is_cut_by_view):
        return attention_in_window(query, starts, keys, window, options, cut)
    pads = cut.leftpad.tolist() if is_cut_by_view and cut.leftpad is not None else [0] * batch
    rows = starts.tolist()
    parts = []
    for i, pad in enumerate(pads):
        own = slopes[i] if has_own_slopes and slopes is not None else slopes
        own_pad = None if is_cut_by_view or cut.leftpad is None else cut.leftpad[i : i + 1]
        parts.append(
            attention_in_window(
                query[rows[i] : rows[i + 1]],
                starts[i : i + 2] - starts[i],
                _without_leftpad(keys, i, pad),
                window,
                {**options, "alibi_slopes": own},
                Cut(own_pad, cut.chunk),
            )
        )
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _without_leftpad(keys: Keys, sequence: int, pad: int) -> Keys:
    """Return the keys of one sequence, from `pad` on; with a pad its one block is its cache row."""
    table = keys.block_tables[sequence : sequence + 1]
    seq_lens = keys.seq_lens[sequence : sequence + 1]
    if not pad:
        return Keys(keys.key_cache, keys.value_cache, table, seq_lens)
    if int(seq_lens) == pad:
        return Keys(keys.key_cache, keys.value_cache, table, seq_lens - pad)
    row = int(table)
    key_cache, value_cache = keys.key_cache[row, pad:][None], keys.value_cache[row, pad:][None]
    return Keys(key_cache, value_cache, torch.zeros_like(table), seq_lens - pad)


def checked_new(
    q: Tensor,
    batch: int,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> NewRows | None:
    """Return the tokens that each sequence gets, or refuse them."""
    if k is None and v is None:
        if cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new is a tensor, expected None: there is no k to append")
        return None
    if k is None or v is None:
        kinds = ["None" if each is None else "a tensor" for each in (k, v)]
        raise ValueError(f"k is {kinds[0]} and v is {kinds[1]}, expected both or none")
    k, v = dense(k), dense(v)
    rows: dict[str, int | None] = {"total_k_new": None}
    if cu_seqlens_k_new is None:
        rows = {"batch": batch, "seqlen_new": None}
    sizes = {**rows, "num_kv_heads": k_cache.shape[2], "head_dim": k_cache.shape[3]}
    check_tensor("k", k, sizes, (q.dtype,), q)
    sizes = {**dict(zip(sizes, k.shape, strict=True)), "head_dim": v_cache.shape[3]}
    check_tensor("v", v, sizes, (q.dtype,), q)
    if cu_seqlens_k_new is None:
        counts = torch.full((batch,), k.shape[1], dtype=torch.int32, device=q.device)
        return NewRows(k.flatten(0, 1), v.flatten(0, 1), counts)
    name = "cu_seqlens_k_new"
    check_offsets(name, cu_seqlens_k_new, batch, q, len(k), is_whole=True)
    return NewRows(k, v, cu_seqlens_k_new.diff())
