"""FlashInfer's page tables, to and from block tables. FlashInfer itself isn't needed.

FlashInfer lists the pages of all sequences in one vector. Its caches are read in place, see
``docs/layout.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_ops.arguments import checked_int
from paged_ops.blocks.holding import NO_BLOCK


def to_block_tables(
    paged_kv_indptr: Tensor,
    paged_kv_indices: Tensor,
    paged_kv_last_page_len: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Turn FlashInfer's page table into what `paged_ops.attention` takes.

    Parameters
    ----------
    paged_kv_indptr : Tensor
        ``[batch + 1]`` int32: where the pages of each sequence begin in paged_kv_indices.
    paged_kv_indices : Tensor
        ``[paged_kv_indptr[-1]]`` int32: page ids; what comes after is not looked at.
    paged_kv_last_page_len : Tensor
        ``[batch]`` int32: tokens in each sequence's last page, 1 to page_size; without pages 0.
    page_size : int
        Tokens per page: the block_size.

    Returns
    -------
    block_tables : Tensor
        ``[batch, most pages]`` int32, filled up with -1.
    seq_lens : Tensor
        ``[batch]`` int32.

    Raises
    ------
    ValueError
        A tensor has another dtype or size, the offsets decrease, or a last page's length is out of
        its range.

    Examples
    --------
    >>> block_tables, seq_lens = to_block_tables(
    ...     torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([7, 3, 5, 1]).int(),
    ...     torch.tensor([2, 16], dtype=torch.int32), page_size=16,
    ... )
    >>> block_tables.tolist(), seq_lens.tolist()
    ([[7, 3, 5], [1, -1, -1]], [34, 16])
    """
    page_size = checked_int("page_size", page_size, 1)
    _refuse_shape("paged_kv_indptr", paged_kv_indptr, None)
    _refuse_shape("paged_kv_indices", paged_kv_indices, None)
    batch = len(paged_kv_indptr) - 1
    _refuse_shape("paged_kv_last_page_len", paged_kv_last_page_len, batch)
    pages = paged_kv_indptr.diff()
    _refuse_where("paged_kv_indptr", paged_kv_indptr[1:], pages < 0, "never to decrease")
    if batch < 0 or int(paged_kv_indptr[0]) or int(paged_kv_indptr[-1]) > len(paged_kv_indices):
        raise ValueError(
            f"paged_kv_indptr is {paged_kv_indptr.tolist()}, expected it to begin with 0 and end "
            f"with at most {len(paged_kv_indices)}, the length of paged_kv_indices"
        )
    last = paged_kv_last_page_len
    limit = torch.where(pages > 0, page_size, 0)
    wrong = (last < limit.clamp(max=1)) | (last > limit)
    _refuse_where("paged_kv_last_page_len", last, wrong, f"1 to {page_size}, or 0 without pages")
    width = int(pages.max()) if batch else 0
    held = torch.arange(width, device=pages.device) < pages[:, None]
    tables = torch.full(held.shape, NO_BLOCK, dtype=torch.int32, device=pages.device)
    tables.masked_scatter_(held, paged_kv_indices)
    return tables, ((pages - 1).clamp(min=0) * page_size + last).to(torch.int32)


def from_block_tables(
    block_tables: Tensor, seq_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn block tables into FlashInfer's page table.

    Parameters
    ----------
    block_tables : Tensor
        ``[batch, max_blocks_per_seq]`` int32.
    seq_lens : Tensor
        ``[batch]`` int32.
    block_size : int
        Tokens per block: the page_size.

    Returns
    -------
    paged_kv_indptr : Tensor
        ``[batch + 1]`` int32.
    paged_kv_indices : Tensor
        ``[paged_kv_indptr[-1]]`` int32.
    paged_kv_last_page_len : Tensor
        ``[batch]`` int32; 0 where a sequence is empty.

    Raises
    ------
    ValueError
        A tensor has another dtype or size, a sequence is longer than its table, or a block that it
        needs isn't there, because it has left a sliding window.

    Examples
    --------
    >>> from_block_tables(
    ...     torch.tensor([[7, 3, 5], [1, -1, -1]]).int(), torch.tensor([34, 16]).int(), 16
    ... )
    (tensor([0, 3, 4], dtype=torch.int32), tensor([7, 3, 5, 1], dtype=torch.int32), tensor([ 2, 16], dtype=torch.int32))
    """  # noqa: E501
    block_size = checked_int("block_size", block_size, 1)
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32:
        raise ValueError(
            f"block_tables is {block_tables.dtype} {list(block_tables.shape)}, expected "
            f"torch.int32 [batch, max_blocks_per_seq]"
        )
    _refuse_shape("seq_lens", seq_lens, block_tables.shape[0])
    capacity = block_tables.shape[1] * block_size
    wrong = (seq_lens < 0) | (seq_lens > capacity)
    _refuse_where("seq_lens", seq_lens, wrong, f"0 to {capacity}, what the table holds")
    pages = (seq_lens + block_size - 1) // block_size
    held = torch.arange(block_tables.shape[1], device=pages.device) < pages[:, None]
    indices = block_tables[held]
    _refuse_where("block_tables in use: entry", indices, indices < 0, "a block id")
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    last = seq_lens - (pages - 1).clamp(min=0) * block_size
    return indptr, indices, last.to(torch.int32)


def _refuse_shape(name: str, tensor: Tensor, length: int | None) -> None:
    if tensor.dim() != 1 or tensor.dtype != torch.int32 or length not in (None, len(tensor)):
        size = "any length" if length is None else f"[{length}]"
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, expected torch.int32 of {size}"
        )


def _refuse_where(name: str, values: Tensor, wrong: Tensor, expected: str) -> None:
    """Refuse the first value that is wrong."""
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(f"{name}[{i}] is {int(values[i])}, expected {expected}")
