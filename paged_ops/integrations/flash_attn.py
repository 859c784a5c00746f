"""FlashAttention's functions over a KV cache, under its argument names.

They follow the documentation of flash-attn 2.8, on every device that `paged_ops` serves, and in
float32 as well. Other than there, a page may have any number of tokens and a head any size. What
can't be honoured is refused, with the argument's name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops.arguments import INT32_MAX, checked_int
from paged_ops.integrations.flash_cache import (
    append,
    attend,
    cache_tables,
    checked_leftpad,
    checked_new,
    checked_rotary,
    dense,
    lengths_before,
    refusing_as_flash_attn,
    rotated,
    score_options,
)
from paged_ops.integrations.refusals import (
    check_blocks,
    check_heads,
    check_limit,
    check_offsets,
    check_tables,
)
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.windows import WHOLE, Cut, Keys, Window, check_cut


@refusing_as_flash_attn
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
        ``[num_heads]`` or ``[batch, num_heads]`` float32: adds -slope times the distance.
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
    RuntimeError, TypeError
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
    q = dense(q)
    check_heads(("q", q), ("k_cache", k_cache), ("v_cache", v_cache), 4)
    if q.dim() != 4:
        raise ValueError(
            f"q has {q.dim()} dimensions, expected 4: [batch, seqlen, num_heads, head_dim]"
        )
    batch, seqlen, num_heads, _ = q.shape
    window = Window.of(window_size, causal)
    is_local = window.is_local
    options = score_options(softmax_scale, softcap, alibi_slopes, batch, q)
    checked_int("num_splits", num_splits, 0)
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx is a tensor, expected None: block_table is given")
    if block_table is not None and cache_leftpad is not None:
        raise ValueError("cache_leftpad is a tensor, expected None: block_table is given")
    named = "the cache" if block_table is None else "block_table"
    tables = cache_tables(k_cache, batch, q, named, block_table, cache_batch_idx)
    new = checked_new(q, batch, k_cache, v_cache, k, v, None)
    counts = None if new is None else new.counts
    before = lengths_before(k_cache, tables, cache_seqlens, counts, named)
    cut = Cut(checked_leftpad(cache_leftpad, before))
    seq_lens = before if counts is None else before + counts
    keys = Keys(k_cache, v_cache, tables, seq_lens)
    named = "cache_batch_idx" if block_table is None else "block_table"
    check_blocks(named, tables, seq_lens, *k_cache.shape[:2])
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    window = window.settled(starts)
    check_cut(q, window, WHOLE, alibi_slopes)
    query = q.flatten(0, 1)
    angles = rotary_cos, rotary_sin, before, rotary_interleaved
    rotary = checked_rotary(*angles, q, new is not None)
    if new is not None and rotary is not None:
        query, new = rotated(query, starts.diff(), new, rotary, is_local)
    if new is not None:
        append(new, keys, before)
    out, lse = attend(query, starts, keys, window, options, cut, block_table is not None)
    out = out.view(batch, seqlen, num_heads, v_cache.shape[-1])
    lse = lse.view(batch, seqlen, num_heads).transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


@refusing_as_flash_attn
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
        ``[num_heads]`` or ``[batch, num_heads]`` float32: adds -slope times the distance.
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
    RuntimeError, TypeError
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
    q, k, v = dense(q), dense(k), dense(v)
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
    options = score_options(softmax_scale, softcap, alibi_slopes, batch, q)
    window = window.settled(cu_seqlens_q)
    check_cut(q, window, WHOLE, alibi_slopes)
    out, lse = attend(q, cu_seqlens_q, keys, window, options, WHOLE, block_table is not None)
    return (out, lse.t().contiguous(), None) if return_attn_probs else out
