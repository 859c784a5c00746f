"""FlashAttention 3's names against its documentation, computed in float64 from dense scores."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_ops.integrations.flash_attn_interface import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from tests.integrations.flash_reference import HEAD_DIM, Rules, reference, rotate

INT, FLOAT8 = torch.int32, torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, FLOAT8)


def starts_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def as_float64(rows: Tensor, descale: Tensor | None = None) -> Tensor:
    """Return rows [..., heads, head_dim] times the descale of their heads."""
    return rows.double() if descale is None else rows.double() * descale.double()[:, None]


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    side = st.sampled_from([-1, -1, 0, 1, 5, 40])
    return Rules(
        causal=draw(st.booleans()),
        window_size=draw(st.sampled_from([(-1, -1), (draw(side), draw(side))])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.5])),
        softmax_scale=draw(st.sampled_from([None, 0.3])),
        attention_chunk=draw(st.sampled_from([0, 0, 1, 4, 7])),
    )


def drawn_descales(draw: st.DrawFn, dtype: torch.dtype, batch: int, heads: int) -> dict[str, Any]:
    """Draw descales: none, one for all sequences, or one for each."""
    descales: dict[str, Any] = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    if dtype == FLOAT8:
        for name in descales:
            rows = draw(st.sampled_from([None, 1, batch]))
            if rows is not None:
                descales[name] = (torch.rand(rows, heads) + 0.5).expand(batch, heads)
    return descales


HINTS = {
    "scheduler_metadata": [None, torch.zeros(4, dtype=INT)],
    "num_splits": [0, 1, 5],
    "pack_gqa": [None, True, False],
    "sm_margin": [0, 3],
}


def expected_of(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, given_rules: Rules
) -> tuple[Tensor, Tensor]:
    """Attend for one sequence: with `qv`, to keys that are values and keys."""
    if qv is None:
        return reference(q, k, v, given_rules, None)
    return reference(torch.cat([qv.double(), q], -1), torch.cat([v, k], -1), v, given_rules, None)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare in the precision of the output's dtype, which half precision's weights have, too."""
    dtype = torch.bfloat16 if dtype == FLOAT8 else dtype
    tolerance = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@given(st.data())
