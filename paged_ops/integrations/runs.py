"""Rows that lie one sequence after another, as a pool of one-token blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def as_blocks(rows: Tensor) -> Tensor:
    """View ``[num_rows, num_kv_heads, head_dim]`` as blocks of one token.

    Returns
    -------
    Tensor
        ``[num_rows, 1, num_kv_heads, head_dim]``.
    """
    return rows[:, None]


def run_tables(starts: Tensor, seq_lens: Tensor) -> Tensor:
    """Return the block tables of sequences whose rows are a run each.

    Parameters
    ----------
    starts, seq_lens : Tensor
        ``[batch]`` int32: where each run begins and how many rows are in use.

    Returns
    -------
    Tensor
        ``[batch, longest]`` int32.

    Examples
    --------
    >>> starts, seq_lens = torch.tensor([[0, 3], [3, 2]], dtype=torch.int32)
    >>> run_tables(starts, seq_lens).tolist()  # what lies beyond a length is never looked at
    [[0, 1, 2], [3, 4, 5]]
    """
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    return starts[:, None] + torch.arange(longest, dtype=torch.int32, device=starts.device)
