"""Call the ops with randomly corrupted arguments: each call returns or raises, none crashes.

Run it under a sanitizer, which turns a stray read into a crash::

    python -m tests.fuzz --calls 100000 --seed 0

Every call starts from arguments that are good, and corrupts up to three of them: shapes, strides,
dtypes, devices, aliases, values of index tensors, options, kinds of object. A call that raises
must not have written anything. Call ``i`` of a seed is the same in every run, so that a crash is
found again with ``--start i``.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import paged_ops

assert paged_ops  # Loads the library that registers torch.ops.paged.

REFUSALS = (
    RuntimeError,  # NotImplementedError is one
    TypeError,
    ValueError,
    IndexError,
    OverflowError,
    MemoryError,
)
OPS = (
    "attention",
    "attention_with_lse",
    "attention.out",
    "write_kv",
    "copy_blocks",
    "gather_kv",
    "merge_states",
)
OPTIONS = ("scale", "causal", "sliding_window", "softcap", "alibi_slopes", "sinks")
INDICES = (
    "block_tables", "seq_lens", "query_start_loc", "slot_mapping", "block_mapping"
)  # fmt: skip
WRITING = ("attention.out", "write_kv", "copy_blocks")
CALLS_PER_BASE = 200
BAD_INTS = (
    -(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**64
)  # fmt: skip
BAD_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 1e38, 1e39, 1e308, -1e-300)
BAD_OBJECTS = (None, 1, 1.5, True, "text", [], [1, 2], (), object(), {})
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


# Arguments that are good


@dataclass
class Base:
    """Good arguments for one op; ``memory`` has the bytes behind each tensor and a copy of them."""

    op: str
    arguments: dict[str, Any]
    memory: dict[str, tuple[Tensor, Tensor]]

    def changed(self) -> list[str]:
        """Return the names of the arguments whose memory has changed."""
        return [name for name, (now, good) in self.memory.items() if not torch.equal(now, good)]

    def restore(self) -> None:
        for now, good in self.memory.values():
            now.copy_(good)


def make_base(op: str, rng: random.Random) -> Base:
    arguments = _good_arguments(op, rng)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    in_bytes = {name: tensor.flatten().view(torch.uint8) for name, tensor in tensors.items()}
    return Base(op, arguments, {name: (now, now.clone()) for name, now in in_bytes.items()})


def _good_arguments(op: str, rng: random.Random) -> dict[str, Any]:
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    num_kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 5))
    head_dim, head_dim_v = rng.choice((1, 4, 8, 20, 33)), rng.choice((1, 4, 8, 20, 33))
    num_blocks, block_size = rng.randint(1, 6), rng.randint(1, 5)
    num_heads = num_kv_heads * group
    tokens = rng.randint(0, 4)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    if op == "merge_states":
        out, lse = floats(tokens, num_heads, head_dim_v), torch.randn(tokens, num_heads)
        states = (out, lse, out.clone(), lse.clone())
        return dict(zip(("out_a", "lse_a", "out_b", "lse_b"), states, strict=True))
    arguments: dict[str, Any] = {
        "key_cache": floats(num_blocks, block_size, num_kv_heads, head_dim),
        "value_cache": floats(num_blocks, block_size, num_kv_heads, head_dim_v),
    }
    if rng.random() < 0.4:
        _quantise(rng, arguments)
    if op == "copy_blocks":
        order = rng.sample(range(num_blocks), num_blocks)
        pairs = [(rng.randrange(num_blocks), block) for block in order[: rng.randint(0, 4)]]
        arguments["block_mapping"] = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        return arguments
    if op == "write_kv":
        slots = [rng.randint(-1, num_blocks * block_size - 1) for _ in range(tokens)]
        arguments["key"] = floats(tokens, num_kv_heads, head_dim)
        arguments["value"] = floats(tokens, num_kv_heads, head_dim_v)
        arguments["slot_mapping"] = torch.tensor(slots, dtype=torch.int64)
        return arguments
    batch, width = rng.randint(0, 3), rng.randint(0, 4)
    arguments["block_tables"] = torch.randint(num_blocks, (batch, width), dtype=torch.int32)
    lengths = [rng.randint(0, width * block_size) for _ in range(batch)]
    arguments["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
    if op == "gather_kv":
        return arguments
    starts = [0]
    for _ in range(batch):
        starts.append(starts[-1] + rng.randint(0, 3))
    arguments["query"] = floats(starts[-1], num_heads, head_dim)
    arguments["query_start_loc"] = torch.tensor(starts, dtype=torch.int32)
    arguments |= _good_options(rng, num_heads)
    if rng.random() < 0.3:
        mask = torch.rand(starts[-1], rng.randint(2, 4)) < 0.5
        arguments = {**arguments, "tree_mask": mask}
        for name in ("sliding_window", "alibi_slopes"):
            arguments.pop(name, None)
    if rng.random() < 0.3:
        shape = starts[-1], 2
        arguments["key_ranges"] = torch.randint(-9, 40, shape, dtype=torch.int32)
    if op == "attention.out":
        arguments["out"] = floats(starts[-1], num_heads, head_dim_v)
    return arguments


def _quantise(rng: random.Random, arguments: dict[str, Any]) -> None:
    """Give the caches a quantised dtype, and scales of one of their shapes."""
    dtype = rng.choice((torch.int8, torch.float8_e4m3fn, torch.float8_e5m2))
    shape = arguments["key_cache"].shape[:3]
    shape = rng.choice(((), shape[2:], shape))
    for half in ("key", "value"):
        arguments[f"{half}_cache"] = arguments[f"{half}_cache"].to(dtype)
        arguments[f"{half}_scale"] = torch.rand(shape)


def _good_options(rng: random.Random, num_heads: int) -> dict[str, Any]:
    options = {
        "scale": 0.5,
        "causal": rng.random() < 0.5,
        "sliding_window": rng.randint(1, 9),
        "softcap": 3.0,
        "alibi_slopes": torch.rand(num_heads),
        "sinks": torch.randn(num_heads),
    }
    return {name: options[name] for name in OPTIONS if rng.random() < 0.4}


# Ways to corrupt a tensor


def _other_dtype(rng: random.Random, tensor: Tensor) -> Tensor:
    return tensor.to(rng.choice(DTYPES))


def _other_bits(rng: random.Random, tensor: Tensor) -> Tensor:
    """Read the same memory as another dtype of the same size."""
    same_size = {
        4: (torch.int32, torch.float32),
        2: (torch.int16, torch.float16, torch.bfloat16),
        1: (torch.uint8, torch.bool, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    }
    choices = same_size.get(tensor.element_size(), (torch.int64, torch.float64))
    return tensor.view(rng.choice(choices))


def _other_rank(rng: random.Random, tensor: Tensor) -> Tensor:
    change = rng.randrange(4)
    if change == 0:
        return tensor.unsqueeze(rng.randint(0, tensor.dim()))
    if change == 1:
        return tensor.flatten()
    if change == 2 and tensor.numel():
        return tensor[0]
    return tensor.reshape(tensor.numel(), 1)


def _narrowed(rng: random.Random, tensor: Tensor) -> Tensor:
    """Take a part of one dimension, often nothing of it; the strides stay."""
    if tensor.dim() == 0:
        return tensor
    dim = rng.randrange(tensor.dim())
    size = tensor.shape[dim]
    start = rng.randint(0, size)
    return tensor.narrow(dim, start, rng.randint(0, size - start))


def _repeated(rng: random.Random, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    return torch.cat([tensor, tensor], dim=rng.randrange(tensor.dim()))


def _transposed(rng: random.Random, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    return tensor.transpose(rng.randrange(tensor.dim()), rng.randrange(tensor.dim()))


def _expanded(rng: random.Random, tensor: Tensor) -> Tensor:
    """Repeat one index of a dimension with stride 0, as often as before or up to 8 times."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    dim = rng.randrange(tensor.dim())
    shape = list(tensor.shape)
    if rng.random() < 0.3:
        shape[dim] = rng.randint(0, 8)
    return tensor.narrow(dim, 0, 1).expand(shape)


