"""Every argument of every op, wrong in every way: refused by name, and nothing is written.

Each row of the table changes one call that is good, and says what the message must hold: the
argument, its value and the limit. A refusal that needs neither the values of a tensor nor its
place in memory must come from the fake functions too, that is, when a graph is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import paged_ops
from tests.fuzz import fuzz
from tests.support.checks import same_bits

assert paged_ops  # Loads the library that registers torch.ops.paged.

Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_V = 5, 4, 2, 8, 6
ATTENTION = ("attention", "attention_with_lse", "attention.out")
READS_BLOCKS = (*ATTENTION, "gather_kv")
HAS_CACHES = (*READS_BLOCKS, "write_kv", "copy_blocks")
WRITES_CACHES = ("write_kv", "copy_blocks")


@dataclass(frozen=True)
class Refusal:
    """One wrong call: what is wrong, how to make it so, and what the message must hold."""

    op: str
    kind: str
    change: Change
    says: tuple[str, ...]
    needs_memory: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.kind}"


def good_arguments(op: str) -> Arguments:
    """Return arguments that the op takes."""
    if op == "merge_states":
        states = [torch.randn(3, 4, HEAD_DIM_V), torch.randn(3, 4)] * 2
        return dict(zip(("out_a", "lse_a", "out_b", "lse_b"), states, strict=True))
    arguments: Arguments = {
        "key_cache": torch.randn(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM),
        "value_cache": torch.randn(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM_V),
    }
    if op in READS_BLOCKS:
        arguments["block_tables"] = torch.tensor([[0, 1, 2], [3, -1, 99]], dtype=torch.int32)
        arguments["seq_lens"] = torch.tensor([10, 3], dtype=torch.int32)
    if op in ATTENTION:
        arguments["query"] = torch.randn(3, 4, HEAD_DIM)
        arguments["query_start_loc"] = torch.tensor([0, 2, 3], dtype=torch.int32)
    if op == "attention.out":
        arguments["out"] = torch.randn(3, 4, HEAD_DIM_V)
    if op == "write_kv":
        arguments["key"] = torch.randn(3, NUM_KV_HEADS, HEAD_DIM)
        arguments["value"] = torch.randn(3, NUM_KV_HEADS, HEAD_DIM_V)
        arguments["slot_mapping"] = torch.tensor([0, 7, 19])
    if op == "copy_blocks":
        arguments["block_mapping"] = torch.tensor([[0, 1], [1, 2]])
    return arguments


def call(op: str, arguments: Arguments) -> Any:
    name, _, overload = op.partition(".")
    packet = getattr(torch.ops.paged, name)
    return getattr(packet, overload)(**arguments) if overload else packet(**arguments)


# Ways to make an argument wrong


def put(name: str, value: Any) -> Change:
    """Give the argument another value; a callable is given the good one."""

    def change(arguments: Arguments) -> None:
        arguments[name] = value(arguments[name]) if callable(value) else value

    return change


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def sparse_last(tensor: Tensor) -> Tensor:
    """Return the same values with every other element of the last dimension unused."""
    return torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., ::2]


def resized(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = size
        return torch.zeros(shape, dtype=tensor.dtype)

    return change


def expanded(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(dim, 0, 1).clone().expand_as(tensor)


def overlapping(dim: int) -> Callable[[Tensor], Tensor]:
    """Move the entries of a dimension so close together that each shares memory with the next."""

    def change(tensor: Tensor) -> Tensor:
        strides = list(tensor.stride())
        strides[dim] = 3
        return tensor.as_strided(tensor.shape, strides)

    return change


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def with_entry(name: str, index: int | tuple[int, int], value: int) -> Change:
    """Put a value into an index tensor."""

    def change(arguments: Arguments) -> None:
        arguments[name] = arguments[name].clone()
        arguments[name][index] = value

    return change


# The table


def wrong_ranks(ops: tuple[str, ...], name: str, rank: int) -> Iterator[Refusal]:
    for op in ops:
        for kind, reshape, got in (
            ("rank one less", lambda t: t[0], rank - 1),
            ("rank one more", lambda t: t.unsqueeze(0), rank + 1),
            ("rank 0", lambda t: t.flatten()[0], 0),
        ):
            says = (name, str(got), str(rank))
            yield Refusal(op, f"{name} of {kind}", put(name, reshape), says)


def wrong_dtypes(
    ops: tuple[str, ...], name: str, dtypes: tuple[torch.dtype, ...], expected: str
) -> Iterator[Refusal]:
    for op in ops:
        for dtype in dtypes:
            says = (name, str(dtype), expected)
            yield Refusal(op, f"{name} of {dtype}", put(name, cast(dtype)), says)


def wrong_sizes(
    ops: tuple[str, ...], name: str, dim: int, sizes: tuple[int, ...], expected: int
) -> Iterator[Refusal]:
    for op in ops:
        for size in sizes:
            says = (name, str(size), str(expected))
            kind = f"{name} of shape[{dim}] {size}"
            yield Refusal(op, kind, put(name, resized(dim, size)), says)


def wrong_devices(ops: tuple[str, ...], names: tuple[str, ...]) -> Iterator[Refusal]:
    for op in ops:
        for name in names:
            says = (name, "meta", "cpu")
            yield Refusal(op, f"{name} on another device", put(name, on_meta), says)


def sparse_rows(ops: tuple[str, ...], names: tuple[str, ...]) -> Iterator[Refusal]:
    for op in ops:
        for name in names:
            kind = f"{name} with a last dimension that is not dense"
            yield Refusal(op, kind, put(name, sparse_last), (name, "stride", "2", "1"))


FLOATS = "torch.float32"
NOT_FLOATS = (torch.float64, torch.int32, torch.int8, torch.float8_e4m3fn, torch.bool)
NOT_INT32 = (torch.int64, torch.int16, torch.uint8, torch.float32, torch.bool)
NOT_INT = (torch.int16, torch.uint8, torch.float32, torch.bool)


def cache_refusals() -> Iterator[Refusal]:
    for name in ("key_cache", "value_cache"):
        yield from wrong_ranks(HAS_CACHES, name, 4)
        yield from wrong_dtypes(
            HAS_CACHES,
            name,
            (torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
            FLOATS,
        )
        yield from sparse_rows(HAS_CACHES, (name,))
        yield from wrong_sizes(HAS_CACHES, name, 3, (0,), 1)
    for op in HAS_CACHES:
        says = ("value_cache", "float16", "float32")
        yield Refusal(
            op, "value_cache of another dtype", put("value_cache", cast(torch.half)), says
        )
        for dim, good in ((0, NUM_BLOCKS), (1, BLOCK_SIZE), (2, NUM_KV_HEADS)):
            kind = f"value_cache of another shape[{dim}]"
            says = ("value_cache", str(good + 1), str(good))
            yield Refusal(op, kind, put("value_cache", resized(dim, good + 1)), says)
        for dim, what in ((1, "block_size"), (2, "num_kv_heads")):

            def both(arguments: Arguments, dim: int = dim) -> None:
                for cache in ("key_cache", "value_cache"):
                    arguments[cache] = resized(dim, 0)(arguments[cache])

            yield Refusal(op, f"{what} of 0", both, ("key_cache", what, "0", "1"))

        def both_int8(arguments: Arguments) -> None:
            for cache in ("key_cache", "value_cache"):
                arguments[cache] = arguments[cache].to(torch.int8)

        says = ("key_scale", "None", "key_cache", "torch.int8")
        yield Refusal(op, "int8 caches without scales", both_int8, says)
        for name in ("key_scale", "value_scale"):
            change = put(name, torch.ones(1))
            says = (name, "tensor", "None", "torch.float32")
            yield Refusal(op, f"{name} for a cache that is not quantised", change, says)
        yield from scale_refusals(op)
    for op in WRITES_CACHES:
        for name in ("key_cache", "value_cache"):
            for dim in (0, 1, 2):
                kind = f"{name} expanded in dimension {dim}"
                yield Refusal(op, kind, put(name, expanded(dim)), (name, "0"), True)
                kind = f"{name} with overlapping dimension {dim}"
                yield Refusal(op, kind, put(name, overlapping(dim)), (name,), True)
    yield from wrong_devices(HAS_CACHES, ("key_cache", "value_cache"))


def quantised_with(name: str, scale: Callable[[Tensor], Tensor | None]) -> Change:
    """Make the caches int8, their scales one per token and head, and then one scale another."""

    def change(arguments: Arguments) -> None:
        for half in ("key", "value"):
            cache = arguments[f"{half}_cache"].to(torch.int8)
            arguments[f"{half}_cache"] = cache
            arguments[f"{half}_scale"] = torch.rand(cache.shape[:3])
        arguments[name] = scale(arguments[name])

    return change


def scale_refusals(op: str) -> Iterator[Refusal]:
    for name in ("key_scale", "value_scale"):
        for kind, scale, says in (
            ("None", lambda t: None, ("None", "tensor")),
            ("of float64", cast(torch.float64), ("float64", "torch.float32")),
            ("of float16", cast(torch.float16), ("float16", "torch.float32")),
            ("of rank 2", lambda t: t[0], ("2", "0, 1 or 3")),
            ("of rank 4", lambda t: t[None], ("4", "0, 1 or 3")),
            ("of too many heads", lambda t: torch.ones(NUM_KV_HEADS + 1), ("3", "2", "heads")),
            ("of one head", lambda t: torch.ones(1), ("1", "2", "num_kv_heads")),
            ("of other blocks", resized(0, NUM_BLOCKS + 1), ("6", "5", "num_blocks")),
            ("of another block size", resized(1, BLOCK_SIZE - 1), ("3", "4", "block_size")),
            ("of other heads per token", resized(2, 1), ("1", "2", "num_kv_heads")),
            ("on another device", on_meta, ("meta", "cpu")),
        ):
            yield Refusal(op, f"{name} {kind}", quantised_with(name, scale), (name, *says))
    if op not in WRITES_CACHES:
        return
    for name in ("key_scale", "value_scale"):
        for dim in (0, 1, 2):
            change = quantised_with(name, expanded(dim))
            kind = f"{name} expanded in dimension {dim}"
            yield Refusal(op, kind, change, (name, "stride", "0"), needs_memory=True)

        def in_the_cache(arguments: Arguments, name: str = name) -> None:
            quantised_with(name, lambda scale: scale)(arguments)
            memory = torch.zeros(NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM)
            cache = memory.view(torch.int8)[: memory.numel()]
            arguments["key_cache"] = cache.view(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
            arguments[name] = memory[: arguments[name].numel()].view(arguments[name].shape)

        says = (name, "shares memory", "key_cache")
        yield Refusal(op, f"{name} in the memory of key_cache", in_the_cache, says, True)


def table_refusals() -> Iterator[Refusal]:
    yield from wrong_ranks(READS_BLOCKS, "block_tables", 2)
    yield from wrong_dtypes(READS_BLOCKS, "block_tables", NOT_INT32, "torch.int32")
    yield from wrong_sizes(READS_BLOCKS, "block_tables", 0, (0, 1, 3), 2)
    yield from wrong_devices(READS_BLOCKS, ("block_tables", "seq_lens"))
    for op in READS_BLOCKS:
        for index in ((0, 0), (0, 2), (1, 0)):
            for value in (-1, NUM_BLOCKS, INT32_MIN, INT32_MAX):
                yield Refusal(
                    op,
                    f"block_tables[{index[0]}, {index[1]}] of {value}",
                    with_entry("block_tables", index, value),
                    (f"block_tables[{index[0]}, {index[1]}]", str(value), f"{NUM_BLOCKS - 1}"),
                    needs_memory=True,
                )
    yield from wrong_ranks(READS_BLOCKS, "seq_lens", 1)
    yield from wrong_dtypes(READS_BLOCKS, "seq_lens", NOT_INT32, "torch.int32")
    for op in READS_BLOCKS:
        for value, limit in ((-1, 0), (INT32_MIN, 0), (13, 12), (INT32_MAX, 12)):
            for row in (0, 1):
                yield Refusal(
                    op,
                    f"seq_lens[{row}] of {value}",
                    with_entry("seq_lens", row, value),
                    (f"seq_lens[{row}]", str(value), str(limit)),
                    needs_memory=True,
                )


def attention_refusals() -> Iterator[Refusal]:
    yield from wrong_ranks(ATTENTION, "query", 3)
    yield from wrong_dtypes(ATTENTION, "query", NOT_FLOATS, FLOATS)
    yield from sparse_rows(ATTENTION, ("query",))
    yield from wrong_sizes(ATTENTION, "query", 1, (0, 1, 3), NUM_KV_HEADS)
    yield from wrong_sizes(ATTENTION, "query", 2, (0, 7, 9), HEAD_DIM)
    yield from wrong_devices(ATTENTION, ("query", "query_start_loc"))
    yield from wrong_ranks(ATTENTION, "query_start_loc", 1)
    yield from wrong_dtypes(ATTENTION, "query_start_loc", NOT_INT32, "torch.int32")
    yield from wrong_sizes(ATTENTION, "query_start_loc", 0, (0, 2, 4), 3)
    for op in ATTENTION:
        for dtype in (torch.float16, torch.bfloat16):
            says = ("query", "key_cache", str(dtype), "torch.float32")
            change = put("query", cast(dtype))
            yield Refusal(op, f"a float32 cache for a query of {dtype}", change, says)
        says = ("query", "3", "2", "query_start_loc")
        change = put("query_start_loc", None)
        yield Refusal(op, "more queries than sequences in decode form", change, says)
        for starts, says in (
            ([1, 2, 3], ("query_start_loc[0]", "1", "0")),
            ([-1, 2, 3], ("query_start_loc[0]", "-1", "0")),
            ([0, 4, 3], ("query_start_loc[2]", "3", "4")),
            ([0, -2, 3], ("query_start_loc[1]", "-2", "0")),
            ([0, 2, 4], ("query_start_loc[2]", "4", "3")),
            ([0, 0, INT32_MAX], ("query_start_loc[2]", str(INT32_MAX), "3")),
            ([0, INT32_MIN, 3], ("query_start_loc[1]", str(INT32_MIN), "0")),
        ):
            change = put("query_start_loc", torch.tensor(starts, dtype=torch.int32))
            yield Refusal(op, f"query_start_loc of {starts}", change, says, needs_memory=True)
        yield from option_refusals(op)


def option_refusals(op: str) -> Iterator[Refusal]:
    for name, values in (
        ("scale", (math.nan, math.inf, -math.inf, 1e39)),
        ("softcap", (-1.0, -1e-9, math.nan, math.inf, -math.inf, 1e39)),
    ):
        for value in values:
            says = (name, f"is {value:g}"[:8], "finite")
            yield Refusal(op, f"{name} of {value}", put(name, value), says)
    for value in (0, -1, INT64_MIN):
        says = ("sliding_window", str(value), "1")
        yield Refusal(op, f"sliding_window of {value}", put("sliding_window", value), says)
    mask = torch.ones(3, 2, dtype=torch.bool)
    for kind, value, says in (
        ("of uint8", mask.to(torch.uint8), ("uint8", "torch.bool")),
        ("of float32", mask.float(), ("float32", "torch.bool")),
        ("of rank 1", mask[0], ("1", "2")),
        ("of rank 3", mask[None], ("3", "2")),
        ("of too few rows", mask[:2], ("2", "3", "num_tokens")),
        ("of too many rows", torch.ones(4, 2, dtype=torch.bool), ("4", "3", "num_tokens")),
        ("on another device", mask.to("meta"), ("meta", "cpu")),
    ):
        yield Refusal(op, f"tree_mask {kind}", put("tree_mask", value), ("tree_mask", *says))
    change = put("tree_mask", mask[:, :1])
    says = ("tree_mask.shape[1]", "1", "2", "sequence 0")
    yield Refusal(op, "tree_mask of too few columns", change, says, needs_memory=True)
    for name, value in (("sliding_window", 4), ("alibi_slopes", torch.ones(4))):

        def with_mask(arguments: Arguments, name: str = name, value: Any = value) -> None:
            arguments["tree_mask"] = mask
            arguments[name] = value

        yield Refusal(op, f"tree_mask with {name}", with_mask, (name, "None", "tree_mask"))
    ranges = torch.zeros(3, 2, dtype=torch.int32)
    for kind, value, says in (
        ("of int64", ranges.long(), ("int64", "torch.int32")),
        ("of float32", ranges.float(), ("float32", "torch.int32")),
        ("of rank 1", ranges[0], ("1", "2")),
        ("of rank 3", ranges[None], ("3", "2")),
        ("of too few rows", ranges[:2], ("2", "3", "num_tokens")),
        ("of too many rows", ranges.new_zeros(4, 2), ("4", "3", "num_tokens")),
        ("of one column", ranges[:, :1], ("1", "2", "end")),
        ("on another device", ranges.to("meta"), ("meta", "cpu")),
    ):
        yield Refusal(op, f"key_ranges {kind}", put("key_ranges", value), ("key_ranges", *says))
    for name in ("alibi_slopes", "sinks"):
        for kind, value, says in (
            ("rank 0", torch.tensor(1.0), ("0", "1")),
            ("rank 2", torch.ones(1, 4), ("2", "1")),
            ("float64", torch.ones(4, dtype=torch.float64), ("float64", FLOATS)),
            ("float16", torch.ones(4, dtype=torch.float16), ("float16", FLOATS)),
            ("int32", torch.ones(4, dtype=torch.int32), ("int32", FLOATS)),
            ("no heads", torch.ones(0), ("0", "4")),
            ("num_kv_heads values", torch.ones(NUM_KV_HEADS), (str(NUM_KV_HEADS), "4")),
            ("one head too many", torch.ones(5), ("5", "4")),
            ("another device", torch.ones(4, device="meta"), ("meta", "cpu")),
        ):
            yield Refusal(op, f"{name} of {kind}", put(name, value), (name, *says))


def out_refusals() -> Iterator[Refusal]:
    ops = ("attention.out",)
    yield from wrong_ranks(ops, "out", 3)
    yield from wrong_dtypes(ops, "out", (torch.float16, torch.float64, torch.int32), FLOATS)
    yield from sparse_rows(ops, ("out",))
    yield from wrong_sizes(ops, "out", 0, (0, 2, 4), 3)
    yield from wrong_sizes(ops, "out", 1, (0, 1, 5), 4)
    yield from wrong_sizes(ops, "out", 2, (0, 1, HEAD_DIM), HEAD_DIM_V)
    yield from wrong_devices(ops, ("out",))
    for dim in (0, 1):
        kind = f"out expanded in dimension {dim}"
        yield Refusal("attention.out", kind, put("out", expanded(dim)), ("out", "0"), True)
        kind = f"out with overlapping dimension {dim}"
        yield Refusal("attention.out", kind, put("out", overlapping(dim)), ("out",), True)
    for name in ("query", "key_cache", "value_cache"):

        def share(arguments: Arguments, name: str = name) -> None:
            shared = arguments[name].flatten()
            arguments["out"] = shared.as_strided((3, 4, HEAD_DIM_V), (24, HEAD_DIM_V, 1))

        says = ("out", name, "memory")
        yield Refusal("attention.out", f"out in the memory of {name}", share, says, True)
    for name in ("block_tables", "seq_lens", "query_start_loc", "alibi_slopes", "sinks"):

        def reuse(arguments: Arguments, name: str = name) -> None:
            memory = arguments["out"].flatten()
            given = arguments.get(name, torch.zeros(4))
            view = memory[10 : 10 + given.numel()].view(given.dtype).view(given.shape)
            arguments[name] = view.copy_(given)

        says = ("out", name, "memory")
        yield Refusal("attention.out", f"{name} in the memory of out", reuse, says, True)


def write_refusals() -> Iterator[Refusal]:
    ops = ("write_kv",)
    for name, width in (("key", HEAD_DIM), ("value", HEAD_DIM_V)):
        yield from wrong_ranks(ops, name, 3)
        yield from wrong_sizes(ops, name, 1, (0, 1, 3), NUM_KV_HEADS)
        yield from wrong_sizes(ops, name, 2, (0, width - 1, width + 1), width)
        yield from sparse_rows(ops, (name,))
        for dtype in (*NOT_FLOATS, torch.float16, torch.bfloat16):
            says = (name, str(dtype), "torch.float32")
            yield Refusal("write_kv", f"{name} of {dtype}", put(name, cast(dtype)), says)
        for cache in ("key_cache", "value_cache"):

            def share(arguments: Arguments, name: str = name, cache: str = cache) -> None:
                shape = arguments[name].shape
                arguments[name] = arguments[cache].flatten()[: shape.numel()].view(shape)

            kind = f"{name} in the memory of {cache}"
            yield Refusal("write_kv", kind, share, (name, cache, "memory"), True)
    yield from wrong_sizes(ops, "value", 0, (0, 2, 4), 3)
    yield from wrong_devices(ops, ("key", "value", "slot_mapping"))
    yield from wrong_ranks(ops, "slot_mapping", 1)
    yield from wrong_dtypes(ops, "slot_mapping", NOT_INT, "torch.int64")
    yield from wrong_sizes(ops, "slot_mapping", 0, (0, 2, 4), 3)
    num_slots = NUM_BLOCKS * BLOCK_SIZE
    for dtype, values in (
        (torch.int64, (-2, num_slots, INT32_MIN, INT32_MAX, 2**32, INT64_MIN, INT64_MAX)),
        (torch.int32, (-2, num_slots, INT32_MIN, INT32_MAX)),
    ):
        for row in (0, 1, 2):
            for value in values:
                slots = torch.tensor([0, 7, 19], dtype=dtype)
                slots[row] = value
                yield Refusal(
                    "write_kv",
                    f"slot_mapping[{row}] of {value} in {dtype}",
                    put("slot_mapping", slots),
                    (f"slot_mapping[{row}]", str(value), str(num_slots - 1)),
                    needs_memory=True,
                )


def copy_refusals() -> Iterator[Refusal]:
    ops = ("copy_blocks",)
    yield from wrong_ranks(ops, "block_mapping", 2)
    yield from wrong_dtypes(ops, "block_mapping", NOT_INT, "torch.int64")
    yield from wrong_sizes(ops, "block_mapping", 1, (0, 1, 3), 2)
    yield from wrong_devices(ops, ("block_mapping",))
    for dtype, values in (
        (torch.int64, (-1, NUM_BLOCKS, 2**32, INT64_MIN, INT64_MAX)),
        (torch.int32, (-1, NUM_BLOCKS, INT32_MIN, INT32_MAX)),
    ):
        for index in ((0, 0), (0, 1), (1, 0), (1, 1)):
            for value in values:
                pairs = torch.tensor([[0, 1], [1, 2]], dtype=dtype)
                pairs[index] = value
                yield Refusal(
                    "copy_blocks",
                    f"block_mapping[{index[0]}, {index[1]}] of {value} in {dtype}",
                    put("block_mapping", pairs),
                    (f"block_mapping[{index[0]}, {index[1]}]", str(value), str(NUM_BLOCKS - 1)),
                    needs_memory=True,
                )
    for pairs in ([[0, 3], [1, 3]], [[0, 3], [0, 3]], [[3, 3], [0, 3]], [[0, 1], [2, 0], [3, 1]]):
        twice = "3" if pairs[0][1] == 3 else "1"
        change = put("block_mapping", torch.tensor(pairs))
        says = ("block_mapping", twice, "destination")
        kind = f"block_mapping of {pairs} with a doubled destination"
        yield Refusal("copy_blocks", kind, change, says, True)


def gather_refusals() -> Iterator[Refusal]:
    for value in (0, 12, 14, -1, -13, 2**62, INT64_MIN):
        says = ("num_tokens", str(value), "13")
        change = put("num_tokens", value)
        yield Refusal("gather_kv", f"num_tokens of {value}", change, says, needs_memory=True)


def merge_refusals() -> Iterator[Refusal]:
    ops = ("merge_states",)
    for name in ("out_a", "out_b"):
        yield from wrong_ranks(ops, name, 3)
        yield from wrong_dtypes(ops, name, NOT_FLOATS, FLOATS)
        yield from sparse_rows(ops, (name,))
        for dim, good in ((0, 3), (1, 4), (2, HEAD_DIM_V)):
            yield from wrong_sizes(ops, name, dim, (0, good - 1, good + 1), good)
    for name in ("lse_a", "lse_b"):
        yield from wrong_ranks(ops, name, 2)
        yield from wrong_dtypes(ops, name, (torch.float16, torch.float64, torch.int32), FLOATS)
        for dim, good in ((0, 3), (1, 4)):
            yield from wrong_sizes(ops, name, dim, (0, good - 1, good + 1), good)
    says = ("out_b", "float16", "float32")
    yield Refusal("merge_states", "out_b of another dtype", put("out_b", cast(torch.half)), says)
    yield from wrong_devices(ops, ("out_a", "lse_a", "out_b", "lse_b"))


REFUSALS = [
    *cache_refusals(),
    *table_refusals(),
    *attention_refusals(),
    *out_refusals(),
    *write_refusals(),
    *copy_refusals(),
    *gather_refusals(),
    *merge_refusals(),
]


# The tests


def contents(arguments: Arguments) -> list[Tensor]:
    """Return all bytes behind the tensors that have any."""
    tensors = [a for a in arguments.values() if isinstance(a, Tensor) and a.device.type == "cpu"]
    return [torch.tensor(t.untyped_storage(), dtype=torch.uint8) for t in tensors]


def references(arguments: Arguments) -> list[int]:
    """Count who holds each tensor."""
    return [a._use_count() for a in arguments.values() if isinstance(a, Tensor)]


def assert_refuses(refusal: Refusal, arguments: Arguments) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(refusal.op, arguments)
    message = str(caught.value)
    assert message.startswith(f"paged::{refusal.op.partition('.')[0]}")
    for part in refusal.says:
        assert part in message


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_bad_input_is_refused_by_name_and_nothing_is_written(refusal: Refusal) -> None:
    arguments = good_arguments(refusal.op)
    refusal.change(arguments)
    before = contents(arguments)
    assert_refuses(refusal, arguments)
    assert all(same_bits(a, b) for a, b in zip(contents(arguments), before, strict=True))


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_refused_call_lets_go_of_all_its_arguments(refusal: Refusal) -> None:
    arguments = good_arguments(refusal.op)
    refusal.change(arguments)
    before = references(arguments)
    assert_refuses(refusal, arguments)
    assert references(arguments) == before


@pytest.mark.parametrize(
    "refusal", [refusal for refusal in REFUSALS if not refusal.needs_memory], ids=str
)
def test_bad_input_is_refused_while_tracing(refusal: Refusal) -> None:
    arguments = good_arguments(refusal.op)
    refusal.change(arguments)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = {
            name: mode.from_tensor(value, static_shapes=True)
            if isinstance(value, Tensor)
            else value
            for name, value in arguments.items()
        }
        assert_refuses(refusal, fakes)


ALL_OPS = (*ATTENTION, "write_kv", "copy_blocks", "gather_kv", "merge_states")


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_good_call_that_the_table_changes_is_good(op: str) -> None:
    arguments = good_arguments(op)
    before = references(arguments)
    call(op, arguments)
    assert references(arguments) == before
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        arguments = good_arguments(op)
        fakes = {
            name: mode.from_tensor(value, static_shapes=True) for name, value in arguments.items()
        }
        call(op, fakes)


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_table_has_a_row_for_every_argument(op: str) -> None:
    name, _, overload = op.partition(".")
    schema = getattr(getattr(torch.ops.paged, name), overload or "default")._schema
    never_wrong = {"causal"}
    rows = [refusal for refusal in REFUSALS if refusal.op == op]
    for argument in schema.arguments:
        if argument.name not in never_wrong:
            assert any(argument.name in refusal.says for refusal in rows), argument.name


@pytest.mark.parametrize("op", ALL_OPS)
def test_arguments_of_the_wrong_python_type_are_refused(op: str) -> None:
    good = good_arguments(op)
    for name in good:
        for wrong in (None, 1.5, "text", [1, 2]):
            if name == "query_start_loc" and wrong is None:
                continue
            before = contents(good)
            with pytest.raises((RuntimeError, TypeError), match=name):
                call(op, {**good, name: wrong})
            assert all(same_bits(a, b) for a, b in zip(contents(good), before, strict=True))


@pytest.mark.parametrize("op", ALL_OPS)
def test_none_for_a_tensor_is_refused_by_name_while_tracing(op: str) -> None:
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) for name, value in good_arguments(op).items()}
        for name in fakes:
            if name != "query_start_loc":
                with pytest.raises((RuntimeError, TypeError), match=name):
                    call(op, {**fakes, name: None})


def test_a_refused_write_leaves_even_the_good_rows_unwritten() -> None:
    arguments = good_arguments("write_kv")
    arguments["key"] = torch.randn(4096, NUM_KV_HEADS, HEAD_DIM)
    arguments["value"] = torch.randn(4096, NUM_KV_HEADS, HEAD_DIM_V)
    arguments["slot_mapping"] = torch.arange(4096) % 20
    arguments["slot_mapping"][-1] = 20
    before = contents(arguments)
    with pytest.raises(RuntimeError, match=r"slot_mapping\[4095\] is 20"):
        call("write_kv", arguments)
    assert all(same_bits(a, b) for a, b in zip(contents(arguments), before, strict=True))


def test_entries_past_the_needed_blocks_are_not_checked() -> None:
    for value in (-1, NUM_BLOCKS, INT32_MIN, INT32_MAX):
        for op in READS_BLOCKS:
            arguments = good_arguments(op)
            arguments["block_tables"][1, 1:] = value
            call(op, arguments)


def test_every_refusal_is_one_line_that_names_value_and_limit() -> None:
    """Messages are read in logs: no line breaks, no pointers, no C++ frames."""
    for refusal in REFUSALS[:: len(REFUSALS) // 40]:
        arguments = good_arguments(refusal.op)
        refusal.change(arguments)
        with pytest.raises(RuntimeError) as caught:
            call(refusal.op, arguments)
        message = str(caught.value)
        assert "\n" not in message
        assert "0x" not in message
        assert "Exception raised from" not in message


@pytest.mark.parametrize("seed", [1, 2])
def test_randomly_corrupted_calls_return_or_raise_and_refused_ones_write_nothing(seed: int) -> None:
    outcomes = fuzz(3000, seed)
    for op in ALL_OPS:
        assert outcomes[f"{op} taken"] > 50
        assert outcomes[f"{op} refused"] > 50
