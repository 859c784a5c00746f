"""PagedKVCache: shapes, memory, and what it refuses."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import ReinplaceCounters

from paged_ops import attention, write_kv
from paged_ops.pool import memory, sizes
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.memory import available_bytes

LAYOUTS = ["HND", "NHD"]
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "num_blocks": 5,
    "block_size": 4,
    "num_kv_heads": 3,
    "head_dim": 8,
}


def small(**options: Any) -> PagedKVCache:
    return PagedKVCache(**SMALL | options)


# ------------------------------------------------------------------ shapes and views


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_the_same_shapes_in_every_layout(layout: str) -> None:
    cache = small(layout=layout)
    for layer in range(2):
        assert cache.kv_blocks(layer).shape == (5, 2, 4, 3, 8)
        key_cache, value_cache = cache.layer(layer)
        assert key_cache.shape == value_cache.shape == (5, 4, 3, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_views_show_the_one_pool_of_their_layer(layout: str) -> None:
    cache = small(layout=layout)
    key_cache, value_cache = cache.layer(1)
    key_cache[3, 2, 1, 5] = 1.0
    value_cache[4, 0, 2, 7] = 2.0
    assert cache.kv_blocks(1)[3, 0, 2, 1, 5] == 1.0
    assert cache.kv_blocks(1)[4, 1, 0, 2, 7] == 2.0
    cache.kv_blocks(1)[0, 0, 3, 1, 2] = 3.0
    assert key_cache[0, 3, 1, 2] == 3.0
    assert cache.layer_1.count_nonzero() == 3
    assert cache.layer_0.count_nonzero() == 0


@pytest.mark.parametrize(("layout", "shape"), [("HND", (5, 2, 3, 4, 8)), ("NHD", (5, 2, 4, 3, 8))])
def test_the_layout_is_the_order_in_memory(layout: str, shape: tuple[int, ...]) -> None:
    pool = small(layout=layout).layer_0
    assert pool.shape == shape
    assert pool.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim_v", [3, 8, 20])
def test_keys_and_values_of_a_block_are_one_piece_of_memory(layout: str, head_dim_v: int) -> None:
    cache = small(layout=layout, head_dim_v=head_dim_v)
    key_cache, value_cache = cache.layer(0)
    assert value_cache.shape == (5, 4, 3, head_dim_v)
    key_cache[2], value_cache[2] = 1.0, 2.0
    flat = cache.layer_0.view(5, -1)
    keys, values = 4 * 3 * 8, 4 * 3 * head_dim_v
    assert flat[2].tolist() == [1.0] * keys + [2.0] * values
    assert not flat[[0, 1, 3, 4]].any()
    assert cache.layer_0.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim_v", [3, 8, 20])
def test_every_element_has_its_own_place(layout: str, head_dim_v: int) -> None:
    cache = small(layout=layout, head_dim_v=head_dim_v)
    numbers = torch.arange(cache.layer_0.numel(), dtype=torch.float32)
    cache.layer_0.view(-1).copy_(numbers)
    key_cache, value_cache = cache.layer(0)
    seen = torch.cat([key_cache.flatten(), value_cache.flatten()])
    assert torch.equal(seen.sort().values, numbers)


def test_one_view_of_keys_and_values_of_different_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim_v is 3, but .* needs 8"):
        small(head_dim_v=3).kv_blocks(0)


@pytest.mark.parametrize("view", [PagedKVCache.layer, PagedKVCache.kv_blocks])
@pytest.mark.parametrize(
    ("layer", "error"), [(2, IndexError), (-1, IndexError), (True, TypeError), (0.0, TypeError)]
)
def test_a_layer_that_does_not_exist_is_refused(
    view: Callable[[PagedKVCache, Any], Any], layer: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"layer is {layer}, expected"):
        view(small(), layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_pool_says_what_it_is(dtype: torch.dtype) -> None:
    cache = small(dtype=dtype, head_dim_v=16)
    assert cache.dtype == dtype
    assert cache.device == torch.device("cpu")
    assert cache.num_bytes == 2 * 5 * 4 * 3 * (8 + 16) * dtype.itemsize
    assert "num_blocks=5" in repr(cache)


def test_a_new_pool_is_zero() -> None:
    assert not any(pool.any() for pool in small().buffers())


def test_the_device_is_the_default_one_unless_given() -> None:
    assert small(device="meta").device.type == "meta"
    with torch.device("meta"):
        assert small().device.type == "meta"
        assert small(device="cpu").device.type == "cpu"
        assert not small(device="cpu").layer_0.any()


def test_a_pool_follows_its_model_to_another_dtype_and_device() -> None:
    model = nn.Sequential(small())
    model.to(torch.bfloat16)
    assert model[0].dtype == torch.bfloat16
    model.to("meta")
    assert model[0].kv_blocks(1).device.type == "meta"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim_v", [None, 16])
def test_the_ops_write_and_read_the_views(layout: str, head_dim_v: int | None) -> None:
    cache = small(layout=layout, head_dim_v=head_dim_v)
    key, value = torch.randn(6, 3, 8), torch.randn(6, 3, head_dim_v or 8)
    slots = torch.tensor([12, 13, 14, 15, 4, 5])
    write_kv(key, value, *cache.layer(1), slots)
    block_tables = torch.tensor([[3, 1]], dtype=torch.int32)
    output = attention(
        torch.zeros(1, 3, 8), *cache.layer(1), block_tables, torch.tensor([6], dtype=torch.int32)
    )
    torch.testing.assert_close(output[0], value.mean(0))
    assert not cache.layer_0.any()


# ------------------------------------------------------------------ block copies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim_v", [8, 3])
@pytest.mark.parametrize("form", [list, torch.tensor, iter])
def test_copy_blocks_copies_in_every_layer_and_reads_before_it_writes(
    layout: str, head_dim_v: int, form: Callable[[Any], Any]
) -> None:
    cache = small(layout=layout, head_dim_v=head_dim_v)
    for pool in cache.buffers():
        pool.normal_()
    before = [pool.clone() for pool in cache.buffers()]
    cache.copy_blocks(form([(0, 1), (1, 2), (4, 0)]))
    for pool, old in zip(cache.buffers(), before, strict=True):
        assert torch.equal(pool, old[[4, 0, 1, 3, 4]])


def test_copying_no_blocks_changes_nothing() -> None:
    cache = small()
    for pool in cache.buffers():
        pool.normal_()
    before = [pool.clone() for pool in cache.buffers()]
    cache.copy_blocks([])
    cache.copy_blocks(torch.empty(0, 2, dtype=torch.int64))
    for pool, old in zip(cache.buffers(), before, strict=True):
        assert torch.equal(pool, old)


@pytest.mark.parametrize(
    "mapping",
    [[(0, 5)], [(-1, 0)], [(0, 1), (2, 1)], [(0, 1, 2)], [(0.0, 1.0)]],
    ids=["destination", "source", "doubled", "triple", "float"],
)
def test_a_bad_mapping_is_refused_before_any_layer_is_changed(mapping: Any) -> None:
    cache = small()
    cache.layer_0.fill_(1.0)
    cache.layer_0[0] = 2.0
    with pytest.raises(RuntimeError, match="copy_blocks"):
        cache.copy_blocks(mapping)
    assert (cache.layer_0[1:] == 1.0).all()
    assert not cache.layer_1.any()


# ------------------------------------------------------------------ never saved, never copied


class Model(nn.Module):
    def __init__(self, cache: PagedKVCache | None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if cache is not None:
            self.cache = cache


def test_a_state_dict_has_no_pool_in_it_and_none_is_needed_to_load_one() -> None:
    model, without = Model(small()), Model(None)
    assert model.state_dict().keys() == without.state_dict().keys()
    model.load_state_dict(without.state_dict(), strict=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 4096


def save(module: nn.Module) -> None:
    torch.save(module, io.BytesIO())


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2])
def test_a_cast_to_what_no_pool_can_be_of_is_refused_and_changes_nothing(
    dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    cache = PagedKVCache(2, 3, 4, 1, 8, cache_dtype=cache_dtype)
    cache.kv_blocks(0).fill_(1)
    described, before = repr(cache), cache.kv_blocks(0).clone()
    with pytest.raises(ValueError, match=rf"dtype is {dtype}, expected one of \(torch.float32"):
        cache.to(dtype)
    assert repr(cache) == described
    assert torch.equal(cache.kv_blocks(0), before)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_a_pool_that_was_cast_in_inference_mode_may_be_changed_outside_it(
    cache_dtype: torch.dtype | None,
) -> None:
    cache = PagedKVCache(2, 3, 4, 1, 8, cache_dtype=cache_dtype)
    with torch.inference_mode():
        cache.to(torch.bfloat16)
    assert cache.dtype == torch.bfloat16
    assert not cache.kv_blocks(0).is_inference()
    cache.copy_blocks([(0, 1)])


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps, save])
@pytest.mark.parametrize("wrap", [lambda cache: cache, Model, lambda cache: nn.Sequential(cache)])
def test_copying_and_pickling_are_refused_and_say_how_large_the_pool_is(
    copier: Callable[[nn.Module], Any], wrap: Callable[[PagedKVCache], nn.Module]
) -> None:
    with pytest.raises(TypeError, match="can't be copied or pickled: its pool has 7680 bytes"):
        copier(wrap(small()))


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "name", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "head_dim_v"]
)
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2**60, MemoryError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name_and_value(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=re.escape(str(value))) as caught:
        small(**{name: value})
    assert name in str(caught.value)


def test_a_pool_beyond_the_memory_is_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 10_000)
    with pytest.raises(MemoryError) as caught:
        small(num_blocks=7)
    assert str(caught.value) == (
        "num_blocks is 7, expected at most 6: 7 (num_blocks) x 2 (num_layers) x 4 (block_size) x "
        "3 (num_kv_heads) x 2 x 8 (head_dim) x 4 (torch.float32) = 10752 bytes, and 10000 bytes "
        "are available on cpu"
    )
    assert small(num_blocks=6).num_bytes == 9216
    with pytest.raises(MemoryError, match=r"x \(8 \(head_dim\) \+ 9 \(head_dim_v\)\) x 4"):
        small(num_blocks=7, head_dim_v=9)


def test_more_blocks_than_block_tables_can_name_are_refused_where_memory_is_unknown() -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {2**31}, expected 1 to {2**31 - 1}"):
        small(num_blocks=2**31, device="meta")


def test_memory_that_the_system_refuses_after_all_is_a_memory_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda device: None)
    with pytest.raises(MemoryError, match="the system refused"):
        small(num_blocks=2**31 - 1, block_size=2**12)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("dtype", torch.float64, ValueError),
        ("dtype", torch.int8, ValueError),
        ("dtype", torch.float8_e4m3fn, ValueError),
        ("dtype", "float32", ValueError),
        ("layout", "NDH", ValueError),
        ("layout", None, ValueError),
        ("device", "nowhere", RuntimeError),
    ],
)
def test_options_that_cannot_be_are_refused(
    option: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=option + " is|device"):
        small(**{option: value})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="/proc tells what is resident")
def test_a_large_pool_costs_no_memory_until_it_is_written() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    num_blocks = PagedKVCache.num_blocks_for(
        4, 16, 8, 128, num_bytes=min(2**34, (available_bytes(torch.device("cpu")) or 2**31) // 2)
    )
    before = resident_bytes()
    cache = PagedKVCache(4, num_blocks, 16, 8, 128)
    assert cache.num_bytes > 2**28
    cache.kv_blocks(3)[num_blocks // 2] = 1.0
    assert resident_bytes() - before < 2**25


def test_a_pool_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        cache = small()
    cache.layer_0.fill_(1.0)
    write_kv(torch.ones(1, 3, 8), torch.ones(1, 3, 8), *cache.layer(0), torch.tensor([0]))


# ------------------------------------------------------------------ sizing

SHAPE: dict[str, Any] = {"num_layers": 2, "block_size": 4, "num_kv_heads": 3, "head_dim": 8}
BLOCK_BYTES = 2 * 4 * 3 * (8 + 8) * 4


@pytest.mark.parametrize(
    ("num_bytes", "blocks"),
    [(BLOCK_BYTES, 1), (2 * BLOCK_BYTES - 1, 1), (10 * BLOCK_BYTES, 10), (2**80, 2**31 - 1)],
)
def test_as_many_blocks_are_counted_as_fit_into_the_bytes(num_bytes: int, blocks: int) -> None:
    assert PagedKVCache.num_blocks_for(**SHAPE, num_bytes=num_bytes) == blocks


def test_the_count_and_the_pool_agree_on_the_size() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim_v": 5}
    num_blocks = PagedKVCache.num_blocks_for(**SHAPE, **options, num_bytes=100_000)
    cache = PagedKVCache(**SHAPE, **options, num_blocks=num_blocks)
    assert cache.num_bytes <= 100_000 < cache.num_bytes * (num_blocks + 1) / num_blocks


def test_a_share_of_memory_is_that_share_with_nothing_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 100 * BLOCK_BYTES)
    assert PagedKVCache.num_blocks_for(**SHAPE, memory_fraction=0.5) == 50
    assert PagedKVCache.num_blocks_for(**SHAPE, memory_fraction=1.0) == 100
    assert PagedKVCache(**SHAPE, num_blocks=100).num_blocks == 100


def test_a_share_of_the_systems_memory_needs_no_device() -> None:
    tenth = PagedKVCache.num_blocks_for(**SHAPE, memory_fraction=0.1)
    half = PagedKVCache.num_blocks_for(**SHAPE, memory_fraction=0.5)
    assert 0 < tenth < half


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "num_bytes is None and memory_fraction is None, expected exactly one"),
        ({"num_bytes": 1, "memory_fraction": 0.5}, ValueError, "expected exactly one"),
        ({"num_bytes": -1}, ValueError, "num_bytes is -1, expected 0 or more"),
        ({"num_bytes": 1e9}, TypeError, "num_bytes is 1000000000.0"),
        (
            {"num_bytes": 100},
            ValueError,
            r"num_bytes is 100 bytes, expected at least one block: 1 \(num_blocks\) x 2 .* = 1536",
        ),
        ({"memory_fraction": 0.0}, ValueError, "memory_fraction is 0.0, expected above 0"),
        ({"memory_fraction": 1.5}, ValueError, "memory_fraction is 1.5, .* at most 1"),
        ({"memory_fraction": float("nan")}, ValueError, "memory_fraction is nan"),
        (
            {"memory_fraction": 1e-15},
            ValueError,
            r"memory_fraction 1e-15 of the \d+ bytes available on cpu is 0 bytes, .* = 1536 bytes",
        ),
        (
            {"memory_fraction": 0.5, "device": "meta"},
            MemoryError,
            "meta does not say how much memory is available; give num_bytes",
        ),
    ],
)
def test_a_size_that_cannot_be_counted_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PagedKVCache.num_blocks_for(**SHAPE, **options)


def test_available_memory_of_an_accelerator_counts_what_its_allocator_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.SimpleNamespace(
        mem_get_info=lambda device: (1000, 5000),
        memory_reserved=lambda device: 700,
        memory_allocated=lambda device: 300,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert available_bytes(torch.device("cuda")) == 1400
    del module.mem_get_info
    assert available_bytes(torch.device("cuda")) is None


def test_available_memory_of_the_cpu_falls_back_on_sysconf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_such_file(*_: object, **__: object) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(memory, "available_to_groups", lambda: None)
    monkeypatch.setattr("builtins.open", no_such_file)
    total = available_bytes(torch.device("cpu"))
    monkeypatch.setattr("os.sysconf", no_such_file)
    assert available_bytes(torch.device("cpu")) is None
    monkeypatch.undo()
    available = available_bytes(torch.device("cpu"))
    assert total is not None
    assert available is not None
    assert 0 < available <= total


# ------------------------------------------------------------------ graphs


class Layers(nn.Module):
    """Writes and attends, layer after layer: a layer's output is the value of the next one.

    Nothing here but ops and views, so the compiler has no C++ to compile.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__()
        self.cache = cache

    def forward(
        self, hidden: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        value = hidden[..., : self.cache.head_dim_v]
        for layer in range(self.cache.num_layers):
            key_cache, value_cache = self.cache.layer(layer)
            write_kv(hidden, value, key_cache, value_cache, slots)
            value = attention(hidden, key_cache, value_cache, tables, lens)
        return value


def layer_inputs() -> tuple[torch.Tensor, ...]:
    tables = torch.tensor([[3], [1]], dtype=torch.int32)
    lens = torch.tensor([1, 1], dtype=torch.int32)
    return torch.randn(2, 3, 8), torch.tensor([12, 4]), tables, lens


@pytest.mark.parametrize(
    "options",
    [{"layout": "HND"}, {"layout": "NHD"}, {"head_dim_v": 4}],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@torch.no_grad()
def test_a_compiled_graph_changes_the_pool_in_place_and_clones_none(
    options: dict[str, Any],
) -> None:
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    eager, compiled = (Layers(small(num_layers=3, **options)) for _ in range(2))
    inputs = layer_inputs()
    pools = [pool.data_ptr() for pool in compiled.buffers()]
    # With caches, a graph that was compiled for tensors that alias otherwise might be taken.
    with torch._inductor.config.patch(force_disable_caches=True):
        got = torch.compile(compiled, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, eager(*inputs))
    assert ReinplaceCounters.get_total_missed_bytes() == 0
    assert [pool.data_ptr() for pool in compiled.buffers()] == pools
    for pool, expected in zip(compiled.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(pool, expected)
        assert pool.any()


@torch.no_grad()
def test_a_model_with_a_pool_can_be_exported() -> None:
    model = Layers(small())
    inputs = layer_inputs()
    exported = torch.export.export(model, inputs)
    torch.testing.assert_close(exported.module()(*inputs), Layers(small())(*inputs))


@torch.no_grad()
def test_kv_blocks_and_copy_blocks_trace_in_one_graph() -> None:
    def copy_and_read(cache: PagedKVCache, mapping: torch.Tensor) -> torch.Tensor:
        cache.copy_blocks(mapping)
        return cache.kv_blocks(1).sum((2, 3, 4))

    cache = small()
    cache.layer_1[0] = 1.0
    compiled = torch.compile(copy_and_read, fullgraph=True, backend="aot_eager")
    sums = compiled(cache, torch.tensor([[0, 4]]))
    assert sums.tolist() == [[96.0] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2, [96.0] * 2]