def _restrided(rng: random.Random, tensor: Tensor) -> Tensor:
    """View the same memory with random strides, overlapping or not, never outside of it."""
    room = tensor.numel()
    if room == 0 or tensor.dim() == 0:
        return tensor
    offset = rng.randrange(min(room, 4))
    room -= offset + 1
    strides = []
    for size in tensor.shape:
        stride = rng.randint(0, room // (size - 1)) if size > 1 else rng.randint(0, 9)
        strides.append(stride if rng.random() < 0.7 else min(stride, 1))
        room -= strides[-1] * (size - 1)
    if rng.random() < 0.5 and (tensor.shape[-1] - 1) <= room:
        strides[-1] = 1 if strides[-1] == 0 else strides[-1]
        room -= tensor.shape[-1] - 1
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset() + offset)


def _dense_overlap(rng: random.Random, tensor: Tensor) -> Tensor:
    """View the memory with a dense last dimension and rows that overlap each other."""
    if tensor.numel() == 0 or tensor.dim() < 2:
        return tensor
    strides = [rng.randint(1, 3) if size > 1 else 1 for size in tensor.shape]
    strides[-1] = 1
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return tensor.as_strided(tensor.shape, strides) if last < tensor.numel() else tensor


def _odd_kind(rng: random.Random, tensor: Tensor) -> Tensor:
    kind = rng.randrange(4)
    if kind == 0:
        return tensor.to("meta")
    if kind == 1:
        return tensor.to_sparse() if tensor.dim() else tensor
    if kind == 2 and tensor.is_floating_point():
        return tensor.detach().requires_grad_()
    return torch.nn.Parameter(tensor, requires_grad=False)


