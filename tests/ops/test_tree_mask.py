"""Tree masks: which new tokens a row sees, in speculative decoding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from tests.support import strategies
from tests.support.checks import assert_accurate, same_bits
from tests.support.sequences import DTYPES, Placement, Sequences, make_sequences, place, run
from tests.support.strategies import placements
from tests.support.trees import tree_mask

assert paged_ops  # Loads the library that registers torch.ops.paged.


@st.composite
def trees(draw: st.DrawFn) -> Sequences:
    """Draw sequences whose new tokens are trees, or see each other at random."""
    batch = draw(st.integers(1, 3))
    query_lens = [draw(st.integers(0, 40)) for _ in range(batch)]
    contexts = st.one_of(st.just(0), st.integers(0, 40), st.sampled_from([500, 511, 512, 600]))
    seq_lens = [
        max(0, m + draw(contexts) - draw(st.sampled_from([0, 0, 0, 3]))) for m in query_lens
    ]
    group, num_kv_heads = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 2))
    seed = draw(st.integers(0, 2**16))
    mask = tree_mask(query_lens, seed, spare_columns=draw(st.integers(0, 3)))
    if draw(st.booleans()):
        mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    options = {
        "tree_mask": mask if draw(st.booleans()) else mask.T.contiguous().T,
        "causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
        "scale": draw(st.sampled_from([None, -0.2])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2.0, 3.0, group * num_kv_heads)
    return make_sequences(
        seq_lens,
        query_lens,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([16, 33, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=seed,
        quantisation=draw(st.sampled_from((None,) * 8 + strategies.drawn_quantisations)),
        **options,
    )


@given(trees(), placements())
def test_every_tree_equals_the_reference(made: Sequences, placement: Placement) -> None:
    output, lse = run(made, placement)
    assert_accurate(made, output, lse)


@given(trees(), placements(), placements())
def test_bits_depend_on_neither_blocks_nor_threads(
    made: Sequences, first: Placement, second: Placement
) -> None:
    output, lse = run(made, first)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        other, other_lse = run(made, second)
        assert same_bits(output, other)
        assert same_bits(lse, other_lse)


@given(trees(), placements(), st.data())
def test_tokens_that_a_row_does_not_see_change_no_bit_of_it(
    made: Sequences, placement: Placement, data: st.DataObject
) -> None:
    sequence = data.draw(st.integers(0, len(made.keys) - 1), "sequence")
    new_tokens = made.query_lens[sequence]
    if new_tokens == 0:
        return
    row = data.draw(st.integers(0, new_tokens - 1), "row")
    poison = data.draw(st.sampled_from([math.nan, math.inf, 3e38]), "poison")
    index = made.rows(sequence).start + row
    first_new = made.seq_lens[sequence] - new_tokens
    keys, values = made.keys[sequence].clone(), made.values[sequence].clone()
    for token in range(new_tokens):
        hidden = not made.options["tree_mask"][index, token]
        hidden |= made.options["causal"] and token > row
        if hidden and first_new + token >= 0:
            keys[first_new + token] = poison
            values[first_new + token] = poison
    poisoned = replace(
        made,
        keys=(*made.keys[:sequence], keys, *made.keys[sequence + 1 :]),
        values=(*made.values[:sequence], values, *made.values[sequence + 1 :]),
    )
    (output, lse), (other, other_lse) = run(made, placement), run(poisoned, placement)
    assert same_bits(output[index], other[index])
    assert same_bits(lse[index], other_lse[index])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_triangle_is_the_causal_mask(dtype: torch.dtype) -> None:
    made = make_sequences([600, 40, 9], [40, 40, 9], num_heads=4, head_dim=32, dtype=dtype)
    triangle = torch.ones(40, 40, dtype=torch.bool).tril()
    mask = torch.cat([triangle, triangle, triangle[:9]])
    output, lse = run(made)
    for causal in (True, False):
        other, other_lse = run(made.with_options(tree_mask=mask, causal=causal))
        assert same_bits(output, other)
        assert same_bits(lse, other_lse)


def test_a_token_of_a_tree_has_the_result_of_its_branch_alone() -> None:
    # Tokens 10, 11 and 12, 13 are two branches of two; the second one alone is a plain sequence.
    made = make_sequences([14], [4], num_heads=2, head_dim=16)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    output, _ = run(made.with_options(tree_mask=mask))
    alone = replace(
        made,
        query=made.query[2:],
        query_lens=(2,),
        keys=(torch.cat([made.keys[0][:10], made.keys[0][12:]]),),
        values=(torch.cat([made.values[0][:10], made.values[0][12:]]),),
    )
    assert torch.allclose(output[2:], run(alone)[0], rtol=1e-6, atol=1e-6)


def test_a_row_that_sees_nothing_is_zero() -> None:
    made = make_sequences([3], [3], num_heads=2, head_dim=16)
    mask = torch.zeros(3, 3, dtype=torch.bool)
    output, lse = run(made.with_options(tree_mask=mask, softcap=2.0))
    assert not output.any()
    assert lse.isneginf().all()


def test_a_mask_with_too_few_columns_is_refused() -> None:
    made = make_sequences([9, 9], [2, 5])
    case = place(made, Placement())
    mask = torch.ones(7, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"tree_mask.shape\[1\] is 4, expected 5 or more: seq"):
        case.run(tree_mask=mask)


def compiled(query: Tensor, *tensors: Tensor, tree_mask: Tensor) -> Tensor:
    return torch.ops.paged.attention(query, *tensors, tree_mask=tree_mask)


@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
def test_one_compiled_graph_serves_every_tree() -> None:
    step = torch.compile(compiled, fullgraph=True, dynamic=True)
    for query_lens in ([3, 5], [7, 2], [4, 4]):
        made = make_sequences([m + 20 for m in query_lens], query_lens)
        case = place(made, Placement())
        mask = tree_mask(query_lens)
        want, _ = case.run(tree_mask=mask)
        assert same_bits(step(*case.tensors, tree_mask=mask), want)
