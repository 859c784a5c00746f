"""The torch half of each op: fake functions, attention.out, the autograd rule.

The schemas and the CPU kernels are in csrc/library.cpp. A fake function refuses the shapes, dtypes,
devices and options that csrc/checks.h refuses, in the same words; the values of tensors (lengths,
block ids, slots) are there to be checked only when the op runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_ops._load import load_library
from paged_ops.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES

load_library()

_LIBRARY = torch.library.Library("paged", "FRAGMENT")
_INDICES = (torch.int64, torch.int32)
_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT_NAMES = "torch.float32, torch.float16 or torch.bfloat16"
_CACHE_NAMES = (
    "torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn or "
    "torch.float8_e5m2"
)


class _Checks:
    """The checks of one call: refuses with the op's name in front."""

    def __init__(self, op: str) -> None:
        self.op = op

    def require(self, condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
        torch._check(condition, lambda: f"paged::{self.op}: {message()}")

    def tensors(self, **tensors: Tensor) -> None:
        """Refuse None, which reaches an op in the place of any tensor."""
        for name, tensor in tensors.items():
            self.require(tensor is not None, lambda: f"{name} is None, expected a tensor")  # noqa: B023

    def rank(self, name: str, tensor: Tensor, expected: int, shape: str) -> None:
        self.require(
            tensor.dim() == expected,
            lambda: f"{name} has {tensor.dim()} dimensions, expected {expected}: {shape}",
        )

    def size(self, name: str, tensor: Tensor, dim: int, expected: int, why: str) -> None:
        self.require(
            tensor.shape[dim] == expected,
            lambda: f"{name}.shape[{dim}] is {tensor.shape[dim]}, expected {expected}: {why}",
        )

    def dtype(self, name: str, tensor: Tensor, expected: torch.dtype, why: str = "") -> None:
        self.require(
            tensor.dtype == expected,
            lambda: f"{name} is {tensor.dtype}, expected {expected}{why}",
        )

    def element(self, name: str, tensor: Tensor) -> None:
        self.require(
            tensor.dtype in FLOAT_DTYPES,
            lambda: f"{name} is {tensor.dtype}, expected {_FLOAT_NAMES}",
        )

    def index_dtype(self, name: str, tensor: Tensor) -> None:
        self.require(
            tensor.dtype in _INDICES,
            lambda: f"{name} is {tensor.dtype}, expected torch.int64 or torch.int32",
        )

    def same_device(self, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
        self.require(
            tensor.device == like.device,
            lambda: f"{name} is on {tensor.device}, expected {like.device} like {like_name}",
        )

    def dense_last(self, name: str, tensor: Tensor) -> None:
        last = tensor.dim() - 1
        self.require(
            tensor.shape[last] <= 1 or tensor.stride(last) == 1,
            lambda: (
                f"{name}.stride({last}) is {tensor.stride(last)}, expected 1: "
                "the last dimension must be dense"
            ),
        )

    def cache_element(self, name: str, cache: Tensor, like_name: str, like: Tensor) -> None:
        self.require(
            cache.dtype in FLOAT_DTYPES + QUANTISED_DTYPES,
            lambda: f"{name} is {cache.dtype}, expected {_CACHE_NAMES}",
        )
        self.require(
            cache.dtype in QUANTISED_DTYPES or cache.dtype == like.dtype,
            lambda: (
                f"{name} is {cache.dtype}, expected {like.dtype} like {like_name}, or a quantised "
                "dtype"
            ),
        )

    def scale(self, name: str, scale: Tensor | None, cache_name: str, cache: Tensor) -> None:
        """Check the scales of a cache: one, one per head, or one per token and head."""
        if cache.dtype not in QUANTISED_DTYPES:
            self.require(
                scale is None,
                lambda: (
                    f"{name} is a tensor, expected None: {cache_name} is {cache.dtype}, which has "
                    "no scales"
                ),
            )
        if scale is None:
            self.require(
                cache.dtype != torch.int8,
                lambda: (
                    f"{name} is None, expected a tensor: {cache_name} is torch.int8, which means "
                    "nothing without its scales"
                ),
            )
            return
        self.dtype(name, scale, torch.float32)
        self.same_device(name, scale, cache_name, cache)
        self.require(
            scale.dim() in (0, 1, 3),
            lambda: (
                f"{name} has {scale.dim()} dimensions, expected 0, 1 or 3: [], [num_kv_heads] or "
                "[num_blocks, block_size, num_kv_heads]"
            ),
        )
        if scale.dim() == 1:
            self.size(name, scale, 0, cache.shape[2], "num_kv_heads of the cache")
        if scale.dim() == 3:
            for dim, what in enumerate(("num_blocks", "block_size", "num_kv_heads")):
                self.size(name, scale, dim, cache.shape[dim], f"{what} of the cache")

    def pool(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        like_name: str,
        like: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> None:
        """Check the two halves of the pool, which `like` is used with, and their scales."""
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            self.rank(name, cache, 4, "[num_blocks, block_size, num_kv_heads, head_dim]")
            self.cache_element(name, cache, like_name, like)
            self.same_device(name, cache, like_name, like)
            self.dense_last(name, cache)
            for dim, what in ((1, "block_size"), (2, "num_kv_heads"), (3, "head_dim")):
                self.require(
                    cache.shape[dim] >= 1,
                    lambda name=name, dim=dim, what=what: (  # type: ignore[misc]
                        f"{name}.shape[{dim}] ({what}) is 0, expected 1 or more"
                    ),
                )
        self.dtype("value_cache", value_cache, key_cache.dtype, " like key_cache")
        for dim, what in ((0, "num_blocks"), (1, "block_size"), (2, "num_kv_heads")):
            self.size("value_cache", value_cache, dim, key_cache.shape[dim], f"{what} of key_cache")
        self.scale("key_scale", key_scale, "key_cache", key_cache)
        self.scale("value_scale", value_scale, "value_cache", value_cache)
        missing = "key_scale" if key_scale is None else "value_scale"
        self.require(
            (key_scale is None) == (value_scale is None),
            lambda: f"{missing} is None, expected a tensor: the other scale is given",
        )

    def lengths(self, block_tables: Tensor, seq_lens: Tensor, like_name: str, like: Tensor) -> None:
        self.rank("block_tables", block_tables, 2, "[batch, max_blocks_per_seq]")
        self.rank("seq_lens", seq_lens, 1, "[batch]")
        self.dtype("block_tables", block_tables, torch.int32)
        self.dtype("seq_lens", seq_lens, torch.int32)
        self.same_device("block_tables", block_tables, like_name, like)
        self.same_device("seq_lens", seq_lens, like_name, like)
        why = "batch, the length of seq_lens"
        self.size("block_tables", block_tables, 0, seq_lens.shape[0], why)

    def per_head(self, name: str, tensor: Tensor | None, query: Tensor) -> None:
        if tensor is None:
            return
        self.rank(name, tensor, 1, "[num_heads]")
        self.dtype(name, tensor, torch.float32)
        self.same_device(name, tensor, "query", query)
        self.size(name, tensor, 0, query.shape[1], "num_heads of query")

    def tree_mask(
        self,
        mask: Tensor | None,
        query: Tensor,
        sliding_window: int | None,
        alibi_slopes: Tensor | None,
    ) -> None:
        if mask is None:
            return
        self.rank("tree_mask", mask, 2, "[num_query_tokens, max_query_len]")
        self.dtype("tree_mask", mask, torch.bool)
        self.same_device("tree_mask", mask, "query", query)
        self.size("tree_mask", mask, 0, query.shape[0], "num_tokens of query")
        self.require(
            sliding_window is None,
            lambda: (
                f"sliding_window is {sliding_window}, expected None: a window goes by position, "
                "which tree_mask leaves open"
            ),
        )
        self.require(
            alibi_slopes is None,
            lambda: (
                "alibi_slopes is a tensor, expected None: ALiBi goes by position, which tree_mask "
                "leaves open"
            ),
        )

    def scalars(self, scale: float | None, sliding_window: int | None, softcap: float) -> None:
        self.require(
            scale is None or abs(scale) <= _FLOAT32_MAX,
            lambda: f"scale is {scale}, expected a finite float32",
        )
        self.require(
            0 <= softcap <= _FLOAT32_MAX,
            lambda: f"softcap is {softcap}, expected a finite float32, 0 (off) or more",
        )
        if sliding_window is not None:
            self.require(
                sliding_window >= 1,
                lambda: f"sliding_window is {sliding_window}, expected 1 or more, or None",
            )


def _check_attention(
    op: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> None:
    checks = _Checks(op)
    checks.tensors(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
    )
    checks.rank("query", query, 3, "[num_tokens, num_heads, head_dim]")
    checks.element("query", query)
    checks.dense_last("query", query)
    checks.pool(key_cache, value_cache, "query", query, key_scale, value_scale)
    checks.size("query", query, 2, key_cache.shape[3], "head_dim of key_cache")
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    checks.require(
        num_heads >= 1 and num_heads % num_kv_heads == 0,
        lambda: (
            f"query.shape[1] (num_heads) is {num_heads}, expected a multiple of {num_kv_heads}: "
            "num_kv_heads of key_cache"
        ),
    )
    checks.scalars(scale, sliding_window, softcap)
    checks.per_head("alibi_slopes", alibi_slopes, query)
    checks.per_head("sinks", sinks, query)
    checks.lengths(block_tables, seq_lens, "query", query)
    num_tokens, batch = query.shape[0], seq_lens.shape[0]
    if query_start_loc is None:
        checks.require(
            num_tokens == batch,
            lambda: (
                f"query.shape[0] is {num_tokens}, expected {batch}: "
                "without query_start_loc every sequence has one query token"
            ),
        )
    else:
        checks.rank("query_start_loc", query_start_loc, 1, "[batch + 1]")
        checks.dtype("query_start_loc", query_start_loc, torch.int32)
        checks.same_device("query_start_loc", query_start_loc, "query", query)
        checks.size("query_start_loc", query_start_loc, 0, batch + 1, "batch + 1")
    checks.tree_mask(tree_mask, query, sliding_window, alibi_slopes)


def _new_output(query: Tensor, value_cache: Tensor) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value_cache.shape[3]))


def _fake_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: Any, **options: Any
) -> Tensor:
    _check_attention("attention", query, key_cache, value_cache, *args, **options)
    return _new_output(query, value_cache)


def _fake_attention_with_lse(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    _check_attention("attention_with_lse", query, key_cache, value_cache, *args, **options)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    return _new_output(query, value_cache), lse


def _fake_attention_out(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: Any, out: Tensor, **options: Any
) -> Tensor:
    _check_attention("attention", query, key_cache, value_cache, *args, **options)
    checks = _Checks("attention")
    checks.tensors(out=out)
    checks.rank("out", out, 3, "[num_tokens, num_heads, head_dim_v]")
    checks.dtype("out", out, query.dtype, " like query")
    checks.same_device("out", out, "query", query)
    checks.size("out", out, 0, query.shape[0], "num_tokens of query")
    checks.size("out", out, 1, query.shape[1], "num_heads of query")
    checks.size("out", out, 2, value_cache.shape[3], "head_dim of value_cache")
    checks.dense_last("out", out)
    return out


def _fake_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    checks = _Checks("write_kv")
    checks.tensors(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
    checks.rank("key", key, 3, "[num_tokens, num_kv_heads, head_dim]")
    checks.element("key", key)
    checks.pool(key_cache, value_cache, "key", key, key_scale, value_scale)
    checks.dtype("value", value, key.dtype, " like key")
    checks.same_device("value", value, "key", key)
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        checks.rank(name, rows, 3, "[num_tokens, num_kv_heads, head_dim]")
        checks.dense_last(name, rows)
        checks.size(name, rows, 1, cache.shape[2], f"num_kv_heads of {name}_cache")
        checks.size(name, rows, 2, cache.shape[3], f"head_dim of {name}_cache")
    checks.size("value", value, 0, key.shape[0], "num_tokens of key")
    checks.rank("slot_mapping", slot_mapping, 1, "[num_tokens]")
    checks.index_dtype("slot_mapping", slot_mapping)
    checks.same_device("slot_mapping", slot_mapping, "key", key)
    checks.size("slot_mapping", slot_mapping, 0, key.shape[0], "num_tokens of key")


def _fake_merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    checks = _Checks("merge_states")
    checks.tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    checks.element("out_a", out_a)
    checks.dtype("out_b", out_b, out_a.dtype, " like out_a")
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        checks.rank(name, out, 3, "[num_tokens, num_heads, head_dim_v]")
        checks.same_device(name, out, "out_a", out_a)
        checks.dense_last(name, out)
        for dim in range(3):
            checks.size(name, out, dim, out_a.shape[dim], "the shape of out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        checks.rank(name, lse, 2, "[num_tokens, num_heads]")
        checks.dtype(name, lse, torch.float32)
        checks.same_device(name, lse, "out_a", out_a)
        checks.size(name, lse, 0, out_a.shape[0], "num_tokens of out_a")
        checks.size(name, lse, 1, out_a.shape[1], "num_heads of out_a")
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _fake_copy_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    checks = _Checks("copy_blocks")
    checks.tensors(key_cache=key_cache, value_cache=value_cache, block_mapping=block_mapping)
    checks.pool(key_cache, value_cache, "key_cache", key_cache, key_scale, value_scale)
    checks.rank("block_mapping", block_mapping, 2, "[num_copies, 2]")
    checks.size("block_mapping", block_mapping, 1, 2, "(source, destination)")
    checks.index_dtype("block_mapping", block_mapping)
    checks.same_device("block_mapping", block_mapping, "key_cache", key_cache)


def _fake_gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    checks = _Checks("gather_kv")
    checks.tensors(
        key_cache=key_cache, value_cache=value_cache, block_tables=block_tables, seq_lens=seq_lens
    )
    checks.pool(key_cache, value_cache, "key_cache", key_cache, key_scale, value_scale)
    checks.lengths(block_tables, seq_lens, "key_cache", key_cache)
    rows = torch.library.get_ctx().new_dynamic_size() if num_tokens is None else num_tokens
    dtype = torch.float32 if key_cache.dtype in QUANTISED_DTYPES else key_cache.dtype
    key = key_cache.new_empty((rows, *key_cache.shape[2:]), dtype=dtype)
    return key, value_cache.new_empty((rows, *value_cache.shape[2:]), dtype=dtype)


def _define_attention_out() -> None:
    """Define attention.out from attention's own schema; csrc/library.cpp holds its kernel.

    The tag, which only Python can give (torch 2.13), lets compiled graphs call an op that returns
    what it writes. But Inductor would also lower attention to an overload with this tag and the
    same arguments, and then pass keyword-only constants twice. So two of these stand in another
    order here.
    """
    schema = str(torch.ops.paged.attention.default._schema).removeprefix("paged::attention")
    arguments = schema[1 : schema.rindex(") ->")]
    scale, causal = "float? scale=None", "bool causal=True"
    arguments = arguments.replace(f"{scale}, {causal}", f"{causal}, {scale}")
    tags = (torch.Tag.out,) if hasattr(torch.Tag, "out") else ()
    _LIBRARY.define(f"attention.out({arguments}, Tensor(a!) out) -> Tensor(a!)", tags=tags)


def _requires_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    return [tensor for tensor in tensors if tensor.requires_grad]


def _no_gradient(op: str) -> NotImplementedError:
    return NotImplementedError(
        f"paged::{op} has no gradient: it is for inference. Call it under torch.no_grad() or "
        "torch.inference_mode(), or detach its inputs"
    )


class _NoBackward(torch.autograd.Function):
    """Runs an op and connects its outputs to a backward that refuses."""

    @staticmethod
    def forward(ctx: Any, op: str, call: Callable[[], Any], *tensors: Tensor) -> Any:
        ctx.op = op
        return call()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise _no_gradient(ctx.op)


def _autograd_functional(overload: Any, op: str) -> Callable[..., Any]:
    """Return the Autograd kernel of an op that writes nothing: only its backward refuses."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        below = keyset & torch._C._after_autograd_keyset
        inputs = _requires_grad(args, kwargs) if torch.is_grad_enabled() else []
        if not inputs:
            return overload.redispatch(below, *args, **kwargs)

        def forward() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(below, *args, **kwargs)

        return _NoBackward.apply(op, forward, *inputs)  # type: ignore[no-untyped-call]

    return kernel


def _autograd_mutating(overload: Any, op: str, written: tuple[str, ...]) -> Callable[..., Any]:
    """Return the Autograd kernel of an op that writes its arguments: a gradient is refused at once.

    Nothing would ever call a backward of the write itself, so a later one would silently miss it.
    Of the scales those per token are written.
    """
    names = [argument.name for argument in overload._schema.arguments]

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _requires_grad(args, kwargs):
            raise _no_gradient(op)
        result = overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        changed = [given[name] for name in written]
        scales = (given.get("key_scale"), given.get("value_scale"))
        if op != "attention":
            changed += [scale for scale in scales if scale is not None and scale.dim() == 3]
        torch.autograd.graph.increment_version(changed)
        return result

    return kernel


def _register() -> None:
    _define_attention_out()
    ops = torch.ops.paged
    fakes: dict[str, Callable[..., Any]] = {
        "attention": _fake_attention,
        "attention.out": _fake_attention_out,
        "attention_with_lse": _fake_attention_with_lse,
        "write_kv": _fake_write_kv,
        "merge_states": _fake_merge_states,
        "copy_blocks": _fake_copy_blocks,
        "gather_kv": _fake_gather_kv,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"paged::{name}", fake, lib=_LIBRARY)
    for name in ("attention", "attention_with_lse", "merge_states", "gather_kv"):
        kernel = _autograd_functional(getattr(ops, name).default, name)
        _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
    caches = ("key_cache", "value_cache")
    for name, overload, written in (
        ("attention.out", ops.attention.out, ("out",)),
        ("write_kv", ops.write_kv.default, caches),
        ("copy_blocks", ops.copy_blocks.default, caches),
    ):
        kernel = _autograd_mutating(overload, name, written)
        _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


_register()
