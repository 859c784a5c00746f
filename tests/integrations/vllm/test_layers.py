"""A layer's attention through vLLM's own interface, without an engine, by the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import (
    create_encoder_only_attention_backend,
)
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    KVQuantMode,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)

from paged_ops import reference
from paged_ops.integrations.vllm.attention import PagedBackend
from paged_ops.integrations.vllm.refusals import check_group, check_selection

BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 20, 4, 4, 2, 32
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03))
LENS, NEW = (11, 3, 17), (1, 3, 9)  # a decode, a prompt, a chunk


def make_page(layout: KVCacheLayout, cache_dtype: str) -> Tensor:
    """Let vLLM make the page of one layer of two."""
    quant = get_kv_quant_mode(cache_dtype)
    dtype = torch.float32 if quant == KVQuantMode.NONE else torch.uint8
    spec = PagedBackend.customize_spec(
        FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            dtype=dtype,
            kv_quant_mode=quant,
        )
    )
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, 2, layout)
    size = 2 * BLOCKS * spec.page_size_bytes
    tensor = KVCacheTensor(size, ["a", "b"], layer_stride, block_stride)
    raw = torch.zeros(size, dtype=torch.int8)
    return create_kv_cache_views(raw, spec, BLOCKS, layout, tensor)[1]


def new_layer(
    attn_type: str = AttentionType.DECODER, backend: Any = PagedBackend, **given: Any
) -> Any:
    """Build a layer's attention as vLLM's layer does."""
    usual = {
        "num_heads": HEADS,
        "head_size": SIZE,
        "scale": SIZE**-0.5,
        "num_kv_heads": KV_HEADS,
        "attn_type": attn_type,
    }
    layer = backend.get_impl_cls()(**{**usual, **given})
    layer.process_weights_after_loading(torch.float32)
    return layer


def starts(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def blocks_of(lens: tuple[int, ...]) -> Tensor:
    """Give each request blocks of its own, in no order; the rest of the table is vLLM's 0."""
    width = -(-max(lens) // BLOCK_SIZE)
    ids = iter((torch.randperm(BLOCKS - 1) + 1).tolist())
    rows = [[next(ids) for _ in range(-(-n // BLOCK_SIZE))] for n in lens]
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)


def step_of(
    lens: tuple[int, ...], new: tuple[int, ...], tables: Tensor, **given: Any
) -> CommonAttentionMetadata:
    """Make what vLLM's runner gives to a builder."""
    slots = [
        int(tables[i, t // BLOCK_SIZE]) * BLOCK_SIZE + t % BLOCK_SIZE
        for i, (n, m) in enumerate(zip(lens, new, strict=True))
        for t in range(n - m, n)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts(new),
        query_start_loc_cpu=starts(new),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lens),
        block_table_tensor=tables,
        slot_mapping=torch.tensor(slots),
        seq_lens_cpu_upper_bound=torch.tensor(lens, dtype=torch.int32),
        **given,
    )


def builder(spec_class: Any = FullAttentionSpec, backend: Any = PagedBackend, **given: Any) -> Any:
    spec = spec_class(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32, **given
    )
    return backend.get_builder_cls()(spec, ["a"], SimpleNamespace(), torch.device("cpu"))


def by_the_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: tuple[int, ...],
    new: tuple[int, ...],
    **options: Any,
) -> Tensor:
    """Attend to keys and values that lie one request after another: blocks of one token."""
    tables = starts(lens)[:-1, None] + torch.arange(max(lens), dtype=torch.int32)
    return reference.attention(
        query.double(),
        key[:, None].double(),
        value[:, None].double(),
        tables,
        torch.tensor(lens, dtype=torch.int32),
        starts(new),
        **{
            name: option.double() if isinstance(option, Tensor) else option
            for name, option in options.items()
        },
    )


SLOPES, SINKS = [0.5, 0.25, 0.1, 0.0], torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"sliding_window": 5}, {"sliding_window": 5}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": SLOPES}, {"alibi_slopes": torch.tensor(SLOPES)}),
        ({"sinks": SINKS.bfloat16()}, {"sinks": SINKS}),
        (
            {"sliding_window": 7, "logits_soft_cap": 3.0, "sinks": SINKS},
            {"sliding_window": 7, "softcap": 3.0, "sinks": SINKS},
        ),
    ],
    ids=["plain", "scale", "window", "soft cap", "ALiBi", "sinks", "three at once"],
)
@pytest.mark.parametrize(
    ("cache_dtype", "tolerance"),
    [
        ("auto", 1e-5),
        ("fp8", 0.2),
        ("fp8_e5m2", 0.4),
        ("int8_per_token_head", 0.03),
        ("fp8_per_token_head", 0.2),
    ],
)
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_a_step_of_decoders_is_what_the_reference_says(
    layout: KVCacheLayout,
    cache_dtype: str,
    tolerance: float,
    given: dict[str, Any],
    options: dict[str, Any],
) -> None:
    page = make_page(layout, cache_dtype)
    layer, tables = new_layer(kv_cache_dtype=cache_dtype, **given), blocks_of(LENS)
    key, value = torch.randn(2, sum(LENS), KV_HEADS, SIZE)
    everything = step_of(LENS, LENS, tables)
    layer.do_kv_cache_update(LAYER, key, value, page, everything.slot_mapping)

    query = torch.randn(sum(NEW) + 2, HEADS, SIZE)  # two rows of padding
    output = torch.full_like(query, torch.nan)
    step = builder().build(0, step_of(LENS, NEW, tables))
    layer.forward(LAYER, query, None, None, page, step, output)

    expected = by_the_reference(query[:-2], key, value, LENS, NEW, **options)
    assert float((output[:-2] - expected).abs().max()) < tolerance
    assert not output[-2:].any()
    assert not page[0].any()  # block 0 is vLLM's, for padding


def test_padding_is_written_nowhere() -> None:
    page, layer = make_page(KVCacheLayout.LBHNC, "auto"), new_layer()
    key, value = torch.randn(2, 3, KV_HEADS, SIZE)
    layer.do_kv_cache_update(LAYER, key, value, page, torch.tensor([9, -1]))
    assert page.flatten(1).any(1).nonzero().tolist() == [[2]]


def test_a_layer_that_shares_anothers_page_reads_it() -> None:
    page, tables = make_page(KVCacheLayout.LBHNC, "auto"), blocks_of(LENS)
    writer, reader = new_layer(), new_layer(kv_sharing_target_layer_name="a", scale=0.5)
    key, value = torch.randn(2, sum(LENS), KV_HEADS, SIZE)
    writer.do_kv_cache_update(LAYER, key, value, page, step_of(LENS, LENS, tables).slot_mapping)
    query = torch.randn(sum(NEW), HEADS, SIZE)
    step = builder().build(0, step_of(LENS, NEW, tables))
    output = reader.forward(LAYER, query, None, None, page, step, torch.empty_like(query))
    expected = by_the_reference(query, key, value, LENS, NEW, scale=0.5)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


def test_another_group_of_layers_has_blocks_of_its_own() -> None:
    page, here = make_page(KVCacheLayout.LBHNC, "auto"), blocks_of(LENS)
    there = (here + 7 - 1) % (BLOCKS - 1) + 1
    layer = new_layer()
    key, value = torch.randn(2, sum(LENS), KV_HEADS, SIZE)
    everything = step_of(LENS, LENS, there)
    layer.do_kv_cache_update(LAYER, key, value, page, everything.slot_mapping)
    build = builder()
    step = build.build(0, step_of(LENS, NEW, here))
    step = build.update_block_table(step, there, everything.slot_mapping)
    query = torch.randn(sum(NEW), HEADS, SIZE)
    output = layer.forward(LAYER, query, None, None, page, step, torch.empty_like(query))
    expected = by_the_reference(query, key, value, LENS, NEW)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


def test_an_encoder_sees_its_new_tokens_both_ways_and_keeps_none() -> None:
    backend = create_encoder_only_attention_backend(PagedBackend)
    layer = new_layer(AttentionType.ENCODER_ONLY, backend)
    key, value = torch.randn(2, sum(LENS), KV_HEADS, SIZE)
    query = torch.randn(sum(LENS), HEADS, SIZE)
    common = step_of(LENS, LENS, torch.zeros(3, 8, dtype=torch.int32))
    layer.do_kv_cache_update(LAYER, key, value, torch.empty(0), common.slot_mapping)
    step = builder(EncoderOnlyAttentionSpec, backend).build(0, common)
    output = layer.forward(LAYER, query, key, value, torch.empty(0), step, torch.empty_like(query))
    expected = by_the_reference(query, key, value, LENS, LENS, causal=False)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


def test_cross_attention_writes_an_encoders_tokens_once_and_sees_all_of_them() -> None:
    backend = create_cross_attention_backend(PagedBackend)
    layer = new_layer(AttentionType.ENCODER_DECODER, backend)
    page = make_page(KVCacheLayout.LBHNC, "auto")
    encoded, tables = (9, 5), blocks_of((9, 5))
    key, value = torch.randn(2, sum(encoded), KV_HEADS, SIZE)
    build = builder(CrossAttentionSpec, backend)
    vllm_layer = SimpleNamespace(kv_sharing_target_layer_name=None, **vars(LAYER))
    for lens, new in (((4, 6), (4, 6)), ((5, 7), (1, 1))):  # two prompts, then two decodes
        common = step_of(lens, new, tables)
        common.encoder_seq_lens = torch.tensor(encoded, dtype=torch.int32)
        common.encoder_seq_lens_cpu = common.encoder_seq_lens.numpy()
        query = torch.randn(sum(new), HEADS, SIZE)
        fresh = (key, value) if lens == new else (None, None)
        step = build.build(0, common)
        output = layer.forward(vllm_layer, query, *fresh, page, step, torch.empty_like(query))
        expected = by_the_reference(query, key, value, encoded, new, causal=False)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------ refused while a model loads

SELECTION = AttentionSelectorConfig(SIZE, torch.float32, "auto", 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_dtype": "int4_per_token_head"}, "kv_cache_dtype not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_pcp": True}, "PCP"),
        ({"use_dcp": True}, "DCP"),
        ({"use_non_causal": True, "has_sliding_window": True}, "sliding window with non-causal"),
    ],
)
def test_layers_that_are_not_served_are_refused(change: dict[str, Any], words: str) -> None:
    check_selection(PagedBackend, SELECTION)
    with pytest.raises(NotImplementedError, match=words):
        check_selection(PagedBackend, SELECTION._replace(**change))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt is True"),
        ({"chunk_lookback": 3}, "chunk_lookback is 3"),
        ({"head_size": 30, "kv_cache_dtype": "int8_per_token_head"}, "multiple of 4"),
        ({"sliding_window": 4, "attn_type": AttentionType.ENCODER_ONLY}, "sliding_window is 4"),
    ],
)
def test_an_option_of_a_layer_that_is_not_served_is_refused(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotImplementedError, match=words):
        new_layer(**given)


def test_a_cache_of_another_kind_is_refused() -> None:
    check_group(FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype=torch.float32))
    with pytest.raises(NotImplementedError, match="ChunkedLocalAttentionSpec"):
        builder(ChunkedLocalAttentionSpec, attention_chunk_size=8)


def test_causal_for_each_request_is_refused() -> None:
    common = step_of(LENS, NEW, blocks_of(LENS), causal=torch.tensor([True, False, True]))
    with pytest.raises(NotImplementedError, match="causal for each request"):
        builder().build(0, common)
