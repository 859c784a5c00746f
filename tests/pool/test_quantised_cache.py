"""Pools of int8 and float8: their scales, and that no path leaves the scales behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paged_ops
from paged_ops import BlockManager, PagedAttention, PagedKVCache, build_batch
from paged_ops.blocks.swap import SwapSpace
from paged_ops.pool import sizes
from paged_ops.pool.snapshot import restore_snapshot, save_snapshot
from tests.support.checks import relative_error, same_bits

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "num_blocks": 8,
    "block_size": 4,
    "num_kv_heads": 3,
    "head_dim": 8,
}
FORMS = [
    pytest.param(
        {"cache_dtype": dtype, "scale_granularity": granularity, "layout": layout},
        id=f"{str(dtype).removeprefix('torch.')}-{granularity}-{layout}",
    )
    for dtype in LARGEST
    for granularity, layout in (
        ("token", "HND"),
        ("token", "NHD"),
        ("head", "HND"),
        ("tensor", "HND"),
    )
]


def small(**options: Any) -> PagedKVCache:
    return PagedKVCache(**SMALL | {"cache_dtype": torch.int8} | options)


def calibrated(**options: Any) -> PagedKVCache:
    """Return a pool whose scales, if it takes any, suit standard normal keys and values."""
    cache = small(**options)
    if cache.scale_granularity != "token":
        scale = 4.0 / LARGEST[cache.cache_dtype]
        for layer in range(cache.num_layers):
            per_head = torch.linspace(0.8, 1.2, cache.num_kv_heads) * scale
            given = per_head if cache.scale_granularity == "head" else scale
            cache.set_scales(layer, given, scale)
    return cache


def attend(cache: PagedKVCache, layer: int, blocks: list[int], length: int) -> Tensor:
    query = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(layer))
    table = torch.tensor([blocks], dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    return paged_ops.attention(query, *cache.layer(layer), table, lens, **cache.scales(layer))


def filled(cache: PagedKVCache, slots: list[int]) -> PagedKVCache:
    """Write rows of different magnitudes into every layer of a pool."""
    for layer in range(cache.num_layers):
        key, value = torch.randn(2, len(slots), 3, 8).clamp(-4, 4).unbind(0)
        key = key * torch.linspace(0.1, 1.0, len(slots))[:, None, None]
        caches, where = cache.layer(layer), torch.tensor(slots)
        paged_ops.write_kv(key, value, *caches, where, **cache.scales(layer))
    return cache


# ------------------------------------------------------------------ the scales


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_scales_per_token_are_zeros_in_one_buffer_beside_each_other(layout: str) -> None:
    cache = small(layout=layout)
    key_scale, value_scale = cache.scales(1)["key_scale"], cache.scales(1)["value_scale"]
    assert key_scale is not None
    assert value_scale is not None
    assert key_scale.shape == value_scale.shape == (8, 4, 3)
    assert key_scale.dtype == torch.float32
    assert not key_scale.any()
    strides = {"HND": (24, 1, 4), "NHD": (24, 3, 1)}
    assert key_scale.stride() == value_scale.stride() == strides[layout]
    assert value_scale.data_ptr() - key_scale.data_ptr() == 12 * 4
    key_scale[5, 2, 1] = 7.0
    assert cache.scales_1.count_nonzero() == 1
    assert cache.scales_0.count_nonzero() == 0


@pytest.mark.parametrize(("granularity", "shape"), [("head", (3,)), ("tensor", ())])
@pytest.mark.parametrize("dtype", LARGEST)
def test_scales_that_have_to_be_set_are_nan_for_int8_until_they_are(
    dtype: torch.dtype, granularity: str, shape: tuple[int, ...]
) -> None:
    cache = small(cache_dtype=dtype, scale_granularity=granularity)
    before = torch.nan if dtype == torch.int8 else 1.0
    for scale in cache.scales(1).values():
        assert isinstance(scale, Tensor)
        assert same_bits(scale, torch.full(shape, before))
    assert attend(filled(cache, [4, 5]), 1, [1], 2).isnan().all() == (dtype == torch.int8)
    cache.set_scales(1, 0.5, torch.tensor(0.25))
    assert [s.unique().tolist() for s in cache.scales(1).values()] == [[0.5], [0.25]]  # type: ignore[attr-defined]
    assert same_bits(cache.scales_0, torch.full_like(cache.scales_0, before))


@pytest.mark.parametrize("form", FORMS)
def test_one_view_shows_the_scales_of_keys_and_values(form: dict[str, Any]) -> None:
    cache = filled(calibrated(**form), [4, 5, 30])
    whole = cache.kv_scales(1)
    dim = whole.shape.index(2)
    assert whole.data_ptr() == cache.scales_1.data_ptr()
    for half, scale in zip(whole.unbind(dim), cache.scales(1).values(), strict=True):
        assert isinstance(scale, Tensor)
        assert scale.stride() == half.stride()
        assert same_bits(half, scale)
    with pytest.raises(ValueError, match=r"cache_dtype is torch.float32, expected a quantised one"):
        PagedKVCache(**SMALL).kv_scales(0)


def test_heads_get_the_scales_that_are_set_for_them() -> None:
    cache = small(scale_granularity="head")
    cache.set_scales(0, torch.tensor([1.0, 2.0, 3.0]), 4)
    assert cache.scales(0)["key_scale"].tolist() == [1.0, 2.0, 3.0]  # type: ignore[union-attr]
    assert cache.scales(0)["value_scale"].tolist() == [4.0] * 3  # type: ignore[union-attr]


def test_a_pool_that_is_not_quantised_has_no_scales() -> None:
    cache = PagedKVCache(**SMALL)
    assert cache.scales(0) == {"key_scale": None, "value_scale": None}
    assert cache.scale_granularity is None
    assert cache.cache_dtype == cache.dtype == torch.float32
    assert small(cache_dtype=torch.float32).scale_granularity is None
    with pytest.raises(ValueError, match=r"cache_dtype is torch.float32, expected a quantised one"):
        cache.set_scales(0, 1.0, 1.0)


@pytest.mark.parametrize("call", [PagedKVCache.scales, lambda c, i: c.set_scales(i, 1.0, 1.0)])
def test_the_scales_of_a_layer_that_does_not_exist_are_refused(call: Any) -> None:
    with pytest.raises(IndexError, match="layer is 2, expected 0 to 1"):
        call(small(scale_granularity="head"), 2)


@pytest.mark.parametrize(
    ("granularity", "scale", "message"),
    [
        ("token", 1.0, "scale_granularity is 'token', expected 'head' or 'tensor'"),
        ("head", torch.ones(2), r"value_scale has shape \[2\], expected \[3\] or a number"),
        ("tensor", torch.ones(3), r"value_scale has shape \[3\], expected \[\] or a number"),
        ("head", torch.tensor([1.0, 0.0, 2.0]), r"value_scale is 0\.0, expected a number above 0"),
        ("tensor", -1.0, r"value_scale is -1\.0, expected a number above 0"),
        ("tensor", float("nan"), "value_scale is nan"),
        ("tensor", float("inf"), "value_scale is inf"),
    ],
)
def test_scales_that_cannot_be_are_refused_and_change_nothing(
    granularity: str, scale: Any, message: str
) -> None:
    cache = small(scale_granularity=granularity, cache_dtype=torch.float8_e5m2)
    before = cache.scales_0.clone()
    with pytest.raises(ValueError, match=message):
        cache.set_scales(0, 2.0, scale)
    assert torch.equal(cache.scales_0, before)


# ------------------------------------------------------------------ the pool


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_quantised_pool_says_what_it_is(dtype: torch.dtype) -> None:
    cache = small(dtype=torch.bfloat16, cache_dtype=dtype, scale_granularity="head", head_dim_v=5)
    assert cache.dtype == torch.bfloat16
    assert cache.cache_dtype == dtype
    assert [caches.dtype for caches in cache.layer(0)] == [dtype, dtype]
    assert f"cache_dtype={dtype}, scale_granularity='head'" in repr(cache)
    assert not cache.state_dict()


def test_bytes_are_those_of_elements_and_of_scales_per_token() -> None:
    elements = 2 * 8 * 4 * 3 * (8 + 8)
    assert small(scale_granularity="head").num_bytes == elements
    assert small().num_bytes == elements + 2 * 8 * 4 * 3 * 2 * 4
    assert small(head_dim_v=3).num_bytes == 2 * 8 * 4 * 3 * (8 + 3 + 8)


@pytest.mark.parametrize("granularity", ["token", "head"])
def test_blocks_are_counted_with_their_scales(granularity: str) -> None:
    shape = {name: size for name, size in SMALL.items() if name != "num_blocks"}
    options: dict[str, Any] = {"cache_dtype": torch.int8, "scale_granularity": granularity}
    num_blocks = PagedKVCache.num_blocks_for(**shape, **options, num_bytes=20_000)
    cache = PagedKVCache(**shape, **options, num_blocks=num_blocks)
    assert cache.num_bytes <= 20_000 < cache.num_bytes * (num_blocks + 1) / num_blocks


def test_the_arithmetic_of_a_pool_that_is_too_large_has_its_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 4000)
    with pytest.raises(MemoryError) as caught:
        small()
    assert str(caught.value) == (
        "num_blocks is 8, expected at most 6: 8 (num_blocks) x 2 (num_layers) x 4 (block_size) x "
        "3 (num_kv_heads) x (2 x 8 (head_dim) x 1 (torch.int8) + 8 (scales)) = 4608 bytes, and "
        "4000 bytes are available on cpu"
    )
    with pytest.raises(MemoryError, match=r"x 2 x 8 \(head_dim\) x 1 \(torch.int8\) = 4608 bytes"):
        small(num_blocks=12, scale_granularity="tensor")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dtype": torch.bfloat16}, "cache_dtype is torch.bfloat16, expected torch.float32"),
        ({"cache_dtype": torch.uint8}, "cache_dtype is torch.uint8"),
        ({"scale_granularity": "block"}, "scale_granularity is 'block', expected one of"),
        (
            {"cache_dtype": None, "scale_granularity": "head"},
            "scale_granularity is 'head', but a cache of torch.float32 has no scales",
        ),
    ],
)
def test_forms_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("granularity", ["token", "head"])
def test_a_cast_of_the_model_leaves_elements_and_scales_as_they_are(
    dtype: torch.dtype, granularity: str
) -> None:
    cache = filled(calibrated(cache_dtype=dtype, scale_granularity=granularity), [4, 5, 6])
    before = [buffer.clone() for buffer in cache.buffers()]
    model = nn.Sequential(cache, nn.Linear(2, 2)).to(torch.bfloat16)
    assert model[1].weight.dtype == torch.bfloat16
    assert cache.dtype == torch.bfloat16
    assert cache.cache_dtype == dtype
    for buffer, old in zip(cache.buffers(), before, strict=True):
        assert same_bits(buffer, old)
    model.to("meta")
    assert {buffer.device.type for buffer in cache.buffers()} == {"meta"}
    assert cache.dtype == torch.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_attention_over_a_quantised_pool_is_near_that_over_the_rows(form: dict[str, Any]) -> None:
    torch.manual_seed(1)
    quantised = filled(calibrated(**form), list(range(4, 20)))
    torch.manual_seed(1)
    plain = filled(PagedKVCache(**SMALL), list(range(4, 20)))
    got, want = (attend(cache, 1, [1, 2, 3, 4], 16) for cache in (quantised, plain))
    bound = {torch.int8: 0.03, torch.float8_e4m3fn: 0.06, torch.float8_e5m2: 0.12}
    assert 0 < relative_error(got, want) < bound[form["cache_dtype"]]


# ------------------------------------------------------------------ blocks that move


@pytest.mark.parametrize("form", FORMS)
def test_copied_blocks_read_as_before(form: dict[str, Any]) -> None:
    cache = filled(calibrated(**form), list(range(4, 12)))
    before = [attend(cache, layer, [1, 2], 7) for layer in range(2)]
    cache.copy_blocks([(1, 2), (2, 7)])
    for layer in range(2):
        assert same_bits(attend(cache, layer, [2, 7], 7), before[layer])


@pytest.mark.parametrize("form", FORMS)
def test_sent_blocks_read_as_before(form: dict[str, Any]) -> None:
    cache, other = calibrated(**form), calibrated(num_blocks=5, **form)
    filled(cache, list(range(4, 12)))
    before = [attend(cache, layer, [1, 2], 7) for layer in range(2)]
    cache.send_blocks(other, [(1, 4), (2, 0)])
    filled(cache, list(range(4, 12)))
    for layer in range(2):
        assert same_bits(attend(other, layer, [4, 0], 7), before[layer])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dtype": torch.float8_e5m2}, "destination has cache_dtype torch.float8_e5m2"),
        ({"cache_dtype": None}, "destination has cache_dtype torch.float32"),
        ({"scale_granularity": "head"}, "destination has scale_granularity head, expected token"),
    ],
)
def test_blocks_are_not_sent_to_a_pool_of_another_form(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        small().send_blocks(small(**options), [(0, 0)])


@pytest.mark.parametrize("granularity", ["head", "tensor"])
def test_blocks_are_not_sent_where_other_scales_were_set(granularity: str) -> None:
    cache, other = (calibrated(scale_granularity=granularity) for _ in range(2))
    other.set_scales(1, 0.5, 0.25)
    with pytest.raises(ValueError, match=r"destination has scales .*0\.5.* set_scales there too"):
        cache.send_blocks(other, [(0, 0)])
    unset = [small(scale_granularity=granularity) for _ in range(2)]
    unset[0].send_blocks(unset[1], [(0, 0)])  # NaN there and here


class Server:
    """Books and a quantised pool; the keys and values of a token follow from its id."""

    def __init__(self, num_blocks: int = 16, **form: Any) -> None:
        self.manager = BlockManager(num_blocks, 4)
        self.cache = calibrated(num_blocks=num_blocks, **form)

    def feed(self, request: str, tokens: list[int]) -> Tensor:
        """Append tokens, write what isn't cached, and attend from it in the last layer."""
        if request in self.manager.ledger.requests:
            self.cache.copy_blocks(self.manager.append(request, tokens))
            new = len(tokens)
        else:
            new = len(tokens) - self.manager.allocate(request, tokens)
        batch = build_batch(self.manager, [request], [new])
        rows = torch.stack([self.row(token) for token in tokens[len(tokens) - new :]])
        for layer in range(2):
            paged_ops.write_kv(
                rows,
                rows + 1,
                *self.cache.layer(layer),
                batch.slot_mapping,
                **self.cache.scales(layer),
            )
        index = batch.block_tables, batch.seq_lens, batch.query_start_loc
        caches, scales = self.cache.layer(1), self.cache.scales(1)
        output = paged_ops.attention(rows.repeat(1, 2, 1), *caches, *index, **scales)
        self.manager.commit(request)
        return output

    @staticmethod
    def row(token: int) -> Tensor:
        generator = torch.Generator().manual_seed(token)
        return torch.randn(3, 8, generator=generator) * (1 + token % 5) / 3


