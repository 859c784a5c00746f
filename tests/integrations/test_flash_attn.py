"""The shims against FlashAttention's documentation, computed in float64 from dense scores."""

from __future__ import annotations

import inspect
import math
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_ops.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.integrations.flash_reference import HEAD_DIM, TOLERANCE, Rules, reference, rotate


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    side = st.sampled_from([-1, -1, 0, 1, 2, 5, 40])
    return Rules(
        causal=draw(st.booleans()),
        window_size=draw(st.sampled_from([(-1, -1), (draw(side), draw(side))])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.5])),
        softmax_scale=draw(st.sampled_from([None, 0.3])),
    )


def random_slopes(draw: st.DrawFn, batch: int, heads: int) -> Tensor | None:
    shape = draw(st.sampled_from([None, (heads,), (batch, heads)]))
    return None if shape is None else torch.rand(shape) * 0.3


@given(st.data())
def test_kvcache_equals_the_documentation(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    batch, heads, kv_heads = draw(st.integers(1, 3)), 4, draw(st.sampled_from([1, 2, 4]))
    seqlen, capacity = draw(st.integers(1, 5)), 24
    new = draw(st.sampled_from([0, seqlen, draw(st.integers(1, 5))]))
    before = torch.tensor([draw(st.integers(0, capacity - 8)) for _ in range(batch)])
    paged, given_rules = draw(st.booleans()), draw(rules())
    slopes = random_slopes(draw, batch, heads)
    options: dict[str, Any] = vars(given_rules) | {"alibi_slopes": slopes}
    del options["attention_chunk"]  # version 3's
    q = torch.randn(batch, seqlen, heads, HEAD_DIM)
    k, v = torch.randn(2, batch, new, kv_heads, HEAD_DIM) if new else (None, None)
    if draw(st.booleans(), "the last dimension isn't dense"):
        q, k, v = (
            x if x is None else x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)
        )
    leftpad = torch.zeros(batch, dtype=torch.int32)
    if paged:
        size = draw(st.sampled_from([1, 4, 24]))
        width = capacity // size
        caches = torch.randn(2, 2 * batch * width, size, kv_heads, HEAD_DIM)
        table = torch.randperm(2 * batch * width)[: batch * width].view(batch, width).int()
        options["block_table"] = table
        rows = caches[:, table.long()].flatten(2, 3)
    else:
        caches = torch.randn(2, 4, capacity, kv_heads, HEAD_DIM)
        index = torch.randperm(4)[:batch].int()
        if draw(st.booleans()):
            options["cache_batch_idx"] = index
        else:
            caches, index = caches[:, :batch], torch.arange(batch)
        rows = caches[:, index.long()]
        if draw(st.booleans()):
            leftpad = torch.tensor([draw(st.integers(0, int(n))) for n in before]).int()
            options["cache_leftpad"] = leftpad
    rows = rows.clone()
    interleaved = draw(st.booleans())
    rotary = draw(st.sampled_from([0, 8, HEAD_DIM])) if new else 0
    if rotary:
        angles = torch.rand(capacity + 8, rotary // 2) * 6
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        options["rotary_interleaved"] = interleaved
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=before.int(), return_softmax_lse=True, **options
    )
    assert out.shape == q.shape
    assert lse.shape == (batch, heads, seqlen)
    for b in range(batch):
        length, start = int(before[b]), int(leftpad[b])
        q_b = q[b]
        if rotary:
            turn = (options["rotary_cos"], options["rotary_sin"])
            q_b = rotate(q_b, *turn, length, int(given_rules.local), interleaved)
        if new:
            k_b = rotate(k[b], *turn, length, 1, interleaved) if rotary else k[b]
            rows[0, b, length : length + new] = k_b
            rows[1, b, length : length + new] = v[b]
        keys, values = rows[:, b, start : length + new]
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        expected, expected_lse = reference(q_b, keys, values, given_rules, own)
        torch.testing.assert_close(out[b].double(), expected, **TOLERANCE)
        torch.testing.assert_close(lse[b].double(), expected_lse, **TOLERANCE)
    stored = caches[:, options["block_table"].long()].flatten(2, 3) if paged else None
    stored = caches[:, index.long()] if stored is None else stored
    torch.testing.assert_close(stored, rows, rtol=1e-6, atol=1e-6)


