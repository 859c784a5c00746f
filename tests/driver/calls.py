"""Calls in the form that the driver reads, and their results."""

from __future__ import annotations

import math
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.quantisation import CACHE_DTYPES
from tests.support.sequences import DTYPES, PagedCase

State = tuple[Tensor, Tensor]

_ATTENTION, _MERGE_STATES = 0, 1


@dataclass(frozen=True)
class Call:
    """One call: what the driver reads, and the shape and dtype of its first result.

    The second one is the lse, float32, of the same shape but for the last dimension.
    """

    text: bytes
    shape: tuple[int, int, int]
    dtype: torch.dtype


def attention(case: PagedCase, num_threads: int = 1) -> Call:
    """Describe a call of ``attention_with_lse``."""
    known = {"scale", "causal", "sliding_window", "softcap", "alibi_slopes", "sinks"}
    known |= {"key_scale", "value_scale", "tree_mask"}
    options = case.options
    assert set(options) <= known
    num_tokens, num_heads, head_dim = case.query.shape
    scale = options.get("scale")
    text = struct.pack(
        "=6q2d",
        _ATTENTION,
        DTYPES.index(case.query.dtype),
        (DTYPES + CACHE_DTYPES).index(case.key_cache.dtype),
        num_threads,
        options.get("causal", True),
        options.get("sliding_window") or 0,
        head_dim**-0.5 if scale is None else scale,
        options.get("softcap", 0.0),
    )
    assert case.query_start_loc is not None
    tensors = [*case.tensors, options.get("alibi_slopes"), options.get("sinks")]
    tensors += [_per_token(options.get(name), case) for name in ("key_scale", "value_scale")]
    tensors.append(options.get("tree_mask"))
    text += b"".join(_pack(tensor) for tensor in tensors)
    return Call(text, (num_tokens, num_heads, case.value_cache.shape[3]), case.query.dtype)


def merge_states(a: State, b: State, num_threads: int = 1) -> Call:
    """Describe a call of ``merge_states``."""
    num_tokens, num_heads, head_dim = a[0].shape
    text = struct.pack("=3q", _MERGE_STATES, DTYPES.index(a[0].dtype), num_threads)
    text += b"".join(_pack(tensor) for tensor in (*a, *b))
    return Call(text, (num_tokens, num_heads, head_dim), a[0].dtype)


def run(command: Sequence[str], calls: Sequence[Call], isa: str) -> tuple[str, list[State]]:
    """Run the driver by a command, under the cap ``isa``.

    Returns the ISA variant that it chose, and the two results of each call.
    """
    result = subprocess.run(
        command,
        input=b"".join(call.text for call in calls),
        env=os.environ | {"PAGED_CPU_ISA": isa},
        stdout=subprocess.PIPE,
        check=True,
    )
    chosen, rest = result.stdout[:16].rstrip(b"\0").decode(), bytearray(result.stdout[16:])
    states = []
    for call in calls:
        pair = []
        for shape, dtype in ((call.shape, call.dtype), (call.shape[:2], torch.float32)):
            size = math.prod(shape) * dtype.itemsize
            pair.append(torch.frombuffer(rest[:size], dtype=dtype).view(shape))
            rest = rest[size:]
        states.append((pair[0], pair[1]))
    assert not rest
    return chosen, states


def _per_token(scale: Tensor | None, case: PagedCase) -> Tensor | None:
    """View the scales of a quantised cache as one per token and head."""
    if case.key_cache.dtype not in CACHE_DTYPES:
        return None
    scale = torch.ones(()) if scale is None else scale
    return scale if scale.dim() == 3 else scale.expand(case.key_cache.shape[:3])


def _pack(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return struct.pack("=10q", *[0] * 10)
    unused = [0] * (4 - tensor.dim())
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    offset = tensor.storage_offset() * tensor.element_size()
    header = struct.pack(
        "=10q", *tensor.shape, *unused, *tensor.stride(), *unused, offset, storage.numel()
    )
    return header + storage.numpy().tobytes()