@pytest.mark.parametrize("form", FORMS)
def test_a_hit_on_a_quantised_prefix_equals_the_run_without(form: dict[str, Any]) -> None:
    tokens = list(range(100, 137))  # 36 of them fill blocks, all but 5 of a second prompt's
    server, alone = Server(num_blocks=32, **form), Server(num_blocks=32, **form)
    server.feed("first", tokens)
    output = server.feed("second", [*tokens[:32], 1, 2, 3, 4, 5])
    assert len(output) == 5
    assert same_bits(output, alone.feed("second", [*tokens[:32], 1, 2, 3, 4, 5])[32:])


@pytest.mark.parametrize("form", FORMS)
def test_a_request_that_was_swapped_out_goes_on_bit_for_bit(form: dict[str, Any]) -> None:
    server, stayed = Server(**form), Server(**form)
    host = calibrated(num_blocks=6, **form)
    space = SwapSpace(server.manager, 6)
    for each in (server, stayed):
        each.feed("a", list(range(10)))
    transfer = space.swap_out(["a"])
    server.cache.send_blocks(host, transfer.copies)
    transfer.finish()
    server.manager.flush()
    server.feed("b", list(range(50, 90)))  # into the blocks that are free now
    transfer = space.swap_in(["a"])
    host.send_blocks(server.cache, transfer.copies)
    transfer.finish()
    assert same_bits(server.feed("a", [7, 8, 9]), stayed.feed("a", [7, 8, 9]))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("form", FORMS)
