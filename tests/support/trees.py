"""Trees of draft tokens, as speculative decoding attends to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_mask(query_lens: Sequence[int], seed: int = 0, spare_columns: int = 1) -> Tensor:
    """Return a mask under which each new token sees itself and its ancestors in a random tree.

    Each sequence has a tree, or several, of its own. Columns past its tokens hold garbage.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = max(query_lens, default=0) + spare_columns
    mask = torch.rand(sum(query_lens), columns, generator=generator) < 0.5
    start = 0
    for length in query_lens:
        mask[start : start + length, :length] = False
        for token in range(length):
            # -1: a root, which follows the context.
            parent = int(torch.randint(-1, token, (), generator=generator)) if token else -1
            if parent >= 0:
                mask[start + token] |= mask[start + parent]
            mask[start + token, token] = True
            mask[start + token, length:] = torch.rand(columns - length, generator=generator) < 0.5
        start += length
    return mask