@given(st.data())
def test_varlen_equals_the_documentation(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    batch, heads, kv_heads = draw(st.integers(1, 3)), 4, draw(st.sampled_from([1, 2, 4]))
    query_lens = [draw(st.integers(0, 6)) for _ in range(batch)]
    key_lens = [draw(st.integers(0, 20)) for _ in range(batch)]
    given_rules, slopes = draw(rules()), random_slopes(draw, batch, heads)
    options: dict[str, Any] = vars(given_rules) | {"alibi_slopes": slopes}
    del options["attention_chunk"]  # version 3's
    q = torch.randn(sum(query_lens), HEAD_DIM, heads).transpose(1, 2)
    if draw(st.booleans()):
        size, width = 4, 5
        keys = torch.randn(2, batch * width, size, kv_heads, HEAD_DIM)
        table = torch.randperm(batch * width).view(batch, width).int()
        options["block_table"] = table
        sequences = list(keys[:, table.long()].flatten(2, 3).unbind(1))
    else:
        keys = torch.randn(2, sum(key_lens), kv_heads, HEAD_DIM)
        sequences = list(keys.split(key_lens, 1))
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)]
    out, lse, probabilities = flash_attn_varlen_func(
        q, *keys, *starts, 6, 20, return_attn_probs=True, deterministic=True, **options
    )
    assert probabilities is None
    assert lse.shape == (heads, len(q))
    for b, q_b in enumerate(q.split(query_lens)):
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        key, value = sequences[b][:, : key_lens[b]]
        expected, expected_lse = reference(q_b, key, value, given_rules, own)
        rows = slice(int(starts[0][b]), int(starts[0][b + 1]))
        torch.testing.assert_close(out[rows].double(), expected, **TOLERANCE)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_close_as_its_rounding(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 32).to(dtype)
    caches = torch.randn(2, 6, 8, 4, 32).to(dtype)
    table = torch.tensor([[4, 1, 3], [5, 0, 2]]).int()
    before = torch.tensor([17, 6]).int()
    out = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=before, block_table=table, causal=True
    )
    rows = caches[:, table.long()].flatten(2, 3)
    for b in range(2):
        keys, values = rows[:, b, : int(before[b]) + 5]
        expected, _ = reference(q[b], keys, values, Rules(True, (-1, -1), 0.0, None), None)
        epsilon = torch.finfo(dtype).eps
        torch.testing.assert_close(out[b].double(), expected, rtol=epsilon, atol=epsilon)


def test_lengths_may_be_a_number_or_missing() -> None:
    q, caches = torch.randn(2, 1, 4, HEAD_DIM), torch.randn(2, 2, 8, 2, HEAD_DIM)
    lens = torch.tensor([8, 8]).int()
    expected = flash_attn_with_kvcache(q, *caches, cache_seqlens=lens)
    assert torch.equal(flash_attn_with_kvcache(q, *caches, cache_seqlens=8), expected)
    assert torch.equal(flash_attn_with_kvcache(q, *caches), expected)


@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_the_number_of_splits_changes_no_bit(num_splits: int) -> None:
    q, caches = torch.randn(1, 1, 4, HEAD_DIM), torch.randn(2, 1, 2000, 2, HEAD_DIM)
    expected = flash_attn_with_kvcache(q, *caches)
    assert torch.equal(flash_attn_with_kvcache(q, *caches, num_splits=num_splits), expected)