def test_a_restored_request_goes_on_bit_for_bit(
    tmp_path: Path, form: dict[str, Any], layout: str
) -> None:
    pytest.importorskip("safetensors", reason="snapshots need the safetensors package")
    server, other = Server(**form), Server(num_blocks=20, **form | {"layout": layout})
    server.feed("a", list(range(10)))
    other.feed("here already", [3, 1, 4])
    save_snapshot(tmp_path, server.manager, server.cache)
    assert restore_snapshot(tmp_path, other.manager, other.cache) == ["a"]
    assert same_bits(server.feed("a", [7, 8, 9]), other.feed("a", [7, 8, 9]))


@pytest.mark.parametrize(
    ("saved", "restored", "message"),
    [
        ({}, {"cache_dtype": None}, "snapshot has cache_dtype 'torch.int8', expected 'torch.float"),
        ({"cache_dtype": None}, {}, "snapshot has cache_dtype 'torch.float32', expected"),
        ({}, {"scale_granularity": "head"}, "snapshot has scale_granularity 'token'"),
        ({"cache_dtype": torch.float8_e5m2}, {}, "snapshot has cache_dtype 'torch.float8_e5m2'"),
    ],
)
def test_a_snapshot_of_a_pool_of_another_form_is_refused(
    tmp_path: Path, saved: dict[str, Any], restored: dict[str, Any], message: str
) -> None:
    pytest.importorskip("safetensors", reason="snapshots need the safetensors package")
    manager = BlockManager(8, 4)
    manager.allocate("a", 3)
    save_snapshot(tmp_path, manager, small(**saved))
    with pytest.raises(ValueError, match=message):
        restore_snapshot(tmp_path, BlockManager(8, 4), small(**restored))