def _bad_values(rng: random.Random, tensor: Tensor) -> Tensor:
    """Return a copy with one to three elements replaced by values that do harm."""
    corrupt = tensor.clone(memory_format=torch.contiguous_format)
    if corrupt.numel() == 0 or corrupt.dtype == torch.bool:
        return corrupt
    flat = corrupt.view(-1)
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(corrupt.numel())
        if corrupt.is_floating_point():
            limit = torch.finfo(corrupt.dtype).max
            flat[index] = rng.choice((math.nan, math.inf, -math.inf, limit, -limit))
        else:
            info = torch.iinfo(corrupt.dtype)
            value = rng.choice(BAD_INTS)
            flat[index] = min(max(value, info.min), info.max)
    return corrupt


CORRUPTIONS: tuple[Callable[[random.Random, Tensor], Any], ...] = (
    _other_dtype,
    _other_bits,
    _other_rank,
    _narrowed,
    _narrowed,
    _repeated,
    _transposed,
    _expanded,
    _restrided,
    _restrided,
    _dense_overlap,
    _odd_kind,
    _bad_values,
    _bad_values,
)


def corrupt(rng: random.Random, arguments: dict[str, Any]) -> None:
    """Make one argument wrong, in place."""
    if not arguments:
        return
    name = rng.choice(tuple(arguments))
    value = arguments[name]
    kind = rng.random()
    if kind < 0.04:
        arguments[name] = rng.choice(BAD_OBJECTS)
    elif kind < 0.08:
        arguments[name] = arguments[rng.choice(tuple(arguments))]
    elif kind < 0.10:
        del arguments[name]
    elif kind < 0.16:
        _corrupt_option(rng, arguments)
    elif isinstance(value, Tensor) and _has_more_to_corrupt(value):
        change = _bad_values if name in INDICES and kind < 0.5 else rng.choice(CORRUPTIONS)
        # Torch itself refuses some changes to a tensor that is corrupt already.
        with contextlib.suppress(RuntimeError, IndexError):
            arguments[name] = change(rng, value)
    else:
        _corrupt_option(rng, arguments)


def _has_more_to_corrupt(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_complex()


def _corrupt_option(rng: random.Random, arguments: dict[str, Any]) -> None:
    name = rng.choice(
        (*OPTIONS, "num_tokens", "key_scale", "value_scale", "tree_mask", "key_ranges")
    )
    if name in ("scale", "softcap"):
        arguments[name] = rng.choice(BAD_FLOATS)
    elif name in ("sliding_window", "num_tokens"):
        arguments[name] = rng.choice(BAD_INTS)
    elif name == "causal":
        arguments[name] = rng.choice(BAD_OBJECTS)
    else:
        shape = rng.choice(((), (0,), (1,), (2,), (5,), (1, 3)))
        arguments[name] = torch.ones(shape, dtype=rng.choice(DTYPES))


# Calls


def _packet(op: str) -> Callable[..., Any]:
    name, _, overload = op.partition(".")
    packet = getattr(torch.ops.paged, name)
    return getattr(packet, overload) if overload else packet


FUNCTIONS = {op: _packet(op) for op in OPS}


def fuzz(calls: int, seed: int, start: int = 0) -> Counter[str]:
    """Make the calls and return how many of each op were taken and refused.

    Raises
    ------
    AssertionError
        If a refused or a reading call wrote anything, or a call raised something odd.
    """
    outcomes: Counter[str] = Counter()
    bases: list[Base] = []
    for index in range(start, start + calls):
        if index % CALLS_PER_BASE == 0 or not bases:
            torch.manual_seed(seed + index // CALLS_PER_BASE)
            base_rng = random.Random(f"{seed} {index // CALLS_PER_BASE}")
            bases = [make_base(op, base_rng) for op in OPS for _ in range(2)]
        rng = random.Random(seed * 1_000_003 + index)
        base = rng.choice(bases)
        arguments = dict(base.arguments)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            corrupt(rng, arguments)
        outcomes[f"{base.op} {_call(base, arguments, index)}"] += 1
    return outcomes


def _call(base: Base, arguments: dict[str, Any], index: int) -> str:
    try:
        FUNCTIONS[base.op](**arguments)
        outcome = "taken"
    except REFUSALS:
        outcome = "refused"
    changed = base.changed()
    if changed:
        assert outcome == "taken", f"call {index}: {base.op} was refused and changed {changed}"
        assert base.op in WRITING, f"call {index}: {base.op} changed {changed}"
        base.restore()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="index of the first call")
    options = parser.parse_args()
    faulthandler.enable()
    begin = time.perf_counter()
    outcomes: Counter[str] = Counter()
    step = 10_000
    for start in range(options.start, options.start + options.calls, step):
        count = min(step, options.start + options.calls - start)
        outcomes += fuzz(count, options.seed, start)
        print(f"{start + count} calls, {time.perf_counter() - begin:.1f} s", flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")


if __name__ == "__main__":
    main()