def test_kvcache_equals_the_documentation(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype, given_rules = draw(st.sampled_from(DTYPES)), draw(rules())
    batch, heads, kv_heads = draw(st.integers(0, 3)), 4, draw(st.sampled_from([1, 2, 4]))
    dim_v, capacity, rows_of_cache = draw(st.sampled_from([HEAD_DIM, 24])), 24, 4
    options: dict[str, Any] = vars(given_rules) | drawn_descales(draw, dtype, batch, kv_heads)
    options |= {name: draw(st.sampled_from(values)) for name, values in HINTS.items()}
    options["return_softmax_lse"] = True

    is_ragged = draw(st.booleans())
    seqlen = draw(st.integers(0, 5))
    query_lens = [draw(st.integers(0, 5)) if is_ragged else seqlen for _ in range(batch)]
    q = randn(sum(query_lens), heads, HEAD_DIM, dtype=dtype)
    has_qv = dtype != FLOAT8 and draw(st.booleans())
    qv = randn(sum(query_lens), heads, dim_v, dtype=dtype) if has_qv else None

    new_lens, new = [0] * batch, None
    has_new, is_new_ragged = draw(st.booleans()), draw(st.booleans())
    if has_new:
        each = draw(st.integers(0, 5))
        new_lens = [draw(st.integers(0, 5)) if is_new_ragged else each for _ in range(batch)]
        total = sum(new_lens)
        new = [randn(total, kv_heads, dim, dtype=dtype) for dim in (HEAD_DIM, dim_v)]

    # The cache, in which keys and values may lie side by side, and the sequences' rows of it.
    order = draw(st.sampled_from(["apart", "values first", "keys first"]))
    size = draw(st.sampled_from([1, 4, 24])) if draw(st.booleans()) else None
    shape = (rows_of_cache, capacity) if size is None else (rows_of_cache * capacity // size, size)
    joined = randn(*shape, kv_heads, HEAD_DIM + dim_v, dtype=dtype)
    at = dim_v if order == "values first" else HEAD_DIM
    halves = joined[..., :at], joined[..., at:]
    caches = list(reversed(halves)) if order == "values first" else list(halves)
    if order == "apart":
        caches = [half.clone() for half in caches]
    index = torch.randperm(rows_of_cache)[:batch].int()
    has_index = size is None or draw(st.booleans())
    if has_index:
        options["cache_batch_idx"] = index
    table = torch.arange(rows_of_cache)[:, None]
    if size is not None:
        blocks = torch.randperm(shape[0]).view(rows_of_cache, -1)
        table = blocks
        options["page_table"] = blocks.int() if has_index else blocks[index.long()].int()

    def rows_of(cache: Tensor) -> list[Tensor]:
        of_all = cache.view(torch.uint8) if dtype == FLOAT8 else cache
        mine = of_all[table[index.long()]].flatten(1, 2)
        return list(mine.view(FLOAT8) if dtype == FLOAT8 else mine)

    before = [draw(st.integers(0, capacity - n)) for n in new_lens]
    pads = [draw(st.integers(0, n)) for n in before] if draw(st.booleans()) else None
    if pads is not None:
        options["cache_leftpad"] = torch.tensor(pads, dtype=INT)
    turn = None
    if has_new and dtype != FLOAT8 and draw(st.booleans()):
        rotary_dim = draw(st.sampled_from([8, HEAD_DIM]))
        angles = torch.rand(40, rotary_dim // 2) * 6
        turn = angles.cos(), angles.sin()
        options |= {"rotary_cos": turn[0], "rotary_sin": turn[1]}
        options["rotary_interleaved"] = draw(st.booleans())
    begins = before
    if turn is not None and draw(st.booleans()):
        begins = [draw(st.integers(0, 30)) for _ in before]
        options["rotary_seqlens"] = torch.tensor(begins, dtype=INT)

    arguments: dict[str, Any] = {"q": q, "qv": qv}
    if is_ragged:
        options |= {"cu_seqlens_q": starts_of(query_lens), "max_seqlen_q": 5}
    else:
        for name, rows in list(arguments.items()):
            if rows is not None:
                arguments[name] = rows.view(batch, seqlen, heads, rows.shape[2])
    if new is not None:
        arguments |= dict(zip("kv", new, strict=True))
        if is_new_ragged:
            options["cu_seqlens_k_new"] = starts_of(new_lens)
        else:
            for name in "kv":
                rows = arguments[name]
                arguments[name] = rows.view(batch, new_lens[0] if batch else 0, *rows.shape[1:])
    if draw(st.booleans(), "the last dimension isn't dense"):
        for name, rows in list(arguments.items()):
            if rows is not None:
                arguments[name] = rows.transpose(-1, -2).contiguous().transpose(-1, -2)
    kept = [rows_of(cache) for cache in caches]
    arguments |= {"k_cache": caches[0], "v_cache": caches[1]}
    options["cache_seqlens"] = torch.tensor(before, dtype=INT)
    out, lse, *_ = flash_attn_with_kvcache(**arguments, **options)

    if not is_ragged:
        assert out.shape == (batch, seqlen, heads, dim_v)
        assert lse.shape == (batch, heads, seqlen)
        out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    else:
        lse = lse.t()
    first, first_new = starts_of(query_lens).tolist(), starts_of(new_lens).tolist()
    stored = [rows_of(cache) for cache in caches]
    for b in range(batch):
        own = slice(first[b], first[b + 1])
        descales = [
            None if options[n] is None else options[n][b]
            for n in ("q_descale", "k_descale", "v_descale")
        ]
        of_q = None if descales[0] is None else descales[0].repeat_interleave(heads // kv_heads)
        q_b = as_float64(q[own], of_q)
        if turn is not None:
            step = int(given_rules.local)
            q_b = rotate(q_b, *turn, begins[b], step, options["rotary_interleaved"])
        length = before[b] + new_lens[b]
        halves_of_b = []
        for half in range(2):
            rows = kept[half][b].clone()
            if new is not None:
                more = new[half][first_new[b] : first_new[b + 1]]
                if turn is not None and half == 0:
                    interleaved = options["rotary_interleaved"]
                    more = rotate(more, *turn, begins[b], 1, interleaved).to(dtype)
                rows.view(torch.uint8 if dtype == FLOAT8 else dtype)[before[b] : length] = (
                    more.view(torch.uint8) if dtype == FLOAT8 else more
                )
            assert_close(stored[half][b].float(), rows.double(), dtype)
            halves_of_b.append(as_float64(stored[half][b], descales[1 + half]))
        keys, values = (x[(pads[b] if pads else 0) : length] for x in halves_of_b)
        own_qv = None if qv is None else qv[own]
        expected, expected_lse = expected_of(q_b, keys, values, own_qv, given_rules)
        assert_close(out[own], expected, dtype)
        assert_close(lse[own].t(), expected_lse, dtype)


@given(st.data())
def test_varlen_equals_the_documentation(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype, given_rules = draw(st.sampled_from(DTYPES)), draw(rules())
    batch, heads, kv_heads = draw(st.integers(0, 3)), 4, draw(st.sampled_from([1, 2, 4]))
    dim_v = draw(st.sampled_from([HEAD_DIM, 24]))
    options: dict[str, Any] = vars(given_rules) | drawn_descales(draw, dtype, batch, kv_heads)
    options |= {name: draw(st.sampled_from(HINTS[name])) for name in ("num_splits", "pack_gqa")}
    query_lens = [draw(st.integers(0, 6)) for _ in range(batch)]
    key_lens = [draw(st.integers(0, 20)) for _ in range(batch)]
    used_q, used_k = query_lens, key_lens
    if draw(st.booleans()):
        used_q = [draw(st.integers(0, n)) for n in query_lens]
        options["seqused_q"] = torch.tensor(used_q, dtype=INT)
    if draw(st.booleans()):
        used_k = [draw(st.integers(0, n)) for n in key_lens]
        options["seqused_k"] = torch.tensor(used_k, dtype=INT)
    q = randn(sum(query_lens) + 2, heads, HEAD_DIM, dtype=dtype)
    k, v = (randn(sum(key_lens), kv_heads, dim, dtype=dtype) for dim in (HEAD_DIM, dim_v))
    qv = None
    if dtype != FLOAT8 and draw(st.booleans()):
        qv = options["qv"] = randn(len(q), heads, dim_v, dtype=dtype)
    first, first_key = starts_of(query_lens), starts_of(key_lens)
    call = q, k, v, first, first_key, 6, 20
    out, lse = flash_attn_varlen_func(*call, return_attn_probs=True, **options)
    assert out.shape == (len(q), heads, dim_v)
    assert lse.shape == (heads, len(q))
    counted = torch.zeros(len(q), dtype=torch.bool)
    for b in range(batch):
        own = slice(int(first[b]), int(first[b]) + used_q[b])
        counted[own] = True
        mine = slice(int(first_key[b]), int(first_key[b]) + used_k[b])
        descales = [
            None if options[n] is None else options[n][b]
            for n in ("q_descale", "k_descale", "v_descale")
        ]
        of_q = None if descales[0] is None else descales[0].repeat_interleave(heads // kv_heads)
        rows = as_float64(q[own], of_q)
        keys, values = as_float64(k[mine], descales[1]), as_float64(v[mine], descales[2])
        own_qv = None if qv is None else qv[own]
        expected, expected_lse = expected_of(rows, keys, values, own_qv, given_rules)
        assert_close(out[own], expected, dtype)
        assert_close(lse[:, own], expected_lse, dtype)
    assert not out[~counted].any()
    assert lse[:, ~counted].isneginf().all()


def good_call() -> dict[str, Any]:
    """Return a call of `flash_attn_with_kvcache` in which every tensor argument could be given."""
    caches = torch.randn(2, 6, 8, 2, HEAD_DIM)
    return {
        "q": torch.randn(3, 4, HEAD_DIM),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k": torch.randn(3, 2, HEAD_DIM),
        "v": torch.randn(3, 2, HEAD_DIM),
        "cache_seqlens": torch.tensor([3, 8], dtype=INT),
        "cache_leftpad": torch.tensor([1, 0], dtype=INT),
        "cache_batch_idx": torch.tensor([2, 0], dtype=INT),
        "page_table": torch.tensor([[0, 1], [4, 5], [2, 3]], dtype=INT),
        "cu_seqlens_q": torch.tensor([0, 2, 3], dtype=INT),
        "cu_seqlens_k_new": torch.tensor([0, 1, 3], dtype=INT),
    }


def test_the_good_call_is_good() -> None:
    assert flash_attn_with_kvcache(**good_call()).shape == (3, 4, HEAD_DIM)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"attention_chunk": -1}, "attention_chunk is -1"),
    ({"page_table": int32(0, 1)}, r"page_table is torch.int32 \[2\]"),
    ({"page_table": torch.full((3, 2), 6, dtype=INT)}, r"page_table\[0, 0\] is 6, expected 0 to 5"),
    ({"cache_batch_idx": int32(0, 3)}, r"cache_batch_idx\[1\] is 3, expected 0 to 2: page_table"),
    ({"cache_batch_idx": int32(0)}, r"cache_batch_idx is torch.int32 \[1\]"),
    (
        {"cache_seqlens": int32(16, 8)},
        r"cache_seqlens\[0\] is 16, expected 0 to 15: page_table has",
    ),
    ({"cache_leftpad": int32(4, 0)}, r"cache_leftpad\[0\] is 4, expected 0 to 3"),
    ({"cu_seqlens_q": int32(0, 2, 9)}, r"cu_seqlens_q\[2\] is 9, expected 2 to 3"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 3])}, "cu_seqlens_q is torch.int64"),
    ({"cu_seqlens_k_new": int32(0, 1, 2)}, r"cu_seqlens_k_new is \[0, 1, 2\], .* end with 3"),
    ({"cu_seqlens_k_new": int32(0, 3)}, r"cu_seqlens_k_new is torch.int32 \[2\]"),
    ({"cu_seqlens_k_new": None}, "k is .*seqlen_new"),
    ({"k": None, "v": None}, "cu_seqlens_k_new is a tensor, expected None"),
    ({"v": None}, "k is a tensor and v is None"),
    ({"qv": torch.randn(3, 4, 8)}, "qv is .*head_dim_v 16"),
    ({"qv": torch.randn(3, 4, HEAD_DIM).half()}, "qv is torch.float16"),
    ({"q_descale": torch.ones(2, 2)}, "q_descale is a tensor, expected None: q is torch.float32"),
    ({"rotary_cos": torch.rand(9, 4)}, "rotary_cos and rotary_sin"),
    ({"rotary_seqlens": int32(-1, 0)}, r"rotary_seqlens\[0\] is -1"),
    ({"window_size": None}, "window_size is None, expected a pair"),
    ({"softmax_scale": "x"}, "softmax_scale is 'x'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_kvcache_refuses_by_name_and_writes_nothing(change: dict[str, Any], message: str) -> None:
    arguments = good_call()
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises((RuntimeError, TypeError), match=message):
        flash_attn_with_kvcache(**(arguments | change))
    assert all(map(torch.equal, before, (arguments["k_cache"], arguments["v_cache"])))


def float8_call() -> dict[str, Any]:
    kinds = ("q", "k_cache", "v_cache", "k", "v")
    return {n: x.to(FLOAT8) if n in kinds else x for n, x in good_call().items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qv": torch.randn(3, 4, HEAD_DIM).to(FLOAT8)}, "qv is a tensor, expected None"),
        (
            {"rotary_cos": torch.rand(9, 4), "rotary_sin": torch.rand(9, 4)},
            "rotary_cos is a tensor",
        ),
        ({"q_descale": torch.ones(2, 4)}, "q_descale is .*num_kv_heads 2"),
        ({"v_descale": torch.ones(3, 2)}, "v_descale is .*batch 2"),
        ({"k_descale": torch.ones(2, 2).double()}, "k_descale is torch.float64"),
        ({"q": torch.randn(3, 4, HEAD_DIM)}, "k_cache is torch.float8_e4m3fn"),
    ],
)
def test_float8_refuses_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        flash_attn_with_kvcache(**(float8_call() | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqused_q": int32(3, 1)}, r"seqused_q\[0\] is 3, expected 0 to 2"),
        ({"seqused_k": int32(5, 5)}, r"seqused_k\[1\] is 5, expected 0 to 4"),
        ({"seqused_k": int32(5)}, r"seqused_k is torch.int32 \[1\]"),
        ({"cu_seqlens_k": int32(0, 5, 10)}, r"cu_seqlens_k\[2\] is 10, expected 5 to 9"),
        ({"attention_chunk": None}, "attention_chunk is None"),
        ({"v": torch.randn(8, 2, HEAD_DIM)}, "v is .*total_k 9"),
    ],
)
def test_varlen_refuses_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.randn(3, 4, HEAD_DIM),
        "k": torch.randn(9, 2, HEAD_DIM),
        "v": torch.randn(9, 2, HEAD_DIM),
        "cu_seqlens_q": int32(0, 2, 3),
        "cu_seqlens_k": int32(0, 5, 9),
        "max_seqlen_q": 2,
        "max_seqlen_k": 5,
    }
    with pytest.raises((RuntimeError, TypeError), match=message):
        flash_attn_varlen_func(**(arguments | change))