INT = torch.int32
KVCACHE_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"v": None}, "k is a tensor and v is None, expected both or none"),
    ({"window_size": (-2, 0)}, r"window_size\[0\] is -2"),
    ({"window_size": (3,)}, r"window_size is \(3,\)"),
    ({"num_splits": -1}, "num_splits is -1"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"softmax_scale": math.inf}, "softmax_scale is inf, expected a finite float32"),
    ({"softmax_scale": 1j}, "softmax_scale is 1j"),
    ({"softcap": math.nan}, "softcap is nan"),
    ({"cache_seqlens": None}, "cache_seqlens is None"),
    (
        {"cache_seqlens": torch.tensor([15, 3], dtype=INT)},
        r"cache_seqlens\[0\] is 15, expected 0 to 14: block_table has 2 blocks of 8 .* 2 of them",
    ),
    ({"cache_seqlens": torch.tensor([3, 3])}, "cache_seqlens is torch.int64"),
    ({"cache_seqlens": torch.tensor([-1, 3], dtype=INT)}, r"cache_seqlens\[0\] is -1, expected 0"),
    ({"cache_seqlens": torch.tensor([3, 3, 3], dtype=INT)}, r"cache_seqlens is torch.int32 \[3\]"),
    ({"cache_seqlens": 15}, "cache_seqlens is 15, expected 0 to 14"),
    ({"cache_batch_idx": torch.tensor([0, 1], dtype=INT)}, "cache_batch_idx is a tensor"),
    ({"cache_leftpad": torch.tensor([0, 1], dtype=INT)}, "cache_leftpad is a tensor"),
    (
        {"block_table": torch.tensor([[0, 1], [2, 4]], dtype=INT)},
        r"block_table\[1, 1\] is 4, expected 0 to 3",
    ),
    ({"block_table": torch.zeros(2, dtype=INT)}, r"block_table is torch.int32 \[2\]"),
    ({"block_table": torch.zeros(3, 2, dtype=INT)}, r"block_table .*expected .*\[batch 2, max"),
    ({"block_table": torch.zeros(2, 2)}, "block_table is torch.float32"),
    (
        {
            "block_table": None,
            "cache_batch_idx": torch.tensor([0, 4], dtype=INT),
            "cache_seqlens": torch.tensor([3, 3], dtype=INT),
        },
        r"cache_batch_idx\[1, 0\] is 4, expected 0 to 3",
    ),
    (
        {"block_table": None, "cache_batch_idx": torch.tensor([0, 1])},
        "cache_batch_idx is torch.int64",
    ),
    ({"k_cache": torch.zeros(4, 2, HEAD_DIM)}, "k_cache is .*num_kv_heads, head_dim 16"),
    ({"v_cache": torch.zeros(4, 8, 1, HEAD_DIM)}, "v_cache is .*num_kv_heads 2, head_dim]"),
    ({"q": torch.rand(2, 2, 3, HEAD_DIM)}, "q has 3 heads, expected a multiple of 2, .*k_cache"),
    ({"q": torch.rand(2, 2, 4, HEAD_DIM, dtype=torch.float64)}, "q is torch.float64"),
    ({"v": torch.rand(2, 3, 2, HEAD_DIM)}, "v is .*seqlen_new 2"),
    ({"v": [1.0]}, "v is list, expected a tensor"),
    ({"alibi_slopes": torch.rand(3, 4), "causal": True}, "alibi_slopes is .*batch 2, num_heads 4"),
    ({"alibi_slopes": torch.rand(3), "causal": True}, "alibi_slopes is .*num_heads 4"),
    ({"rotary_cos": torch.rand(16, 4)}, "rotary_cos and rotary_sin: expected both"),
    (
        {"rotary_cos": torch.rand(16, 9), "rotary_sin": torch.rand(16, 9)},
        r"rotary_cos.shape\[1\] is 9, expected at most 8",
    ),
    (
        {"rotary_cos": torch.rand(9, 4), "rotary_sin": torch.rand(9, 4)},
        r"rotary_cos.shape\[0\] is 9, expected 10",
    ),
    (
        {"rotary_cos": torch.rand(16, 4), "rotary_sin": torch.rand(16, 4), "k": None, "v": None},
        "rotary_cos is a tensor, expected None",
    ),
    ({"q": torch.rand(2, 4, HEAD_DIM)}, "q has 3 dimensions"),
    ({"k": torch.rand(2, 2, 2, 8)}, "k is .*head_dim 16"),
    ({"k": torch.rand(2, 2, 2, HEAD_DIM).half()}, "k is torch.float16 .*expected torch.float32"),
    (
        {"k_cache": torch.zeros(4, 8, 2, HEAD_DIM, dtype=torch.float8_e4m3fn)},
        "k_cache is torch.float8_e4m3fn .*expected torch.float32",
    ),
]


@pytest.mark.parametrize(("change", "message"), KVCACHE_REFUSALS)
def test_kvcache_refuses_by_name_and_writes_nothing(change: dict[str, Any], message: str) -> None:
    caches = torch.randn(2, 4, 8, 2, HEAD_DIM)
    before = caches.clone()
    arguments = {
        "q": torch.randn(2, 2, 4, HEAD_DIM),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k": torch.randn(2, 2, 2, HEAD_DIM),
        "v": torch.randn(2, 2, 2, HEAD_DIM),
        "cache_seqlens": torch.tensor([8, 3], dtype=INT),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=INT),
    }
    if change.get("block_table") is not None:
        arguments["cache_seqlens"] = torch.tensor([3, 8], dtype=INT)
    with pytest.raises((RuntimeError, TypeError), match=message):
        flash_attn_with_kvcache(**(arguments | change))
    assert torch.equal(caches, before)


