"""The ops as functions: ``torch.ops.paged.*`` with documentation and defaults.

Each function calls its op and nothing else, so it costs a call and works in every graph that the op
works in. ``docs/semantics.md`` has the precise meanings, ``paged_ops.reference`` the same functions
in readable torch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

import paged_ops.ops.registration  # noqa: F401  (registers the ops)
from paged_ops.ops.checks import AttentionOptions


def _scales(key_scale: Tensor | None, value_scale: Tensor | None) -> dict[str, Any]:
    """Name the scales that are given: torch takes longer over an argument by name than this."""
    if key_scale is None and value_scale is None:
        return {}
    return {"key_scale": key_scale, "value_scale": value_scale}


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_ranges: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend query tokens to the keys and values of their sequences, read from the block pool.

    One call serves decode, prefill, chunked prefill, mixed batches and several-token decode:
    sequence i brings the query tokens ``query_start_loc[i]`` to ``query_start_loc[i + 1]``, which
    are the last ones of its ``seq_lens[i]`` tokens.

    Parameters
    ----------
    query : Tensor
        ``[num_tokens, num_heads, head_dim]``, float32, float16 or bfloat16. Query head h reads KV
        head ``h // (num_heads // num_kv_heads)``.
    key_cache, value_cache : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]``, both of query's dtype or both of one
        quantised dtype: int8, float8_e4m3fn or float8_e5m2. value_cache may have another head_dim,
        and be a view of key_cache (MLA). Any strides but a dense last dimension: every common
        layout is read in place.
    block_tables : Tensor
        ``[batch, max_blocks_per_seq]`` int32: the ids of each sequence's blocks, in order. Entries
        that no query token needs may hold anything.
    seq_lens : Tensor
        ``[batch]`` int32: tokens in the cache per sequence, those of this call included. What lies
        beyond is never looked at.
    query_start_loc : Tensor, optional
        ``[batch + 1]`` int32, from 0 on, never decreasing. None: one query token each. Rows past
        the last start, at most num_tokens, are padding: they see no key.
    scale : float, optional
        Factor of the dot products; None: ``head_dim ** -0.5``.
    causal : bool
        A query token at position p sees keys up to p. The last query token has the last position.
    sliding_window : int, optional
        A query token sees no key further back than this many, its own included.
    softcap : float
        0: off; else scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes : Tensor, optional
        ``[num_heads]``, float32 or query's dtype: adds ``slope * (key position - query position)``,
        in float32.
    sinks : Tensor, optional
        ``[num_heads]``, float32 or query's dtype: one more logit in each softmax's denominator, not
        scaled, not capped.
    key_scale, value_scale : Tensor, optional
        The scales of quantised caches, float32, both or none: an element stands for itself times
        its scale. ``[]``: one scale; ``[num_kv_heads]``: one per head; ``[num_blocks, block_size,
        num_kv_heads]``, of any strides: one per token and head. An int8 cache needs them; without
        them float8 elements stand for themselves.
    tree_mask : Tensor, optional
        ``[num_tokens, max_query_len]`` bool, for speculative decoding: whether a query token sees
        new token j of its sequence. It hides new tokens only, never context, and hides in addition
        to `causal`. Columns past a sequence's query tokens may hold anything. Goes with neither
        sliding_window nor alibi_slopes, which count positions.
    key_ranges : Tensor, optional
        ``[num_tokens, 2]`` int32: query token i sees none but the keys from ``key_ranges[i, 0]`` to
        ``key_ranges[i, 1] - 1`` of its sequence, and of these what `causal` and `sliding_window`
        leave. Any numbers are good. `build_key_ranges` makes them, for sequences that aren't all
        causal and for spans within a sequence that see both ways.
    out : Tensor, optional
        Where to write the result; must share no memory with the inputs, though it may lie between
        their elements.

    Returns
    -------
    Tensor
        ``[num_tokens, num_heads, head_dim of value_cache]``, query's dtype. A row that sees no key
        is 0.

    Raises
    ------
    RuntimeError
        An argument is refused; the message names it, its value and what was expected.
    NotImplementedError
        From backward: there is no gradient. At once where a forward-mode derivative is asked for,
        by a function transform, or of a call with `out`.

    See Also
    --------
    attention_with_lse : also returns the log-sum-exp, for `merge_states`.
    write_kv : puts keys and values into the pool.

    Notes
    -----
    Softmax and sums are in float32. The bits of an output row depend on its query, on what it sees
    and on the options; not on the rest of the batch, the number of threads, the block size or the
    placement of blocks. PagedAttention: Kwon et al., arXiv 2309.06180.

    Examples
    --------
    >>> import torch, paged_ops
    >>> pool = torch.randn(8, 2, 16, 4, 64)  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    >>> block_tables = torch.tensor([[5, 2], [7, 0]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([20, 3], dtype=torch.int32)
    >>> query = torch.randn(2, 8, 64)
    >>> paged_ops.attention(query, pool[:, 0], pool[:, 1], block_tables, seq_lens).shape
    torch.Size([2, 8, 64])
    """
    arguments = (query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    given: dict[str, Any] = _scales(key_scale, value_scale)
    if scale is not None:
        given["scale"] = scale
    if causal is not True:
        given["causal"] = causal
    if sliding_window is not None:
        given["sliding_window"] = sliding_window
    if softcap != 0.0:
        given["softcap"] = softcap
    if alibi_slopes is not None:
        given["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        given["sinks"] = sinks
    if tree_mask is not None:
        given["tree_mask"] = tree_mask
    if key_ranges is not None:
        given["key_ranges"] = key_ranges
    if out is None:
        return cast("Tensor", torch.ops.paged.attention.default(*arguments, **given))
    return cast("Tensor", torch.ops.paged.attention.out(*arguments, **given, out=out))


def attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """Attend like `attention`, and return the log-sum-exp of the scores as well.

    Parameters
    ----------
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc
        As in `attention`.
    **options
        As in `attention`: all that it takes by name but `out`.

    Returns
    -------
    output : Tensor
        ``[num_tokens, num_heads, head_dim of value_cache]``, query's dtype.
    lse : Tensor
        ``[num_tokens, num_heads]`` float32: the natural logarithm of the whole denominator, the
        sink included. A row that sees no key has -inf, or its sink where there is one.

    Raises
    ------
    RuntimeError
        An argument is refused; the message names it, its value and what was expected.

    See Also
    --------
    merge_states : merges results over disjoint sets of keys; only one of them may carry the sinks.

    Examples
    --------
    >>> import torch, paged_ops
    >>> pool = torch.zeros(4, 2, 16, 1, 8)
    >>> block_tables = torch.tensor([[3]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([4], dtype=torch.int32)
    >>> _, lse = paged_ops.attention_with_lse(
    ...     torch.ones(1, 1, 8), pool[:, 0], pool[:, 1], block_tables, seq_lens
    ... )
    >>> round(lse.exp().item(), 4)  # four keys of score 0
    4.0
    """
    result = torch.ops.paged.attention_with_lse.default(
        query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, **options
    )
    return cast("tuple[Tensor, Tensor]", result)


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
    """Write the keys and values of new tokens into their slots of the pool, in place.

    Parameters
    ----------
    key, value : Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, the caches' head_dim and, unless those are
        quantised, their dtype. They must share no memory with the caches. Where value_cache is a
        view of a quantised key_cache, value is the same view of key.
    key_cache, value_cache : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]``; written in place, whatever their
        strides.
    slot_mapping : Tensor
        ``[num_tokens]`` int64 or int32: slot = block * block_size + offset. -1 writes nothing. Of a
        slot given twice the last row stays, whole.
    key_scale, value_scale : Tensor, optional
        The scales of quantised caches, as in `attention`. Elements are ``x / scale``, rounded to
        nearest even; what is too large becomes the largest element, and NaN becomes 0 in int8.
        Scales per token and head are written too: a row's is its largest magnitude over the largest
        element (127, 448 or 57344), or NaN if the row isn't finite, so that all of it reads as NaN.

    Raises
    ------
    RuntimeError
        An argument is refused; the message names it, its value and what was expected. Nothing is
        written then.
    NotImplementedError
        An argument requires a gradient and gradients are enabled.

    Examples
    --------
    >>> import torch, paged_ops
    >>> pool = torch.zeros(4, 2, 16, 2, 8)
    >>> new = torch.ones(1, 2, 8)
    >>> paged_ops.write_kv(new, 2 * new, pool[:, 0], pool[:, 1], torch.tensor([2 * 16 + 5]))
    >>> pool[2, :, 5, 0, 0].tolist()
    [1.0, 2.0]
    """
    torch.ops.paged.write_kv.default(
        key, value, key_cache, value_cache, slot_mapping, **_scales(key_scale, value_scale)
    )


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two attention results of the same queries over disjoint sets of keys.

    The result is what one call over all the keys would give: the outputs weighted with
    ``exp(lse_i - lse)``, where ``lse = log(exp(lse_a) + exp(lse_b))``.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[num_tokens, num_heads, head_dim_v]``, one dtype.
    lse_a, lse_b : Tensor
        ``[num_tokens, num_heads]`` float32, natural logarithms. A state with -inf adds nothing,
        whatever its output holds; one with +inf leaves nothing to one that is finite.

    Returns
    -------
    out : Tensor
        ``[num_tokens, num_heads, head_dim_v]``, 0 where both lse are -inf.
    lse : Tensor
        ``[num_tokens, num_heads]`` float32.

    Raises
    ------
    RuntimeError
        An argument is refused; the message names it, its value and what was expected.

    See Also
    --------
    attention_with_lse : gives the states.

    Examples
    --------
    >>> import torch, paged_ops
    >>> out, lse = torch.ones(1, 1, 4), torch.zeros(1, 1)
    >>> merged, merged_lse = paged_ops.merge_states(out, lse, 3 * out, lse)
    >>> merged[0, 0, 0].item(), round(merged_lse.exp().item(), 4)
    (2.0, 2.0)
    """
    result = torch.ops.paged.merge_states.default(out_a, lse_a, out_b, lse_b)
    return cast("tuple[Tensor, Tensor]", result)


def copy_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Copy whole blocks inside the pool, in place: what copy-on-write asks for.

    Parameters
    ----------
    key_cache, value_cache : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]``; written in place.
    block_mapping : Tensor
        ``[num_copies, 2]`` int64 or int32: (source, destination). All sources are read before any
        destination is written, so chains and swaps work. No destination may stand twice.
    key_scale, value_scale : Tensor, optional
        The scales of quantised caches, as in `attention`. Those per token and head are copied too.

    Raises
    ------
    RuntimeError
        An argument is refused; the message names it, its value and what was expected. Nothing is
        written then.

    Examples
    --------
    >>> import torch, paged_ops
    >>> pool = torch.arange(3.0).view(3, 1, 1, 1, 1).repeat(1, 2, 4, 1, 8)
    >>> paged_ops.copy_blocks(pool[:, 0], pool[:, 1], torch.tensor([[0, 1], [1, 0]]))
    >>> pool[:, 0, 0, 0, 0].tolist()
    [1.0, 0.0, 2.0]
    """
    torch.ops.paged.copy_blocks.default(
        key_cache, value_cache, block_mapping, **_scales(key_scale, value_scale)
    )


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
    """Gather the keys and values of whole sequences into contiguous tensors.

    Parameters
    ----------
    key_cache, value_cache : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    block_tables : Tensor
        ``[batch, max_blocks_per_seq]`` int32.
    seq_lens : Tensor
        ``[batch]`` int32.
    num_tokens : int, optional
        The sum of seq_lens, where the caller knows it: a compiled graph then knows the result's
        size.
    key_scale, value_scale : Tensor, optional
        The scales of quantised caches, as in `attention`.

    Returns
    -------
    key, value : Tensor
        ``[sum of seq_lens, num_kv_heads, head_dim]``, one sequence after another: the caches'
        dtype, or float32 and times their scales from quantised caches.

    Raises
    ------
    RuntimeError
        An argument is refused; the message names it, its value and what was expected.

    Examples
    --------
    >>> import torch, paged_ops
    >>> pool = torch.randn(4, 2, 16, 2, 8)
    >>> block_tables = torch.tensor([[3, 1]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([17], dtype=torch.int32)
    >>> key, value = paged_ops.gather_kv(pool[:, 0], pool[:, 1], block_tables, seq_lens)
    >>> key.shape, torch.equal(key[16], pool[1, 0, 0])
    (torch.Size([17, 2, 8]), True)
    """
    result = torch.ops.paged.gather_kv.default(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        num_tokens=num_tokens,
        **_scales(key_scale, value_scale),
    )
    return cast("tuple[Tensor, Tensor]", result)