OP_WORDS = "paged::|key_cache|value_cache|block_tables|seq_lens|query_start_loc|slot_mapping"
VALUES = [None, True, -1, 0, 2**31, 1j, "x", (), [1.5], (3, 2**31)]
TENSORS = [
    torch.zeros(shape, dtype=dtype)
    for shape in [(), (0,), (2,), (3,), (2, 2), (3, 4, 16), (3, 2, 16), (6, 8, 2, 16)]
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64, FLOAT8)
]


@given(st.data())
def test_whatever_is_wrong_nothing_is_written_and_no_word_is_the_ops(data: st.DataObject) -> None:
    arguments: dict[str, Any] = {
        name: parameter.default if parameter.default is not inspect.Parameter.empty else None
        for name, parameter in inspect.signature(flash_attn_with_kvcache).parameters.items()
    } | good_call()
    hints = {"max_seqlen_q", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"}
    names = st.sampled_from(sorted(set(arguments) - hints - {"return_softmax_lse"}))
    for name in data.draw(st.lists(names, min_size=1, max_size=2, unique=True)):
        is_flag = name in ("causal", "rotary_interleaved")
        values = VALUES if is_flag else [*VALUES, *TENSORS]
        arguments[name] = data.draw(st.sampled_from(values), label=name)
        if isinstance(arguments[name], Tensor):
            arguments[name] = arguments[name].clone()

    def caches() -> list[Tensor]:
        both = (arguments[name] for name in ("k_cache", "v_cache"))
        return [x.clone().float() for x in both if isinstance(x, Tensor)]

    before = caches()
    try:
        flash_attn_with_kvcache(**arguments)
    except (RuntimeError, TypeError) as refusal:
        assert not re.search(OP_WORDS, str(refusal))  # noqa: PT017
        assert all(map(torch.equal, before, caches()))


def test_the_metadata_of_a_scheduler_is_taken() -> None:
    metadata = get_scheduler_metadata(2, 1, 16, 4, 2, HEAD_DIM, cache_seqlens=int32(3, 8))
    arguments = good_call()
    out = flash_attn_with_kvcache(**arguments, scheduler_metadata=metadata)
    assert torch.equal(out, flash_attn_with_kvcache(**arguments))
