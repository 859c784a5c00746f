"""FlashAttention's functions over a KV cache, under its argument names.

They follow the documentation of flash-attn 2.8, on every device that `paged_ops` serves, and in
float32 as well. Other than there, a page may have any number of tokens and a head any size. What
can't be honoured is refused, with the argument's name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops.arguments import checked_int
from paged_ops.functional import write_kv
from paged_ops.integrations.rotary import apply_rotary
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.windows import Keys, Window, attention_in_window
from paged_ops.ops.checks import AttentionOptions, check_attention, check_lengths_and_blocks


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
    batch, seqlen = _checked_query(q)
    window = Window.of(window_size, causal)
    checked_int("num_splits", num_splits, 0)
    if (k is None) != (v is None):
        raise ValueError(f"k is {_kind(k)} and v is {_kind(v)}, expected both or none")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: expected both or none")
    tables = _cache_tables(k_cache, batch, block_table, cache_batch_idx)
    before = _lengths_before(k_cache, tables, cache_seqlens, k is not None)
    leftpad = _checked_leftpad(cache_leftpad, before, block_table)
    seq_lens = before if k is None else before + k.shape[1]
    keys = Keys(k_cache, v_cache, tables, seq_lens)
    options = _options(softmax_scale, softcap, alibi_slopes)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    _refuse_before_writing(q, starts, keys, window, options)
    if rotary_cos is not None and rotary_sin is not None:
        if k is None:
            raise ValueError("rotary_cos is a tensor, expected None: there is no k to append")
        q, k = _rotated(q, k, rotary_cos, rotary_sin, before, window.is_local, rotary_interleaved)
    if k is not None and v is not None:
        _append(k, v, keys, before)
    out, lse = _attend(q.flatten(0, 1), starts, keys, leftpad, window, options)
    out = out.view(batch, seqlen, *out.shape[1:])
    lse = lse.view(batch, seqlen, -1).transpose(1, 2)
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
    seq_lens = cu_seqlens_k.diff()
    _refuse_longer("max_seqlen_q", max_seqlen_q, cu_seqlens_q.diff())
    _refuse_longer("max_seqlen_k", max_seqlen_k, seq_lens)
    if block_table is None:
        tables = run_tables(cu_seqlens_k[:-1], seq_lens)
        keys = Keys(as_blocks(k), as_blocks(v), tables, seq_lens)
    else:
        keys = Keys(k, v, block_table, seq_lens)
    options = _options(softmax_scale, softcap, alibi_slopes)
    _refuse_before_writing(q, cu_seqlens_q, keys, window, options)
    out, lse = _attend(q, cu_seqlens_q, keys, None, window, options)
    return (out, lse.t().contiguous(), None) if return_attn_probs else out


def _options(scale: float | None, softcap: float, slopes: Tensor | None) -> AttentionOptions:
    return {"scale": scale, "softcap": softcap, "alibi_slopes": slopes}


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
    if leftpad is None and (slopes is None or slopes.dim() == 1):
        return attention_in_window(query, starts, keys, window, options)
    batch = keys.seq_lens.shape[0]
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
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    before: Tensor,
    is_local: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return q and k turned by the angles of their positions."""
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos has shape {list(cos.shape)} and rotary_sin {list(sin.shape)}, expected "
            f"one of [num_positions, at most {q.shape[-1] // 2}] for both"
        )
    last = int(before.max()) + max(k.shape[1], q.shape[1] if is_local else 1)
    if last > cos.shape[0]:
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
    k_cache: Tensor, batch: int, block_table: Tensor | None, cache_batch_idx: Tensor | None
) -> Tensor:
    """Return block tables; without pages a row of the cache is one block."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is a tensor, expected None: block_table is given")
        return block_table
    if cache_batch_idx is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"k_cache.shape[0] is {k_cache.shape[0]}, expected {batch}, as q's")
        return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]
    return cache_batch_idx[:, None]


def _lengths_before(
    k_cache: Tensor, tables: Tensor, cache_seqlens: int | Tensor | None, appends: bool
) -> Tensor:
    """Return how many tokens each sequence has in the cache before the call."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens is None, expected a number or a tensor: k is given")
        cache_seqlens = tables.shape[1] * k_cache.shape[1]
    length = checked_int("cache_seqlens", cache_seqlens, 0, tables.shape[1] * k_cache.shape[1])
    return torch.full(tables.shape[:1], length, dtype=torch.int32, device=k_cache.device)


def _checked_leftpad(
    leftpad: Tensor | None, before: Tensor, block_table: Tensor | None
) -> Tensor | None:
    """Return where sequences begin, or refuse it."""
    if leftpad is None:
        return None
    if block_table is not None:
        raise ValueError("cache_leftpad is a tensor, expected None: block_table is given")
    if leftpad.shape != before.shape or leftpad.dtype != torch.int32:
        raise ValueError(
            f"cache_leftpad is {leftpad.dtype} {list(leftpad.shape)}, expected torch.int32 "
            f"{list(before.shape)}"
        )
    wrong = ((leftpad < 0) | (leftpad > before)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"cache_leftpad[{i}] is {int(leftpad[i])}, expected 0 to {int(before[i])}, the length"
        )
    return leftpad


def _checked_query(q: Tensor) -> tuple[int, int]:
    """Return batch and queries per sequence."""
    if q.dim() != 4:
        raise ValueError(
            f"q has {q.dim()} dimensions, expected 4: [batch, seqlen, num_heads, head_dim]"
        )
    return q.shape[0], q.shape[1]


def _refuse_before_writing(
    query: Tensor, starts: Tensor, keys: Keys, window: Window, options: AttentionOptions
) -> None:
    """Refuse now what attention would refuse after new keys were written."""
    slopes = options.get("alibi_slopes")
    window.settled(starts, slopes)
    keys.refuse_another_dtype(query)
    rows = query.flatten(0, -3)
    if slopes is not None and slopes.dim() == 2:
        if slopes.shape[0] != keys.seq_lens.shape[0]:
            raise ValueError(
                f"alibi_slopes.shape[0] is {slopes.shape[0]}, expected {keys.seq_lens.shape[0]}"
            )
        slopes = slopes[0] if len(slopes) else None
    shared: AttentionOptions = {**options, "alibi_slopes": slopes}
    check_attention(
        "attention",
        rows,
        keys.key_cache,
        keys.value_cache,
        keys.block_tables,
        keys.seq_lens,
        starts,
        **shared,
    )
    check_lengths_and_blocks("attention", keys.key_cache, keys.block_tables, keys.seq_lens)


def _refuse_longer(name: str, limit: int, lengths: Tensor) -> None:
    """Refuse a limit that a sequence exceeds."""
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > limit:
        raise ValueError(f"{name} is {limit}, expected {longest} or more, the longest sequence")


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"