OP_WORDS = "paged::|key_cache|value_cache|block_tables|seq_lens|query_start_loc|slot_mapping"


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (sys.maxsize, 0)},
        {"window_size": (3, 2**31)},
        {"window_size": (2**31 - 2, 2**31 - 2)},
        {"window_size": (sys.maxsize, 2**40), "causal": True},
    ],
)
def test_a_limit_longer_than_any_sequence_is_none(options: dict[str, Any]) -> None:
    q, caches = torch.randn(2, 3, 4, HEAD_DIM), torch.randn(2, 2, 8, 2, HEAD_DIM)
    limits = [min(8, limit) for limit in options["window_size"]]
    expected = flash_attn_with_kvcache(q, *caches, **(options | {"window_size": limits}))
    torch.testing.assert_close(flash_attn_with_kvcache(q, *caches, **options), expected)


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 1), (0, 3), (0, 0), (2, 0)])
@pytest.mark.parametrize("new", [None, 0, 2])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (3, 2)},
        {"softcap": 2.0, "softmax_scale": 0.5, "num_splits": 3},
        {"alibi_slopes": (4,)},
        {"alibi_slopes": (None, 4), "causal": True},
        {"cache_leftpad": (None,)},
        {"cache_batch_idx": (None,)},
        {"rotary_cos": (64, 8), "rotary_sin": (64, 8)},
    ],
)
def test_nothing_to_attend_from_gives_an_output_of_that_shape(
    batch: int, seqlen: int, new: int | None, paged: bool, options: dict[str, Any]
) -> None:
    given = dict(options)
    for name, shape in options.items():
        if "alibi" in name or "rotary" in name:
            given[name] = torch.rand([batch if size is None else size for size in shape])
        elif "cache" in name:
            given[name] = torch.arange(batch).int()
    if ("rotary_cos" in given and new is None) or (paged and any("cache_" in n for n in given)):
        return  # refused, see above
    caches = torch.randn(2, 8 if paged or "cache_batch_idx" in given else batch, 16, 2, HEAD_DIM)
    if paged:
        given["block_table"] = torch.arange(2 * batch).view(batch, 2).int()
    if new is not None:
        given |= {name: torch.randn(batch, new, 2, HEAD_DIM) for name in "kv"}
    given["cache_seqlens"] = torch.full((batch,), 3).int()
    q = torch.randn(batch, seqlen, 4, HEAD_DIM)
    out, lse = flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **given)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, seqlen)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": (3, 2)},
        {"alibi_slopes": (4,)},
        {"alibi_slopes": (None, 4)},
        {"alibi_slopes": (None, 4), "causal": True},
    ],
)
def test_sequences_without_queries_or_keys_give_an_output_of_that_shape(
    batch: int, paged: bool, options: dict[str, Any]
) -> None:
    given = dict(options)
    if "alibi_slopes" in given:
        shape = [batch if size is None else size for size in options["alibi_slopes"]]
        given["alibi_slopes"] = torch.rand(shape)
    if paged:
        given["block_table"] = torch.zeros(batch, 3, dtype=INT)
    keys = torch.randn(2, *((8, 16) if paged else (0,)), 2, HEAD_DIM)
    none = torch.zeros(batch + 1, dtype=INT)
    q = torch.randn(0, 4, HEAD_DIM)
    out, lse, _ = flash_attn_varlen_func(
        q, *keys, none, none, 0, 0, return_attn_probs=True, **given
    )
    assert out.shape == q.shape
    assert lse.shape == (4, 0)


def test_a_sequence_may_begin_at_its_end() -> None:
    q, caches = torch.randn(1, 1, 4, HEAD_DIM), torch.randn(2, 1, 8, 2, HEAD_DIM)
    pad = torch.tensor([8], dtype=INT)
    assert not flash_attn_with_kvcache(q, *caches, cache_leftpad=pad).any()


VALUES = [None, True, -1, 0, 2**31, 2**63, 1j, math.nan, -math.inf, "x", (), [1.5], (3, 2**31)]
TENSORS = [
    torch.zeros(shape, dtype=dtype)
    for shape in [(), (0,), (2,), (3,), (2, 1), (2, 4), (2, 2, 2, 16), (2, 2, 2, 8), (4, 8, 2, 16)]
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64, torch.bool)
]


