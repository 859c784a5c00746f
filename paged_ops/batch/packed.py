"""Attention without a cache: keys and values that lie one sequence after another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from paged_ops.functional import attention
from paged_ops.ops.checks import AttentionOptions


class PackedKeys(NamedTuple):
    """Keys and values of a packed batch as a pool of blocks: what `paged_ops.attention` takes."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


def view_packed(
    key: Tensor, value: Tensor, key_start_loc: Tensor, *, max_seq_len: int | None = None
) -> PackedKeys:
    """View packed keys and values as a pool; nothing is copied.

    A block begins at each token, and blocks overlap, so a sequence may begin anywhere: that is good
    for reading, and refused by whatever writes a pool. They are as long as the last sequence, the
    most with which none reaches past the tensor's end.

    Parameters
    ----------
    key, value : Tensor
        ``[num_keys, num_kv_heads, head_dim]`` and ``[num_keys, num_kv_heads, head_dim_v]``.
    key_start_loc : Tensor
        ``[batch + 1]`` int32, from 0 on, never decreasing, to at most num_keys: where the keys of
        each sequence begin.
    max_seq_len : int, optional
        The keys of the longest sequence. With it no value of key_start_loc is read, so that this
        works in a compiled graph; blocks then have one token. None: they are read.

    Returns
    -------
    PackedKeys
        key_cache, value_cache, block_tables and seq_lens, for `paged_ops.attention`.

    Examples
    --------
    >>> key = value = torch.randn(8, 1, 16)
    >>> starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    >>> keys = view_packed(key, value, starts)
    >>> keys.key_cache.shape, keys.block_tables.tolist()  # five keys from 0 on, three from 5 on
    (torch.Size([6, 3, 1, 16]), [[0, 3], [5, 8]])
    """
    seq_lens = key_start_loc.diff()
    size, longest = 1, max_seq_len
    if longest is None:
        lengths = seq_lens.tolist()
        longest = max(lengths, default=0)
        size = next((length for length in reversed(lengths) if length > 0), 1)
    columns = torch.arange(0, longest, size, dtype=torch.int32, device=key_start_loc.device)
    tables = key_start_loc[:-1, None] + columns
    return PackedKeys(_overlapping(key, size), _overlapping(value, size), tables, seq_lens)


def _overlapping(rows: Tensor, size: int) -> Tensor:
    """View rows as blocks of `size`, one from each row on that has as many behind it."""
    if size == 1:
        return rows[:, None]
    shape = max(len(rows) - size + 1, 0), size, *rows.shape[1:]
    strides = rows.stride(0), *rows.stride()
    return rows.as_strided(shape, strides, rows.storage_offset())


def attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    *,
    max_seq_len: int | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attend without a cache: the layers of an encoder, and cross attention to one.

    Parameters
    ----------
    query : Tensor
        ``[num_tokens, num_heads, head_dim]``.
    key, value, max_seq_len
        As in `view_packed`.
    query_start_loc, key_start_loc : Tensor
        ``[batch + 1]`` int32: where each sequence begins, in query and in key. None: the same.
    **options
        As in `paged_ops.attention`, but causal is False unless given.

    Returns
    -------
    Tensor
        ``[num_tokens, num_heads, head_dim_v]``.

    Raises
    ------
    RuntimeError
        An argument is refused.

    Examples
    --------
    >>> query, key, value = torch.randn(3, 8, 2, 16)
    >>> attention_packed(query, key, value, torch.tensor([0, 5, 8], dtype=torch.int32)).shape
    torch.Size([8, 2, 16])
    """
    starts = query_start_loc if key_start_loc is None else key_start_loc
    keys = view_packed(key, value, starts, max_seq_len=max_seq_len)
    options.setdefault("causal", False)
    return attention(query, *keys, query_start_loc, **options)