def test_a_snapshot_of_a_pool_with_other_set_scales_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="snapshots need the safetensors package")
    server = Server(scale_granularity="head")
    server.feed("a", [1, 2, 3])
    save_snapshot(tmp_path, server.manager, server.cache)
    other = Server(scale_granularity="head")
    other.cache.set_scales(0, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"snapshot has scales \[.*0\.5"):
        restore_snapshot(tmp_path, other.manager, other.cache)


def test_a_snapshot_of_a_plain_pool_is_read_by_plain_ones_alone(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="snapshots need the safetensors package")
    manager, cache = BlockManager(8, 4), PagedKVCache(**SMALL)
    manager.allocate("a", 3)
    cache.layer_1.fill_(2.0)
    save_snapshot(tmp_path, manager, cache)
    with pytest.raises(ValueError, match=r"snapshot has cache_dtype 'torch\.float32'"):
        restore_snapshot(tmp_path, BlockManager(8, 4), small())
    other = PagedKVCache(**SMALL)
    assert restore_snapshot(tmp_path, BlockManager(8, 4), other) == ["a"]
    assert (other.kv_blocks(1)[0] == 2.0).all()


# ------------------------------------------------------------------ graphs


class Layers(nn.Module):
    """Writes and attends, layer after layer."""

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, hidden: Tensor, slots: Tensor, *index: Tensor) -> Tensor:
        value = hidden
        for layer in range(self.cache.num_layers):
            caches, scales = self.cache.layer(layer), self.cache.scales(layer)
            paged_ops.write_kv(hidden, value, *caches, slots, **scales)
            value = paged_ops.attention(hidden, *caches, *index, **scales)
        return value


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_model_with_a_quantised_pool_can_be_exported(form: dict[str, Any]) -> None:
    inputs = (
        torch.randn(2, 3, 8),
        torch.tensor([12, 4]),
        torch.tensor([[3], [1]], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
    )
    exported = torch.export.export(Layers(calibrated(**form)), inputs)
    assert same_bits(exported.module()(*inputs), Layers(calibrated(**form))(*inputs))


@torch.no_grad()
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_an_exported_step_takes_the_pool_and_its_scales_as_inputs(layout: str) -> None:
    class Step(nn.Module):
        def forward(self, rows: Tensor, blocks: Tensor, scales: Tensor, *index: Tensor) -> Tensor:
            caches = blocks.unbind(1)
            key_scale, value_scale = scales.unbind(1)
            given = {"key_scale": key_scale, "value_scale": value_scale}
            paged_ops.write_kv(rows, rows + 1, *caches, index[0], **given)
            return paged_ops.attention(rows, *caches, *index[1:], **given)

    def inputs(num_blocks: int) -> tuple[Tensor, ...]:
        pool = small(num_blocks=num_blocks, layout=layout)
        tables = torch.tensor([[3], [num_blocks - 1]], dtype=torch.int32)
        slots, lens = tables[:, 0].long() * 4, torch.tensor([1, 1], dtype=torch.int32)
        return torch.randn(2, 3, 8), pool.kv_blocks(1), pool.kv_scales(1), slots, tables, lens

    blocks = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(
        Step(),
        inputs(8),
        dynamic_shapes={
            "rows": None,
            "blocks": blocks,
            "scales": blocks,
            "index": (None, None, None),
        },
    )
    rows, *rest = given = inputs(20)
    assert relative_error(exported.module()(*given), rows + 1) < 0.01
    assert rest[1].count_nonzero() == 2 * 2 * 3


# ------------------------------------------------------------------ the front door


def front_door(form: dict[str, Any]) -> PagedAttention:
    layer = PagedAttention(6, 8, 4, 16, 3, **form)
    if layer.cache.scale_granularity in ("head", "tensor"):
        layer.cache.set_scales(0, 4 / LARGEST[layer.cache.cache_dtype], 0.02)
    return layer


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, 6, 8), torch.randn(count, 3, 8), torch.randn(count, 3, 8)


