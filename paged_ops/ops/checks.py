"""What each op refuses, without running it.

The checks refuse the shapes, dtypes, devices and options that csrc/arguments/ refuses, in the same
words. The values of tensors (lengths, block ids, slots) are there to be checked only when the op
runs; `check_lengths_and_blocks` reads those of the tables for a caller that must know before it
changes something else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from paged_ops.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES

_CACHE_DTYPES = FLOAT_DTYPES + QUANTISED_DTYPES
_POOL_SIZES = ("num_blocks", "block_size", "num_kv_heads")
_INDEX_DTYPES = (torch.int64, torch.int32)
_FLOAT32_MAX = torch.finfo(torch.float32).max


class AttentionOptions(TypedDict, total=False):
    """What attention may be given beside its tensors: see `paged_ops.attention`."""

    scale: float | None
    causal: bool
    sliding_window: int | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    tree_mask: Tensor | None
    key_ranges: Tensor | None


def refuse_unknown(
    function: str, options: AttentionOptions, unserved: tuple[str, ...] = ()
) -> None:
    """Refuse a name that is no option, or none of this function, as Python does in a signature."""
    for name in options:
        if name not in AttentionOptions.__annotations__ or name in unserved:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    """Name dtypes as a message does: a, b or c."""
    *first, last = map(str, dtypes)
    return f"{', '.join(first)} or {last}"


class _Checks:
    """The checks of one call: refuses with the op's name in front."""

    def __init__(self, op: str) -> None:
        self.op = op

    def require(self, condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
        """Refuse the call unless the condition holds, which a traced graph may have to guard."""
        if condition is not True:
            torch._check(condition, lambda: f"paged::{self.op}: {message()}")

    def tensors(self, **tensors: Tensor) -> None:
        """Refuse None, which reaches an op in the place of any tensor, and what is no tensor."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                kind = "None" if tensor is None else type(tensor).__name__
                self.require(False, lambda: f"{name} is {kind}, expected a tensor")  # noqa: B023

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

    def sizes(
        self, name: str, tensor: Tensor, like: Tensor, what: tuple[str, ...], of: str
    ) -> None:
        """Check the first sizes, which have these names, against another tensor's."""
        pairs = zip(what, tensor.shape, like.shape, strict=False)
        for dim, (size_name, size, expected) in enumerate(pairs):
            self.require(
                size == expected,
                lambda: f"{name}.shape[{dim}] is {size}, expected {expected}: {size_name} of {of}",  # noqa: B023
            )

    def dtype(self, name: str, tensor: Tensor, expected: torch.dtype, why: str = "") -> None:
        self.require(
            tensor.dtype == expected,
            lambda: f"{name} is {tensor.dtype}, expected {expected}{why}",
        )

    def element(self, name: str, tensor: Tensor) -> None:
        self.require(
            tensor.dtype in FLOAT_DTYPES,
            lambda: f"{name} is {tensor.dtype}, expected {_listed(FLOAT_DTYPES)}",
        )

    def index_dtype(self, name: str, tensor: Tensor) -> None:
        self.require(
            tensor.dtype in _INDEX_DTYPES,
            lambda: f"{name} is {tensor.dtype}, expected {_listed(_INDEX_DTYPES)}",
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
            cache.dtype in _CACHE_DTYPES,
            lambda: f"{name} is {cache.dtype}, expected {_listed(_CACHE_DTYPES)}",
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
            self.sizes(name, scale, cache, _POOL_SIZES, "the cache")

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
            shape = cache.shape
            for dim, what in ((1, "block_size"), (2, "num_kv_heads"), (3, "head_dim")):
                self.require(
                    shape[dim] >= 1,
                    lambda: f"{name}.shape[{dim}] ({what}) is 0, expected 1 or more",  # noqa: B023
                )
        self.dtype("value_cache", value_cache, key_cache.dtype, " like key_cache")
        self.sizes("value_cache", value_cache, key_cache, _POOL_SIZES, "key_cache")
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
        if tensor.dtype != query.dtype:
            self.dtype(name, tensor, torch.float32, " or query's dtype")
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

    def key_ranges(self, ranges: Tensor | None, query: Tensor) -> None:
        if ranges is None:
            return
        self.rank("key_ranges", ranges, 2, "[num_tokens, 2]")
        self.dtype("key_ranges", ranges, torch.int32)
        self.same_device("key_ranges", ranges, "query", query)
        self.size("key_ranges", ranges, 0, query.shape[0], "num_tokens of query")
        self.size("key_ranges", ranges, 1, 2, "(first key, end)")

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


def check_query(
    op: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    **options: Unpack[AttentionOptions],
) -> None:
    """Check all of a call of attention but its tables: what needs no batch."""
    checks = _Checks(op)
    checks.tensors(query=query, key_cache=key_cache, value_cache=value_cache)
    checks.rank("query", query, 3, "[num_tokens, num_heads, head_dim]")
    checks.element("query", query)
    checks.dense_last("query", query)
    key_scale, value_scale = options.get("key_scale"), options.get("value_scale")
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
    sliding_window, slopes = options.get("sliding_window"), options.get("alibi_slopes")
    checks.scalars(options.get("scale"), sliding_window, options.get("softcap", 0.0))
    checks.per_head("alibi_slopes", slopes, query)
    checks.per_head("sinks", options.get("sinks"), query)
    checks.tree_mask(options.get("tree_mask"), query, sliding_window, slopes)
    checks.key_ranges(options.get("key_ranges"), query)


def check_attention(
    op: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> None:
    """Check a call of `op`, one of the forms of attention."""
    check_query(op, query, key_cache, value_cache, **options)
    checks = _Checks(op)
    checks.tensors(block_tables=block_tables, seq_lens=seq_lens)
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


def check_out(out: Tensor, query: Tensor, value_cache: Tensor) -> None:
    """Check the tensor that attention.out writes, beside a call that is good."""
    checks = _Checks("attention")
    checks.tensors(out=out)
    checks.rank("out", out, 3, "[num_tokens, num_heads, head_dim_v]")
    checks.dtype("out", out, query.dtype, " like query")
    checks.same_device("out", out, "query", query)
    checks.size("out", out, 0, query.shape[0], "num_tokens of query")
    checks.size("out", out, 1, query.shape[1], "num_heads of query")
    checks.size("out", out, 2, value_cache.shape[3], "head_dim of value_cache")
    checks.dense_last("out", out)


def check_rows(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Check the rows of a call of write_kv against a pool of their dtype and device."""
    checks = _Checks("write_kv")
    checks.dtype("value", value, key.dtype, " like key")
    checks.same_device("value", value, "key", key)
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        checks.rank(name, rows, 3, "[num_tokens, num_kv_heads, head_dim]")
        checks.dense_last(name, rows)
        checks.size(name, rows, 1, cache.shape[2], f"num_kv_heads of {name}_cache")
        checks.size(name, rows, 2, cache.shape[3], f"head_dim of {name}_cache")
    checks.size("value", value, 0, key.shape[0], "num_tokens of key")


def check_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Check a call of write_kv."""
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
    check_rows(key, value, key_cache, value_cache)
    checks.rank("slot_mapping", slot_mapping, 1, "[num_tokens]")
    checks.index_dtype("slot_mapping", slot_mapping)
    checks.same_device("slot_mapping", slot_mapping, "key", key)
    checks.size("slot_mapping", slot_mapping, 0, key.shape[0], "num_tokens of key")


def check_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Check a call of merge_states."""
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


def check_copy_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Check a call of copy_blocks."""
    checks = _Checks("copy_blocks")
    checks.tensors(key_cache=key_cache, value_cache=value_cache, block_mapping=block_mapping)
    checks.pool(key_cache, value_cache, "key_cache", key_cache, key_scale, value_scale)
    checks.rank("block_mapping", block_mapping, 2, "[num_copies, 2]")
    checks.size("block_mapping", block_mapping, 1, 2, "(source, destination)")
    checks.index_dtype("block_mapping", block_mapping)
    checks.same_device("block_mapping", block_mapping, "key_cache", key_cache)


def check_gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Check a call of gather_kv."""
    checks = _Checks("gather_kv")
    checks.tensors(
        key_cache=key_cache, value_cache=value_cache, block_tables=block_tables, seq_lens=seq_lens
    )
    checks.pool(key_cache, value_cache, "key_cache", key_cache, key_scale, value_scale)
    checks.lengths(block_tables, seq_lens, "key_cache", key_cache)


def check_lengths_and_blocks(
    op: str, key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor
) -> None:
    """Check the values of lengths and of the block ids that they need, which reads the tensors."""
    checks = _Checks(op)
    num_blocks, block_size = key_cache.shape[:2]
    columns = block_tables.shape[1]
    for i, length in enumerate(seq_lens.tolist()):
        checks.require(length >= 0, lambda: f"seq_lens[{i}] is {length}, expected 0 or more")  # noqa: B023
        checks.require(
            length <= columns * block_size,
            lambda: (
                f"seq_lens[{i}] is {length}, expected at most {columns * block_size}: "  # noqa: B023
                f"block_tables has {columns} blocks of {block_size} tokens in a row"
            ),
        )
    starts = torch.arange(columns, device=seq_lens.device) * block_size
    unknown = (block_tables < 0) | (block_tables >= num_blocks)
    for i, column in (unknown & (starts < seq_lens[:, None])).nonzero()[:1].tolist():
        block = int(block_tables[i, column])
        checks.require(
            False,
            lambda: (
                f"block_tables[{i}, {column}] is {block}, expected 0 to {num_blocks - 1}: "  # noqa: B023
                f"key_cache has {num_blocks} blocks"
            ),
        )
