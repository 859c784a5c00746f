"""Attention without a cache: packed keys, viewed as a pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from paged_ops import reference
from paged_ops.batch import attention_packed, view_packed
from tests.support.checks import same_bits


def starts_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


@given(st.data(), st.lists(st.integers(0, 9), max_size=4), st.integers(0, 3))
def test_the_view_has_the_result_of_blocks_of_one_token(
    data: st.DataObject, key_lens: list[int], spare: int
) -> None:
    torch.manual_seed(len(key_lens))
    query_lens = [data.draw(st.integers(0, 9)) for _ in key_lens]
    buffer = torch.randn(2, sum(key_lens) + spare, 3, 16)
    key, value = buffer[:, :, 1:].unbind()  # rows that don't lie side by side
    query, starts, key_starts = (
        torch.randn(sum(query_lens), 4, 16),
        starts_of(query_lens),
        starts_of(key_lens),
    )
    keys = view_packed(key, value, key_starts)
    assert keys.key_cache.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    causal = data.draw(st.booleans())
    got = attention_packed(query, key, value, starts, key_starts, causal=causal, softcap=3.0)
    one = view_packed(key, value, key_starts, max_seq_len=max(key_lens, default=0))
    assert same_bits(got, paged_ops.attention(query, *one, starts, causal=causal, softcap=3.0))
    want = reference.attention(
        query.double(),
        key[:, None].double(),
        value[:, None].double(),
        *one[2:],
        starts,
        causal=causal,
        softcap=3.0,
    )
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_queries_and_keys_of_an_encoder_begin_at_the_same_places() -> None:
    rows, starts = torch.randn(3, 12, 2, 16), starts_of([5, 7])
    got = attention_packed(*rows, starts)
    assert same_bits(got, attention_packed(*rows, starts, starts))
    for begin, end in ((0, 5), (5, 12)):
        q, k, v = rows[:, begin:end].transpose(1, 2)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(got[begin:end], want.transpose(0, 1))


def test_starts_past_the_keys_are_refused() -> None:
    rows = torch.randn(3, 8, 2, 16)
    for max_seq_len in (None, 6):
        with pytest.raises(RuntimeError, match=r"block_tables\[1, \d\] is"):
            attention_packed(*rows, starts_of([4, 4]), starts_of([4, 6]), max_seq_len=max_seq_len)


def test_a_pool_of_overlapping_blocks_is_never_written() -> None:
    rows = torch.randn(2, 8, 2, 16)
    caches = view_packed(*rows, starts_of([4, 4]))[:2]
    with pytest.raises(RuntimeError, match="must not share memory"):
        paged_ops.write_kv(*rows, *caches, torch.arange(8))


def test_a_graph_reads_no_value_where_the_longest_sequence_is_given() -> None:
    def layer(*rows: Tensor) -> Tensor:
        return attention_packed(*rows, max_seq_len=6)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lens in ([3, 5], [6, 2]):
        rows = torch.randn(3, 8, 2, 16)
        starts = starts_of(lens)
        assert same_bits(compiled(*rows, starts), attention_packed(*rows, starts))
