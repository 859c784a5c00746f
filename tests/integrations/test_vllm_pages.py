"""vLLM's pages as the ops see them, in every order of memory that vLLM knows; without vLLM."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops.integrations import vllm
from paged_ops.integrations.vllm.pages import content_bytes, open_latent_page, open_page

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, KEY, VALUE = 2, 5, 2, 4, 16, 8
# From the outermost dimension in memory to the innermost, of [layer, block, head, token, content].
ORDERS = ["LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN"]
each_order = pytest.mark.parametrize("order", ORDERS)


def make_page(order: str, content: int, dtype: torch.dtype) -> Tensor:
    """Return the page of one layer of two, amid memory of an order."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK_SIZE}
    memory = torch.zeros(*(sizes[name] for name in order), content, dtype=dtype)
    return memory.movedim([order.index(name) for name in "LBHN"], [0, 1, 2, 3])[1]


@each_order
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
def test_what_is_written_through_a_page_is_attended_to(
    order: str, cache_dtype: str, tolerance: float
) -> None:
    scaled = cache_dtype.endswith("per_token_head")
    content = content_bytes(KEY, VALUE) if scaled else KEY + VALUE
    raw = make_page(order, content, torch.float32 if cache_dtype == "auto" else torch.uint8)
    page = open_page(raw, KEY, cache_dtype)
    key, value = torch.randn(9, HEADS, KEY), torch.randn(9, HEADS, VALUE)
    blocks = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    slots = (blocks[0, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:9]
    scales = {"key_scale": page.key_scale, "value_scale": page.value_scale}

    paged_ops.write_kv(key, value, page.key_cache, page.value_cache, slots, **scales)
    query, start = torch.randn(9, 4, KEY), torch.tensor([0, 9], dtype=torch.int32)
    found = paged_ops.attention(
        query, page.key_cache, page.value_cache, blocks, start[1:], start, **scales
    )

    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    ).transpose(0, 1)
    assert float((found - expected).abs().max()) < tolerance
    # All of it is in the page, and in the blocks that were named.
    assert set(raw.flatten(1).ne(0).any(1).nonzero().flatten().tolist()) == {1, 3, 4}
    if cache_dtype == "auto":
        torch.testing.assert_close(raw[3, :, 1], torch.cat([key[1], value[1]], -1))


@each_order
def test_scales_stand_behind_what_they_scale(order: str) -> None:
    raw = make_page(order, content_bytes(KEY, VALUE), torch.uint8)
    page = open_page(raw, KEY, "int8_per_token_head")
    assert page.key_scale is not None
    assert page.value_scale is not None
    page.key_scale[2, 3, 1], page.value_scale[2, 3, 1] = 1.5, -2.0
    row = raw[2, 1, 3]
    assert row[KEY : KEY + 4].view(torch.float32) == 1.5
    assert row[-4:].view(torch.float32) == -2.0
    assert int(raw.count_nonzero()) == int(row.count_nonzero())


def test_a_latents_value_is_the_beginning_of_its_key() -> None:
    raw = torch.randn(BLOCKS, BLOCK_SIZE, 24)
    page = open_latent_page(raw, 16)
    assert page.key_cache.shape == (BLOCKS, BLOCK_SIZE, 1, 24)
    assert torch.equal(page.value_cache[:, :, 0], raw[..., :16])
    assert page.value_cache.data_ptr() == raw.data_ptr()


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand in for vLLM: a module that says whether it was built for the CPU."""
    module = ModuleType("vllm.platforms")
    module.cpu_platform_plugin = lambda: "vllm.platforms.cpu.CpuPlatform"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    return module


@pytest.mark.usefixtures("platforms")
def test_the_platform_is_named_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_VLLM", raising=False)
    assert vllm.platform_if_asked() is None
    monkeypatch.setenv("PAGED_VLLM", "0")
    assert vllm.platform_if_asked() is None
    monkeypatch.setenv("PAGED_VLLM", "1")
    assert vllm.platform_if_asked() == "paged_ops.integrations.vllm.platform.PagedCpuPlatform"


def test_where_vllm_is_for_another_device_nothing_is_named(
    platforms: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGED_VLLM", "1")
    platforms.cpu_platform_plugin = lambda: None  # type: ignore[attr-defined]
    assert vllm.platform_if_asked() is None
    assert "isn't built for the CPU" in caplog.text
