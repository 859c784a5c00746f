"""FlashInfer's page tables, there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_ops.integrations.flashinfer import from_block_tables, to_block_tables


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(
    st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9), st.randoms(use_true_random=False)
)
def test_there_and_back_is_the_same(lens: list[int], size: int, random: Any) -> None:
    """Each token's page is what FlashInfer documents: indices[indptr[i] + t // page_size]."""
    pages = [-(-n // size) for n in lens]
    width = max(pages, default=0) + random.randint(0, 2)
    tables = torch.full((len(lens), width), -1, dtype=torch.int32)
    for i, count in enumerate(pages):
        tables[i, :count] = int32(random.sample(range(100), count))
    indptr, indices, last = from_block_tables(tables, int32(lens), size)
    for i, n in enumerate(lens):
        for t in range(n):
            assert indices[indptr[i] + t // size] == tables[i, t // size]
        assert n == max(0, int(indptr[i + 1] - indptr[i]) - 1) * size + int(last[i])
        assert (1 <= last[i] <= size) if n else last[i] == 0
    spare = torch.cat([indices, int32([7, 7])])  # buffers are longer than what is in use
    back, seq_lens = to_block_tables(indptr, spare, last, size)
    assert seq_lens.tolist() == lens
    assert torch.equal(back, tables[:, : max(pages, default=0)])
    assert {t.dtype for t in (indptr, indices, last, back, seq_lens)} == {torch.int32}


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 2, 1], [5, 6], [1, 1], r"paged_kv_indptr\[1\] is 1, expected never to decrease"),
        ([1, 2], [5, 6], [1], "expected it to begin with 0"),
        ([0, 3], [5, 6], [1], "end with at most 2"),
        ([0, 2], [5, 6], [0], r"paged_kv_last_page_len\[0\] is 0, expected 1 to 4"),
        ([0, 2], [5, 6], [5], r"paged_kv_last_page_len\[0\] is 5"),
        ([0, 0], [], [1], r"paged_kv_last_page_len\[0\] is 1, expected 1 to 4, or 0 without"),
        ([0, 2], [5, 6], [1, 1], r"paged_kv_last_page_len is torch.int32 \[2\]"),
    ],
)
def test_wrong_page_tables_are_refused(
    indptr: list[int], indices: list[int], last: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        to_block_tables(int32(indptr), int32(indices), int32(last), 4)


@pytest.mark.parametrize(
    ("tables", "lens", "message"),
    [
        (int32([[3, -1]]), int32([5]), "entry.*is -1, expected a block id"),
        (int32([[3, 4]]), int32([9]), r"seq_lens\[0\] is 9, expected 0 to 8"),
        (int32([[3, 4]]), int32([-1]), r"seq_lens\[0\] is -1"),
        (torch.tensor([[3, 4]]), int32([5]), "block_tables is torch.int64"),
        (int32([[3, 4]]), torch.tensor([5]), "seq_lens is torch.int64"),
    ],
)
def test_wrong_block_tables_are_refused(
    tables: torch.Tensor, lens: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        from_block_tables(tables, lens, 4)
