"""How close is close enough.

In float32 an output may be off by 2e-6 of the largest output. In float16 and bfloat16 the
yardstick is torch itself: at most twice the error that `scaled_dot_product_attention` makes in
that dtype on the same keys, and half a unit in the last place for the rounding of the result.
Over a quantised pool the bound is that of float32 for every dtype, and the half unit. All are
measured against the reference in float64, on the keys and values that the pool holds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_ops import reference
from tests.support.sequences import Sequences, exact, one_thread

FLOAT32_BOUND = 2e-6


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    as_integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.contiguous().view(as_integer[tensor.element_size()])


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude in a tensor, 0 if it is empty."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return max |got - want| / max |want|."""
    error = largest(got.double() - want.double())
    return error / largest(want) if error else 0.0


@one_thread()
def assert_within_bound(sequences: Sequences, output: Tensor, lse: Tensor | None = None) -> None:
    """Check results of the op against the reference in float64, to the strict bound above."""
    want, want_lse = exact(sequences)
    error = relative_error(output, want)
    if sequences.dtype == torch.float32:
        assert error <= FLOAT32_BOUND
    else:
        floor = _half_ulp(largest(want), sequences.dtype) / max(largest(want), 1e-30)
        assert error <= 2 * torch_error(sequences) + floor
    if lse is not None:
        assert_lse_accurate(lse, want_lse, FLOAT32_BOUND)


@one_thread()
def assert_accurate(sequences: Sequences, output: Tensor, lse: Tensor | None = None) -> None:
    """Check results of the op for any options and magnitudes.

    A float32 score is only as good as the terms that it sums: the bound grows with their
    magnitude beyond that of standard normal queries and keys, where it is about 8. And an output
    can't be more exact than a float32 sum of the weighted values.
    """
    want, want_lse = exact(sequences)
    exact_rows = sequences if sequences.quantisation is None else sequences.as_read()
    assert output.dtype == sequences.dtype
    assert output.shape == want.shape
    bound = FLOAT32_BOUND * max(1.0, _largest_score_terms(exact_rows) / 8)
    allowed = bound * largest(want) + 4 * torch.finfo(torch.float32).eps * _value_sum(exact_rows)
    if sequences.dtype != torch.float32:
        allowed += _half_ulp(largest(want), sequences.dtype)
        if sequences.quantisation is None:
            allowed += 2 * torch_error(sequences) * largest(want)
    assert largest(output.double() - want) <= allowed
    if lse is not None:
        assert_lse_accurate(lse, want_lse, bound)


def assert_lse_accurate(lse: Tensor, want: Tensor, bound: float) -> None:
    """Check log denominators: -inf exactly where expected, else within the bound."""
    assert lse.dtype == torch.float32
    assert lse.shape == want.shape
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want))
    finite = ~torch.isneginf(want)
    error = (lse.double() - want)[finite].abs()
    eps = torch.finfo(torch.float32).eps
    assert bool((error <= bound + 2 * eps * want[finite].abs()).all())


def assert_merged(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, lse: Tensor
) -> None:
    """Check results of merge_states on the states ``a`` and ``b`` against the reference."""
    want, want_lse = reference.merge_states(a[0].double(), a[1], b[0].double(), b[1])
    assert (out.dtype, lse.dtype) == (a[0].dtype, torch.float32)
    assert (out.shape, lse.shape) == (want.shape, want_lse.shape)
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    seen = ~want_lse.isneginf()
    eps = torch.finfo(torch.float32).eps
    assert largest(lse[seen].double() - want_lse[seen]) <= 4 * eps * (1 + largest(want_lse[seen]))
    # A weight is as exact as the differences of the float32 logs that it is made from.
    allowed = 4 * eps * (1 + largest(want_lse[seen])) + torch.finfo(out.dtype).eps
    assert largest(out.double() - want) <= allowed * max(largest(want), 1.0)


@one_thread()
def torch_error(sequences: Sequences) -> float:
    """Return the relative error that torch's own attention makes in this dtype.

    Of the options it keeps those that torch knows: scale, causal and the window.
    """
    known = ("scale", "causal", "sliding_window")
    options = {name: value for name, value in sequences.options.items() if name in known}
    plain = replace(sequences, options=options)
    want, _ = exact(plain)
    return relative_error(torch_attention(plain), want)


def torch_attention(sequences: Sequences) -> Tensor:
    """Attend over contiguous keys with `scaled_dot_product_attention` and explicit masks."""
    num_tokens, num_heads, _ = sequences.query.shape
    output = sequences.query.new_zeros(num_tokens, num_heads, sequences.head_dim_v)
    group = num_heads // sequences.num_kv_heads
    for i, (keys, values) in enumerate(zip(sequences.keys, sequences.values, strict=True)):
        rows = sequences.rows(i)
        if not sequences.query_lens[i] or not len(keys):
            continue
        mask = visibility(sequences.query_lens[i], len(keys), sequences.options)
        attended = scaled_dot_product_attention(
            sequences.query[rows].transpose(0, 1),
            keys.repeat_interleave(group, dim=1).transpose(0, 1),
            values.repeat_interleave(group, dim=1).transpose(0, 1),
            attn_mask=mask,
            scale=sequences.options.get("scale"),
        )
        # torch does not define rows without keys; ours are zero.
        seen = mask.any(dim=1)[:, None, None]
        output[rows] = torch.where(seen, attended.transpose(0, 1), 0.0)
    return output


def visibility(query_len: int, seq_len: int, options: dict) -> Tensor:
    """Return the mask ``[query_len, seq_len]``: true where a query sees a key."""
    position = torch.arange(query_len).unsqueeze(1) + seq_len - query_len
    key = torch.arange(seq_len).unsqueeze(0)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool)
    if options.get("causal", True):
        mask &= key <= position
    if options.get("sliding_window") is not None:
        mask &= key > position - options["sliding_window"]
    return mask


def _largest_score_terms(sequences: Sequences) -> float:
    """Return the largest sum of magnitudes that any score is made of."""
    scale = sequences.options.get("scale")
    scale = sequences.query.shape[2] ** -0.5 if scale is None else abs(scale)
    slopes = sequences.options.get("alibi_slopes")
    group = sequences.query.shape[1] // sequences.num_kv_heads
    worst = 0.0
    for i, keys in enumerate(sequences.keys):
        query = sequences.query[sequences.rows(i)].abs().float()
        terms = torch.einsum(
            "qhd,khd->qhk", query, keys.abs().float().repeat_interleave(group, dim=1)
        )
        farthest = max(len(keys), len(query))
        bias = 0.0 if slopes is None else largest(slopes) * farthest
        worst = max(worst, scale * largest(terms) + bias)
    return worst


def _value_sum(sequences: Sequences) -> float:
    """Return the largest sum of weighted value magnitudes of any output."""
    positive = replace(sequences, values=tuple(values.abs() for values in sequences.values))
    output, _ = exact(positive)
    return largest(output)


def _half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    if magnitude == 0.0:
        return 0.0
    return 0.5 * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude))
