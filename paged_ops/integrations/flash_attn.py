"""FlashAttention's functions over a KV cache, under its argument names.

They follow the documentation of flash-attn 2.8, on every device that `paged_ops` serves, and in
float32 as well. Other than there, a page may have any number of tokens and a head any size. What
can't be honoured is refused, with the argument's name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops.arguments import INT32_MAX, checked_float, checked_int
from paged_ops.dtypes import FLOAT_DTYPES
from paged_ops.functional import write_kv
from paged_ops.integrations.refusals import (
    check_blocks,
    check_heads,
    check_lengths,
    check_limit,
    check_offsets,
    check_slopes,
    check_tables,
    check_tensor,
)
from paged_ops.integrations.rotary import apply_rotary
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.windows import Keys, Window, attention_in_window
from paged_ops.ops.checks import AttentionOptions


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values to a cache, and attend to all of it.

    Parameters
    ----------
    q : Tensor
        ``[batch, seqlen, num_heads, head_dim]``, float32, float16 or bfloat16.
    k_cache, v_cache : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` with a block_table, else
        ``[batch_cache, seqlen_cache, num_kv_heads, head_dim]``; q's dtype. Changed in place where
        k and v are given.
    k, v : Tensor, optional
        ``[batch, seqlen_new, num_kv_heads, head_dim]``: stored from cache_seqlens on. Both or none.
    rotary_cos, rotary_sin : Tensor, optional
        ``[num_positions, rotary_dim / 2]``, only with k and v: k is turned by the angles of its
        positions, from cache_seqlens on; so is q, if causal or in a window, and otherwise all of q
        by those of position cache_seqlens.
    cache_seqlens : int or Tensor, optional
        ``[batch]`` int32: tokens in the cache before the call. None, without k: all that fit.
    cache_batch_idx : Tensor, optional
        ``[batch]`` int32: the row of the cache for each row of q. Not with a block_table.
    cache_leftpad : Tensor, optional
        ``[batch]`` int32: where the sequence begins in its row of the cache. Not with a
        block_table.
    block_table : Tensor, optional
        ``[batch, max_blocks_per_seq]`` int32.
    softmax_scale : float, optional
        None: ``head_dim ** -0.5``.
    causal : bool
        A query sees keys up to its own; the last query is the last token.
    window_size : (int, int)
        (left, right): a query at position p sees keys p - left to p + right; -1: no limit.
    softcap : float
        0: off.
    rotary_interleaved : bool
        Whether neighbouring elements are turned together, or those half of rotary_dim apart.
    alibi_slopes : Tensor, optional
        ``[num_heads]`` or ``[batch, num_heads]`` float32; with several queries only if causal.
    num_splits : int
        Of no effect: how a sequence is split doesn't depend on the call.
    return_softmax_lse : bool
        Whether to return the log-sum-exp as well.

    Returns
    -------
    out : Tensor
        ``[batch, seqlen, num_heads, head_dim]``. A row that sees no key is 0.
    softmax_lse : Tensor
        Only if asked for: ``[batch, num_heads, seqlen]`` float32; -inf where a row sees no key.

    Raises
    ------
    ValueError, RuntimeError
        An argument is refused; nothing was written.

    Examples
    --------
    >>> import torch
    >>> from paged_ops.integrations.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 32)
    >>> block_table = torch.tensor([[3, 1], [6, 0]], dtype=torch.int32)
    >>> cache_seqlens = torch.tensor([20, 5], dtype=torch.int32)
    >>> q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32)
    >>> flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table
    ... ).shape
    torch.Size([2, 1, 4, 32])
    """
    check_heads(("q", q), ("k_cache", k_cache), ("v_cache", v_cache), 4)
    if q.dim() != 4:
        raise ValueError(
            f"q has {q.dim()} dimensions, expected 4: [batch, seqlen, num_heads, head_dim]"
        )
    batch, seqlen, num_heads, _ = q.shape
    window = Window.of(window_size, causal)
    is_local = window.is_local
    options = _options(softmax_scale, softcap, alibi_slopes, batch, q)
    checked_int("num_splits", num_splits, 0)
    tables = _cache_tables(k_cache, q, block_table, cache_batch_idx)
    new = _checked_new(q, k_cache, v_cache, k, v)
    before = _lengths_before(k_cache, tables, cache_seqlens, new)
    leftpad = _checked_leftpad(cache_leftpad, before, block_table)
    seq_lens = before if new is None else before + new
    keys = Keys(k_cache, v_cache, tables, seq_lens)
    named = "cache_batch_idx" if block_table is None else "block_table"
    check_blocks(named, tables, seq_lens, *k_cache.shape[:2])
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    window = window.settled(starts, alibi_slopes)
    rotary = rotary_cos, rotary_sin
    q, k = _rotated(q, k, *rotary, before, is_local, rotary_interleaved)
    if k is not None and v is not None:
        _append(k, v, keys, before)
    out, lse = _attend(q.flatten(0, 1), starts, keys, leftpad, window, options)
    out = out.view(batch, seqlen, num_heads, v_cache.shape[-1])
    lse = lse.view(batch, seqlen, num_heads).transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend from sequences of different lengths, whose keys are in a pool or lie in a row.

    Parameters
    ----------
    q : Tensor
        ``[total_q, num_heads, head_dim]``, float32, float16 or bfloat16.
    k, v : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` with a block_table, else
        ``[total_k, num_kv_heads, head_dim]``; q's dtype.
    cu_seqlens_q, cu_seqlens_k : Tensor
        ``[batch + 1]`` int32: where each sequence begins, in q and in its keys.
    max_seqlen_q, max_seqlen_k : int
        No sequence may have more queries or keys.
    dropout_p : float
        Must be 0.
    softmax_scale, causal, window_size, softcap
        As `flash_attn_with_kvcache`.
    alibi_slopes : Tensor, optional
        ``[num_heads]`` or ``[batch, num_heads]`` float32; where a sequence has several queries,
        only if causal.
    deterministic : bool
        Of no effect: results never depend on chance or on the rest of the batch.
    return_attn_probs : bool
        Whether to return the log-sum-exp as well. Probabilities are never formed.
    block_table : Tensor, optional
        ``[batch, max_blocks_per_seq]`` int32.

    Returns
    -------
    out : Tensor
        ``[total_q, num_heads, head_dim]``. A row that sees no key is 0.
    softmax_lse : Tensor
        Only if asked for: ``[num_heads, total_q]`` float32; -inf where a row sees no key.
    probabilities : None
        Only if asked for, as FlashAttention without dropout.

    Raises
    ------
    ValueError, RuntimeError
        An argument is refused.

    Examples
    --------
    >>> import torch
    >>> from paged_ops.integrations.flash_attn import flash_attn_varlen_func
    >>> k, v = torch.randn(2, 8, 16, 2, 32)
    >>> block_table = torch.tensor([[3, 1], [6, 0]], dtype=torch.int32)
    >>> cu_seqlens_q = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> cu_seqlens_k = torch.tensor([0, 20, 25], dtype=torch.int32)
    >>> flash_attn_varlen_func(
    ...     torch.randn(4, 4, 32), k, v, cu_seqlens_q, cu_seqlens_k, 3, 20, causal=True,
    ...     block_table=block_table,
    ... ).shape
    torch.Size([4, 4, 32])
    """
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}, expected 0: this is for inference")
    window = Window.of(window_size, causal)
    check_heads(("q", q), ("k", k), ("v", v), 3 if block_table is None else 4)
    if q.dim() != 3:
        raise ValueError(f"q has {q.dim()} dimensions, expected 3: [total_q, num_heads, head_dim]")
    batch = check_offsets("cu_seqlens_q", cu_seqlens_q, None, q, len(q), is_whole=True)
    total_k = len(k) if block_table is None else INT32_MAX
    check_offsets("cu_seqlens_k", cu_seqlens_k, batch, q, total_k)
    seq_lens = cu_seqlens_k.diff()
    check_limit("max_seqlen_q", max_seqlen_q, cu_seqlens_q.diff())
    check_limit("max_seqlen_k", max_seqlen_k, seq_lens)
    if block_table is None:
        tables = run_tables(cu_seqlens_k[:-1], seq_lens)
        keys = Keys(as_blocks(k), as_blocks(v), tables, seq_lens)
    else:
        check_tables("block_table", block_table, seq_lens, "cu_seqlens_k", k)
        keys = Keys(k, v, block_table, seq_lens)
    options = _options(softmax_scale, softcap, alibi_slopes, batch, q)
    window = window.settled(cu_seqlens_q, alibi_slopes)
    out, lse = _attend(q, cu_seqlens_q, keys, None, window, options)
    return (out, lse.t().contiguous(), None) if return_attn_probs else out


def _options(
    scale: float | None, softcap: float, slopes: Tensor | None, batch: int, q: Tensor
) -> AttentionOptions:
    """Return what makes the scores, or refuse it; no sequence has no slopes."""
    check_slopes(slopes, batch, q)
    return {
        "scale": None if scale is None else checked_float("softmax_scale", scale),
        "softcap": checked_float("softcap", softcap, 0),
        "alibi_slopes": None if slopes is None or not batch else slopes.float(),
    }


def _attend(
    query: Tensor,
    starts: Tensor,
    keys: Keys,
    leftpad: Tensor | None,
    window: Window,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Attend in one call, or in one for each sequence where sequences differ beyond lengths."""
    slopes = options.get("alibi_slopes")
    batch = keys.seq_lens.shape[0]
    if not batch or (leftpad is None and (slopes is None or slopes.dim() == 1)):
        return attention_in_window(query, starts, keys, window, options)
    pads = [0] * batch if leftpad is None else leftpad.tolist()
    rows = starts.tolist()
    parts = []
    for i, pad in enumerate(pads):
        own = slopes[i] if slopes is not None and slopes.dim() == 2 else slopes
        mine = _without_leftpad(keys, i, pad)
        own_starts = starts[i : i + 2] - starts[i]
        own_options: AttentionOptions = {**options, "alibi_slopes": own}
        part = query[rows[i] : rows[i + 1]]
        parts.append(attention_in_window(part, own_starts, mine, window, own_options))
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


def _append(k: Tensor, v: Tensor, keys: Keys, before: Tensor) -> None:
    """Write new keys and values behind those that are there."""
    size = keys.key_cache.shape[1]
    positions = before[:, None] + torch.arange(k.shape[1], device=k.device)
    blocks = keys.block_tables.gather(1, positions // size).to(torch.int64)
    slots = (blocks * size + positions % size).flatten()
    write_kv(k.flatten(0, 1), v.flatten(0, 1), keys.key_cache, keys.value_cache, slots)


def _rotated(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    before: Tensor,
    is_local: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return q and k turned by the angles of their positions, if there are angles."""
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin: expected both or none")
    if cos is None or sin is None:
        return q, k
    if k is None:
        raise ValueError("rotary_cos is a tensor, expected None: there is no k to append")
    sizes: dict[str, int | None] = {"num_positions": None, "rotary_dim / 2": None}
    check_tensor("rotary_cos", cos, sizes, FLOAT_DTYPES, q)
    check_tensor("rotary_sin", sin, dict(zip(sizes, cos.shape, strict=True)), FLOAT_DTYPES, q)
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos.shape[1] is {cos.shape[1]}, expected at most {q.shape[-1] // 2}, half of "
            "q's head_dim"
        )
    last = max(before.tolist(), default=0) + max(k.shape[1], q.shape[1] if is_local else 1)
    if len(before) and last > cos.shape[0]:
        raise ValueError(
            f"rotary_cos.shape[0] is {cos.shape[0]}, expected {last} or more: positions of the call"
        )
    of_k = before[:, None] + torch.arange(k.shape[1], device=k.device)
    of_q = before[:, None].expand(-1, q.shape[1])
    if is_local:
        of_q = of_q + torch.arange(q.shape[1], device=q.device)
    return (
        apply_rotary(q, cos, sin, of_q, interleaved),
        apply_rotary(k, cos, sin, of_k, interleaved),
    )


def _cache_tables(
    k_cache: Tensor, q: Tensor, block_table: Tensor | None, cache_batch_idx: Tensor | None
) -> Tensor:
    """Return block tables; without pages a row of the cache is one block."""
    batch, index = q.shape[0], (torch.int32,)
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is a tensor, expected None: block_table is given")
        sizes = {"batch": batch, "max_blocks_per_seq": None}
        check_tensor("block_table", block_table, sizes, index, q)
        return block_table
    if cache_batch_idx is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"k_cache.shape[0] is {k_cache.shape[0]}, expected {batch}, as q's")
        return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]
    check_tensor("cache_batch_idx", cache_batch_idx, {"batch": batch}, index, q)
    return cache_batch_idx[:, None]


def _checked_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> int | None:
    """Return how many tokens each sequence gets, or refuse them."""
    if (k is None) != (v is None):
        raise ValueError(f"k is {_kind(k)} and v is {_kind(v)}, expected both or none")
    if k is None or v is None:
        return None
    sizes = {"batch": q.shape[0], "seqlen_new": None, "num_kv_heads": k_cache.shape[2]}
    shape = {**sizes, "head_dim": k_cache.shape[3]}
    check_tensor("k", k, shape, (q.dtype,), q, is_dense=True)
    shape = {**sizes, "seqlen_new": k.shape[1], "head_dim": v_cache.shape[3]}
    check_tensor("v", v, shape, (q.dtype,), q, is_dense=True)
    return k.shape[1]


def _lengths_before(
    k_cache: Tensor, tables: Tensor, cache_seqlens: int | Tensor | None, new: int | None
) -> Tensor:
    """Return how many tokens each sequence has in the cache before the call."""
    columns, size = tables.shape[1], k_cache.shape[1]
    room = columns * size - (new or 0)
    if cache_seqlens is None:
        if new is not None:
            raise ValueError("cache_seqlens is None, expected a number or a tensor: k is given")
        cache_seqlens = room
    if new and room < 0:
        raise ValueError(
            f"k.shape[1] is {new}, expected at most {columns * size}: the cache's room"
        )
    if not isinstance(cache_seqlens, Tensor):
        length = checked_int("cache_seqlens", cache_seqlens, 0, room)
        return torch.full(tables.shape[:1], length, dtype=torch.int32, device=k_cache.device)
    check_tensor("cache_seqlens", cache_seqlens, {"batch": len(tables)}, (torch.int32,), tables)
    why = f"a sequence has {columns} blocks of {size} tokens"
    check_lengths("cache_seqlens", cache_seqlens, room, why + f", {new} of them new" * bool(new))
    return cache_seqlens


def _checked_leftpad(
    leftpad: Tensor | None, before: Tensor, block_table: Tensor | None
) -> Tensor | None:
    """Return where sequences begin, or refuse it."""
    if leftpad is None:
        return None
    if block_table is not None:
        raise ValueError("cache_leftpad is a tensor, expected None: block_table is given")
    check_tensor("cache_leftpad", leftpad, {"batch": len(before)}, (torch.int32,), before)
    wrong = ((leftpad < 0) | (leftpad > before)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"cache_leftpad[{i}] is {int(leftpad[i])}, expected 0 to {int(before[i])}, the length"
        )
    return leftpad


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"