@pytest.mark.parametrize("form", FORMS)
def test_a_fork_that_writes_into_a_shared_block_reads_as_if_it_had_been_alone(
    form: dict[str, Any],
) -> None:
    layer, alone = front_door(form), front_door(form)
    prompt, own, childs = tokens(6), tokens(3), tokens(3)
    for each in (layer, alone):
        each.allocate("parent", 6)
        each(*prompt, ["parent"], [6])
    layer.fork("parent", "child")
    assert layer.manager.block_table("child") == layer.manager.block_table("parent")
    output = layer(*own, ["parent"], [3])
    assert layer.manager.block_table("child") != layer.manager.block_table("parent")
    assert same_bits(layer(*childs, ["child"], [3]), alone(*childs, ["parent"], [3]))
    again = front_door(form)
    again.allocate("parent", 0)
    again(*prompt, ["parent"], [6])
    assert same_bits(output, again(*own, ["parent"], [3]))


def test_an_int8_layer_is_within_a_few_percent_of_a_float_one() -> None:
    quantised, plain = front_door({"cache_dtype": torch.int8}), front_door({})
    for layer in (quantised, plain):
        layer.allocate("a", 0)
    for count in (9, 1, 4, 1):
        given = tokens(count)
        got, want = (layer(*given, ["a"], [count]) for layer in (quantised, plain))
        assert 0 < relative_error(got, want) < 0.03
        assert got.dtype == torch.float32