@given(st.data())
def test_whatever_is_wrong_nothing_is_written_and_no_word_is_the_ops(data: st.DataObject) -> None:
    """Any argument of `flash_attn_with_kvcache`, or two of them, are something else."""
    caches = torch.randn(2, 4, 8, 2, HEAD_DIM)
    arguments: dict[str, Any] = dict.fromkeys(inspect.signature(flash_attn_with_kvcache).parameters)
    arguments |= {
        "q": torch.randn(2, 2, 4, HEAD_DIM),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k": torch.randn(2, 2, 2, HEAD_DIM),
        "v": torch.randn(2, 2, 2, HEAD_DIM),
        "cache_seqlens": torch.tensor([8, 3], dtype=INT),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=INT),
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "num_splits": 0,
    }
    names = st.sampled_from([name for name in arguments if name != "return_softmax_lse"])
    for name in data.draw(st.lists(names, min_size=1, max_size=2, unique=True)):
        is_flag = name in ("causal", "rotary_interleaved")
        values = VALUES if is_flag else [*VALUES, *TENSORS]
        arguments[name] = data.draw(st.sampled_from(values), label=name)
        if isinstance(arguments[name], Tensor):
            arguments[name] = arguments[name].clone()
    before = [
        arguments[name].clone() for name in ("k_cache", "v_cache") if is_tensor(arguments[name])
    ]
    try:
        flash_attn_with_kvcache(**arguments)
    except (RuntimeError, TypeError) as refusal:
        assert not re.search(OP_WORDS, str(refusal))  # noqa: PT017
        after = [arguments[name] for name in ("k_cache", "v_cache") if is_tensor(arguments[name])]
        assert all(map(torch.equal, before, after))


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@pytest.mark.parametrize(
    ("leftpad", "message"),
    [([-1, 0], r"cache_leftpad\[0\] is -1"), ([0, 4], r"cache_leftpad\[1\] is 4, expected 0 to 3")],
)
def test_a_sequence_begins_within_itself(leftpad: list[int], message: str) -> None:
    q, caches = torch.randn(2, 1, 4, HEAD_DIM), torch.randn(2, 2, 8, 2, HEAD_DIM)
    with pytest.raises(RuntimeError, match=message):
        flash_attn_with_kvcache(
            q, *caches, cache_seqlens=3, cache_leftpad=torch.tensor(leftpad, dtype=INT)
        )


PAGES = {name: torch.rand(6, 8, 2, HEAD_DIM) for name in "kv"}
VARLEN_REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"v": torch.zeros(9, 2, HEAD_DIM, dtype=torch.float8_e5m2)},
        "v is torch.float8_e5m2 .*expected torch.float32",
    ),
    ({"dropout_p": 0.1}, "dropout_p is 0.1, expected 0"),
    ({"max_seqlen_q": 1}, "max_seqlen_q is 1, expected 2 or more"),
    ({"max_seqlen_k": 3}, "max_seqlen_k is 3, expected 5 or more"),
    ({"window_size": (0, -3)}, r"window_size\[1\] is -3"),
    ({"block_table": torch.tensor([[9], [0]], dtype=INT)}, "k is .*num_blocks, block_size"),
    (
        {"block_table": torch.tensor([[0], [9]], dtype=INT), **PAGES},
        r"block_table\[1, 0\] is 9, expected 0 to 5",
    ),
    (
        {"block_table": torch.zeros(2, 0, dtype=INT), **PAGES},
        "cu_seqlens_k gives sequence 0 5 tokens, expected at most 0: block_table has 0 blocks",
    ),
    ({"cu_seqlens_k": torch.tensor([0, 5, 10], dtype=INT)}, r"cu_seqlens_k\[2\] is 10, expected 5"),
    ({"cu_seqlens_k": torch.tensor([0, 5, 3], dtype=INT)}, r"cu_seqlens_k\[2\] is 3, expected 5"),
    ({"cu_seqlens_k": torch.tensor([-1, 3, 5], dtype=INT)}, r"cu_seqlens_k\[0\] is -1"),
    ({"cu_seqlens_k": torch.tensor([0, 5], dtype=INT)}, r"cu_seqlens_k is torch.int32 \[2\]"),
    ({"cu_seqlens_q": torch.tensor([0, 2], dtype=INT)}, r"cu_seqlens_q is \[0, 2\]"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 3], dtype=INT)}, r"cu_seqlens_q\[1\] is 4, expected 0"),
    ({"max_seqlen_k": None}, "max_seqlen_k is None, expected an integer"),
    ({"softmax_scale": "1"}, "softmax_scale is '1'"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 3])}, "cu_seqlens_q is torch.int64"),
]


@pytest.mark.parametrize(("change", "message"), VARLEN_REFUSALS)
def test_varlen_refuses_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.randn(3, 4, HEAD_DIM),
        "k": torch.randn(9, 2, HEAD_DIM),
        "v": torch.randn(9, 2, HEAD_DIM),
        "cu_seqlens_q": torch.tensor([0, 2, 3], dtype=INT),
        "cu_seqlens_k": torch.tensor([0, 5, 9], dtype=INT),
        "max_seqlen_q": 2,
        "max_seqlen_k": 5,
    }
    with pytest.raises((RuntimeError, TypeError), match=message):
        flash_attn_varlen_func(**(arguments | change))
