"""Checks of a call without running it; tests/ops/test_bad_input.py holds them against the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_ops
from paged_ops import reference
from paged_ops.ops.checks import (
    AttentionOptions,
    check_attention,
    check_lengths_and_blocks,
    refuse_unknown,
)

INT = torch.int32


@pytest.mark.parametrize(
    ("seq_lens", "table"),
    [
        ([3, -1], [[0, 1], [2, 3]]),
        ([9, 3], [[0, 1], [2, 3]]),
        ([3, 8], [[0, 1], [2, 5]]),
        ([3, 5], [[0, 1], [2, -1]]),
    ],
)
def test_lengths_and_blocks_are_refused_in_the_words_of_the_op(
    seq_lens: list[int], table: list[list[int]]
) -> None:
    key_cache, value_cache = torch.zeros(2, 5, 4, 1, 8)
    index = torch.tensor(table, dtype=INT), torch.tensor(seq_lens, dtype=INT)
    with pytest.raises(RuntimeError) as of_the_op:
        paged_ops.gather_kv(key_cache, value_cache, *index)
    with pytest.raises(RuntimeError) as of_the_check:
        check_lengths_and_blocks("gather_kv", key_cache, *index)
    assert str(of_the_check.value) == str(of_the_op.value)


def test_blocks_that_no_token_needs_may_be_anything() -> None:
    index = torch.tensor([[1, 7], [-1, 9]], dtype=INT), torch.tensor([4, 0], dtype=INT)
    check_lengths_and_blocks("gather_kv", torch.zeros(2, 4, 1, 8), *index)


def test_what_is_no_tensor_is_refused_by_its_type() -> None:
    cache, table, lengths = torch.zeros(2, 4, 1, 8), torch.zeros(1, 1).int(), torch.ones(1).int()
    query: Any = [1.0]
    with pytest.raises(RuntimeError, match="paged::attention: query is list, expected a tensor"):
        check_attention("attention", query, cache, cache, table, lengths)


def test_the_options_are_those_of_the_schema() -> None:
    arguments = torch.ops.paged.attention.default._schema.arguments
    names = [argument.name for argument in arguments if argument.kwarg_only]
    assert names == list(AttentionOptions.__annotations__)


def test_an_unknown_option_is_refused_and_not_ignored() -> None:
    wrong: Any = {"softcp": 1.0}
    cache, table, lengths = torch.zeros(2, 4, 1, 8), torch.zeros(1, 1).int(), torch.ones(1).int()
    arguments = torch.zeros(1, 1, 8), cache, cache, table, lengths
    for function in (
        paged_ops.attention,
        paged_ops.attention_with_lse,
        reference.attention,
        reference.attention_with_lse,
    ):
        with pytest.raises((TypeError, RuntimeError), match="softcp"):
            function(*arguments, **wrong)
    with pytest.raises(TypeError, match="tree_mask"):
        refuse_unknown("a function", {"tree_mask": None}, unserved=("tree_mask",))
