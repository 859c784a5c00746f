"""FlashAttention 3's functions, under the names of its module and of its arguments.

They follow the documentation of flash-attn 3, on the CPU. A page may have any number of tokens and
a head any size, with `qv` and float8 too. What only tells FlashAttention's scheduler how to cut the
work (`max_seqlen_q`, `scheduler_metadata`, `num_splits`, `pack_gqa`, `sm_margin`, `deterministic`)
changes no result and is taken as it comes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops.arguments import checked_int
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
from paged_ops.integrations.flash_variants import (
    FLOAT8,
    check_inputs,
    checked_queries,
    with_descales,
    with_qv,
)
from paged_ops.integrations.refusals import check_blocks, check_lengths, check_offsets, check_tensor
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.windows import Cut, Keys, Window, check_cut


@refusing_as_flash_attn
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values to a cache, and attend to all of it.

    Parameters
    ----------
    q : Tensor
        ``[batch, seqlen, num_heads, head_dim]``, or ``[total_q, num_heads, head_dim]`` with
        cu_seqlens_q; float32, float16, bfloat16 or float8_e4m3fn.
    k_cache, v_cache : Tensor
        ``[num_pages, page_size, num_kv_heads, head_dim]`` with a page_table, else
        ``[batch_cache, seqlen_cache, num_kv_heads, head_dim]``; q's dtype. The head_dim of v_cache
        may be another. Changed in place where k and v are given.
    k, v : Tensor, optional
        ``[batch, seqlen_new, num_kv_heads, head_dim]``, or with cu_seqlens_k_new
        ``[total_k_new, num_kv_heads, head_dim]``: stored from cache_seqlens on. Both or none.
    qv : Tensor, optional
        As q, with the head_dim of v_cache: a score is ``dot(q, key) + dot(qv, value)``, as in
        multi-head latent attention, where v_cache is the latent. Where the rows of v_cache and
        k_cache lie side by side in one tensor, in either order, they are read in place; else
        they are copied.
    rotary_cos, rotary_sin : Tensor, optional
        ``[num_positions, rotary_dim / 2]``, only with k and v: k is turned by the angles of its
        positions; so is q, if causal, in a window or in chunks, and otherwise all of q by those of
        the first.
    cache_seqlens : int or Tensor, optional
        ``[batch]`` int32: tokens in the cache before the call. None, without k: all that fit.
    cache_batch_idx : Tensor, optional
        ``[batch]`` int32: the row of the cache, or of page_table, for each sequence.
    cache_leftpad : Tensor, optional
        ``[batch]`` int32: where the sequence begins in its row of the cache, or in its pages.
    page_table : Tensor, optional
        ``[batch_cache, max_pages_per_seq]`` int32.
    cu_seqlens_q, cu_seqlens_k_new : Tensor, optional
        ``[batch + 1]`` int32: where each sequence begins in q, and in k and v.
    rotary_seqlens : Tensor, optional
        ``[batch]`` int32: the position of the first new token. None: cache_seqlens.
    q_descale, k_descale, v_descale : Tensor, optional
        ``[batch, num_kv_heads]`` float32, only for float8: what an element is times. None: 1.
    softmax_scale : float, optional
        None: ``head_dim ** -0.5``, that of qv counted in.
    causal : bool
        A query sees keys up to its own; the last query is the last token.
    window_size : (int, int)
        (left, right): a query at position p sees keys p - left to p + right; -1: no limit.
    attention_chunk : int
        A query sees the keys of its own chunk of so many tokens, counted from cache_leftpad on.
        0: all.
    softcap : float
        0: off.
    rotary_interleaved : bool
        Whether neighbouring elements are turned together, or those half of rotary_dim apart.
    max_seqlen_q, scheduler_metadata, num_splits, pack_gqa, sm_margin
        Of no effect.
    return_softmax_lse : bool
        Whether to return the log-sum-exp as well.

    Returns
    -------
    out : Tensor
        As q with the head_dim of v_cache; bfloat16 for float8. A row that sees no key is 0.
    softmax_lse : Tensor
        Only if asked for: ``[batch, num_heads, seqlen]`` float32, or ``[num_heads, total_q]``; -inf
        where a row sees no key.

    Raises
    ------
    RuntimeError, TypeError
        An argument is refused; nothing was written.

    Examples
    --------
    >>> import torch
    >>> from paged_ops.integrations.flash_attn_interface import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 32)
    >>> page_table = torch.tensor([[3, 1], [6, 0]], dtype=torch.int32)
    >>> cu_seqlens_q = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> cache_seqlens = torch.tensor([20, 5], dtype=torch.int32)
    >>> flash_attn_with_kvcache(
    ...     torch.randn(4, 4, 32), k_cache, v_cache, cache_seqlens=cache_seqlens,
    ...     page_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=3, causal=True,
    ... ).shape
    torch.Size([4, 4, 32])
    """
    queries = checked_queries(q, cu_seqlens_q, None)
    check_inputs(queries.q, ("k_cache", k_cache), ("v_cache", v_cache), qv, 4)
    batch = queries.batch
    window = Window.of(window_size, causal)
    chunk = checked_int("attention_chunk", attention_chunk, 0)
    is_local = window.is_local or chunk > 0
    options = score_options(softmax_scale, softcap, None, batch, queries.q)
    named = "the cache" if page_table is None else "page_table"
    tables = cache_tables(k_cache, batch, queries.q, named, page_table, cache_batch_idx)
    new = checked_new(queries.q, batch, k_cache, v_cache, k, v, cu_seqlens_k_new)
    counts = None if new is None else new.counts
    before = lengths_before(k_cache, tables, cache_seqlens, counts, named)
    cut = Cut(checked_leftpad(cache_leftpad, before), chunk)
    seq_lens = before if counts is None else before + counts
    named = "cache_batch_idx" if page_table is None else "page_table"
    check_blocks(named, tables, seq_lens, *k_cache.shape[:2])
    window = window.settled(queries.starts)
    check_cut(queries.q, window, cut, None)
    begins = _rotary_begins(rotary_seqlens, before)
    keys = Keys(k_cache, v_cache, tables, seq_lens)
    if rotary_cos is not None and queries.q.dtype == FLOAT8:
        raise ValueError(f"rotary_cos is a tensor, expected None: q is {FLOAT8}")
    turn = checked_rotary(
        rotary_cos, rotary_sin, begins, rotary_interleaved, queries.q, new is not None
    )
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    query, finish = with_descales(queries, descales, keys, options)
    if new is not None and turn is not None:
        query, new = rotated(query, queries.counts, new, turn, is_local)
    if new is not None:
        append(new, keys, before)
    query, keys = with_qv(queries, query, qv, keys, options)
    attended = attend(query, queries.starts, keys, window, options, cut, is_paged=True)
    out, lse = queries.shaped(*finish(*attended))
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
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend from sequences of different lengths, whose keys lie one sequence after another.

    Parameters
    ----------
    q, k, v : Tensor
        ``[total, num_heads, head_dim]``, float32, float16, bfloat16 or float8_e4m3fn.
    cu_seqlens_q, cu_seqlens_k : Tensor
        ``[batch + 1]`` int32: where each sequence begins, in q and in its keys.
    seqused_q, seqused_k : Tensor, optional
        ``[batch]`` int32: how many rows of each sequence count, from its first on. Rows of q that
        don't are as if they saw no key.
    softmax_scale, causal, qv, window_size, attention_chunk, softcap
        As `flash_attn_with_kvcache`.
    q_descale, k_descale, v_descale
        As there, too.
    max_seqlen_q, max_seqlen_k, num_splits, pack_gqa, deterministic, sm_margin
        Of no effect.
    return_attn_probs : bool
        Whether to return the log-sum-exp as well.

    Returns
    -------
    out : Tensor
        ``[total_q, num_heads, head_dim of v]``; bfloat16 for float8. A row that sees no key is 0.
    softmax_lse : Tensor
        Only if asked for: ``[num_heads, total_q]`` float32; -inf where a row sees no key.

    Raises
    ------
    RuntimeError, TypeError
        An argument is refused.

    Examples
    --------
    >>> import torch
    >>> from paged_ops.integrations.flash_attn_interface import flash_attn_varlen_func
    >>> starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> q, k, v = torch.randn(8, 4, 32), torch.randn(8, 2, 32), torch.randn(8, 2, 32)
    >>> used = torch.tensor([3, 4], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, used, used, causal=True).shape
    torch.Size([8, 4, 32])
    """
    queries = checked_queries(q, cu_seqlens_q, seqused_q)
    k, v = dense(k), dense(v)
    check_inputs(queries.q, ("k", k), ("v", v), qv, 3)
    check_offsets("cu_seqlens_k", cu_seqlens_k, queries.batch, queries.q, len(k))
    seq_lens = cu_seqlens_k.diff()
    if seqused_k is not None:
        check_tensor("seqused_k", seqused_k, {"batch": queries.batch}, (torch.int32,), queries.q)
        check_lengths("seqused_k", seqused_k, seq_lens.tolist(), "cu_seqlens_k has no more")
        seq_lens = seqused_k
    window = Window.of(window_size, causal).settled(queries.starts)
    cut = Cut(None, checked_int("attention_chunk", attention_chunk, 0))
    check_cut(queries.q, window, cut, None)
    options = score_options(softmax_scale, softcap, None, queries.batch, queries.q)
    tables = run_tables(cu_seqlens_k[:-1], seq_lens)
    keys = Keys(as_blocks(k), as_blocks(v), tables, seq_lens)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    query, finish = with_descales(queries, descales, keys, options)
    query, keys = with_qv(queries, query, qv, keys, options)
    attended = attend(query, queries.starts, keys, window, options, cut, is_paged=True)
    out, lse = queries.shaped(*finish(*attended))
    return (out, lse.contiguous()) if return_attn_probs else out


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> Tensor:
    """Return what `flash_attn_with_kvcache` takes as scheduler_metadata: here there is none.

    Returns
    -------
    Tensor
        An empty one, int32.
    """
    return torch.empty(0, dtype=torch.int32)


def _rotary_begins(rotary_seqlens: Tensor | None, before: Tensor) -> Tensor:
    """Return the position of each sequence's first new token, or refuse it."""
    if rotary_seqlens is None:
        return before
    check_tensor("rotary_seqlens", rotary_seqlens, {"batch": len(before)}, (torch.int32,), before)
    check_lengths("rotary_seqlens", rotary_seqlens, 2**31 - 1, "a position")
    return rotary_seqlens
