"""What each op returns on tensors without content, when a graph is traced: checks, then shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_ops.dtypes import QUANTISED_DTYPES
from paged_ops.ops import checks


def _output(query: Tensor, value_cache: Tensor) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value_cache.shape[3]))


def _attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *tables: Any, **options: Any
) -> Tensor:
    checks.check_attention("attention", query, key_cache, value_cache, *tables, **options)
    return _output(query, value_cache)


def _attention_with_lse(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *tables: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    checks.check_attention("attention_with_lse", query, key_cache, value_cache, *tables, **options)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    return _output(query, value_cache), lse


def _attention_out(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *tables: Any, out: Tensor, **options: Any
) -> Tensor:
    checks.check_attention("attention", query, key_cache, value_cache, *tables, **options)
    checks.check_out(out, query, value_cache)
    return out


def _merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    checks.check_merge_states(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int | None = None,
    **scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    checks.check_gather_kv(key_cache, value_cache, block_tables, seq_lens, **scales)
    rows = torch.library.get_ctx().new_dynamic_size() if num_tokens is None else num_tokens
    dtype = torch.float32 if key_cache.dtype in QUANTISED_DTYPES else key_cache.dtype
    key = key_cache.new_empty((rows, *key_cache.shape[2:]), dtype=dtype)
    return key, value_cache.new_empty((rows, *value_cache.shape[2:]), dtype=dtype)


def register(library: torch.library.Library) -> None:
    """Register the fake function of every op."""
    fakes: dict[str, Callable[..., Any]] = {
        "attention": _attention,
        "attention.out": _attention_out,
        "attention_with_lse": _attention_with_lse,
        "write_kv": checks.check_write_kv,
        "merge_states": _merge_states,
        "copy_blocks": checks.check_copy_blocks,
        "gather_kv": _gather_kv,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"paged::{name}", fake, lib=library)
