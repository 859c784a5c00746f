"""What FlashAttention 3 has beyond version 2: ragged queries, float8 with descales, and `qv`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_ops.dtypes import FLOAT_DTYPES
from paged_ops.functional import gather_kv
from paged_ops.integrations.flash_cache import dense
from paged_ops.integrations.refusals import check_lengths, check_offsets, check_tensor
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.windows import Keys
from paged_ops.ops.checks import AttentionOptions

FLOAT8 = torch.float8_e4m3fn
"""FlashAttention 3's only one."""

_DTYPES = (*FLOAT_DTYPES, FLOAT8)

Finish = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Queries:
    """The queries of a call, one sequence after another, without the rows that don't count.

    Attributes
    ----------
    q : Tensor
        As the caller gave it.
    counts, starts : Tensor
        ``[batch]`` and ``[batch + 1]`` int32: rows of each sequence, and where they begin.
    rows : Tensor or None
        Which of the flat rows of `q` they are. None: all.
    """

    q: Tensor
    counts: Tensor
    starts: Tensor
    rows: Tensor | None

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.counts)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the rows that count of a tensor with the rows of q."""
        flat = tensor.flatten(0, 1) if tensor.dim() == 4 else tensor
        if self.rows is None:
            return flat
        if flat.dtype != FLOAT8:
            return flat[self.rows]
        return flat.view(torch.uint8)[self.rows].view(FLOAT8)

    def shaped(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return results with the rows of q, and heads first in the second of them."""
        if self.rows is not None:
            total = len(self.q)
            whole = out.new_zeros(total, *out.shape[1:])
            whole_lse = lse.new_full((total, lse.shape[1]), -torch.inf)
            whole[self.rows], whole_lse[self.rows] = out, lse
            out, lse = whole, whole_lse
        if self.q.dim() == 3:
            return out, lse.t()
        lead = self.q.shape[:2]
        lse = lse.view(*lead, lse.shape[1])
        return out.view(*lead, *out.shape[1:]), lse.transpose(1, 2)


def checked_queries(q: Tensor, cu_seqlens_q: Tensor | None, seqused_q: Tensor | None) -> Queries:
    """Return the queries, or refuse where they begin and how many count."""
    q = dense(q)
    rows = ("batch", "seqlen") if cu_seqlens_q is None else ("total_q",)
    sizes: dict[str, int | None] = dict.fromkeys((*rows, "num_heads", "head_dim"))
    check_tensor("q", q, sizes, _DTYPES, q)
    if cu_seqlens_q is None:
        counts = torch.full((len(q),), q.shape[1], dtype=torch.int32, device=q.device)
        return Queries(q, counts, _starts(counts), None)
    batch = check_offsets("cu_seqlens_q", cu_seqlens_q, None, q, len(q))
    given = cu_seqlens_q.tolist()
    if seqused_q is None:
        if (given[0], given[-1]) == (0, len(q)):
            return Queries(q, cu_seqlens_q.diff(), cu_seqlens_q, None)
        seqused_q = cu_seqlens_q.diff()
    check_tensor("seqused_q", seqused_q, {"batch": batch}, (torch.int32,), q)
    check_lengths("seqused_q", seqused_q, cu_seqlens_q.diff().tolist(), "cu_seqlens_q has no more")
    owners = torch.repeat_interleave(seqused_q)
    starts = _starts(seqused_q)
    at = torch.arange(len(owners), device=q.device) - starts[owners] + cu_seqlens_q[owners]
    return Queries(q, seqused_q, starts, at)


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def check_inputs(
    q: Tensor, key: tuple[str, Tensor], value: tuple[str, Tensor], qv: Tensor | None, rank: int
) -> None:
    """Refuse keys, values or `qv` that don't fit the queries."""
    (k_name, k), (v_name, v) = key, value
    rows = ("total_k",) if rank == 3 else ("num_pages", "page_size")
    sizes = dict.fromkeys(rows) | {"num_kv_heads": None, "head_dim": q.shape[-1]}
    check_tensor(k_name, k, sizes, (q.dtype,), q, is_dense=True)
    sizes = dict(zip(sizes, k.shape, strict=True)) | {"head_dim": None}
    check_tensor(v_name, v, sizes, (q.dtype,), q, is_dense=True)
    for name, tensor in ((k_name, k), (v_name, v)):
        if 0 in tensor.shape[1:]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected no size of 0")
    heads = q.shape[-2]
    if not heads or heads % k.shape[-2]:
        raise ValueError(
            f"q has {heads} heads, expected a multiple of {k.shape[-2]}, those of {k_name}"
        )
    if qv is not None:
        if q.dtype == FLOAT8:
            raise ValueError(f"qv is a tensor, expected None: q is {FLOAT8}")
        names = ("batch", "seqlen") if q.dim() == 4 else ("total_q",)
        sizes = dict(zip(names, q.shape, strict=False))
        sizes |= {"num_heads": heads, "head_dim_v": v.shape[-1]}
        check_tensor("qv", qv, sizes, (q.dtype,), q)


def with_descales(
    queries: Queries, descales: dict[str, Tensor | None], keys: Keys, options: AttentionOptions
) -> tuple[Tensor, Finish]:
    """Return the queries that the op takes, and what is to be done with its result.

    A float8 call is one of float queries over a float8 cache. Where all sequences have the same
    descales, these are the cache's scales, and the queries are bfloat16, which holds a float8
    exactly. Where sequences differ, the descales of q and k go into float32 queries and that of v
    into the output.
    """
    query = queries.flat(queries.q)
    num_kv_heads = keys.key_cache.shape[2]
    for name, descale in descales.items():
        if descale is None:
            continue
        if query.dtype != FLOAT8:
            raise ValueError(f"{name} is a tensor, expected None: q is {query.dtype}, not {FLOAT8}")
        sizes: dict[str, int | None] = {"batch": queries.batch, "num_kv_heads": num_kv_heads}
        check_tensor(name, descale, sizes, (torch.float32,), query)
    if query.dtype != FLOAT8:
        return query, lambda out, lse: (out, lse)
    one = torch.ones(queries.batch, num_kv_heads, device=query.device)
    of_q, of_k, of_v = (one if d is None else d for d in descales.values())
    of_scores = of_q * of_k
    if all(bool((d == d[:1]).all()) for d in (of_scores, of_v)):
        if queries.batch:
            options["key_scale"], options["value_scale"] = of_scores[0], of_v[0]
        return query.to(torch.bfloat16), lambda out, lse: (out, lse)
    owners = torch.repeat_interleave(queries.counts)
    group = query.shape[1] // num_kv_heads

    def by_head(descale: Tensor) -> Tensor:
        return descale.repeat_interleave(group, 1)[owners, :, None]

    def finish(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return (out * by_head(of_v)).to(torch.bfloat16), lse

    return query.float() * by_head(of_scores), finish


def with_qv(
    queries: Queries, query: Tensor, qv: Tensor | None, keys: Keys, options: AttentionOptions
) -> tuple[Tensor, Keys]:
    """Return queries and keys that hold `qv` and the values as well, where there is a `qv`."""
    if qv is None:
        return query, keys
    more = queries.flat(dense(qv))
    k, v = keys.key_cache, keys.value_cache
    width = k.shape[3] + v.shape[3]
    if options.get("scale") is None:
        options["scale"] = width**-0.5
    if _follow(v, k):
        return torch.cat([more, query], 2), Keys(_widened(v, width), v, *keys[2:])
    if _follow(k, v):
        return torch.cat([query, more], 2), Keys(_widened(k, width), v, *keys[2:])
    own_keys, own_values = gather_kv(k, v, keys.block_tables, keys.seq_lens)
    blocks = as_blocks(torch.cat([own_values, own_keys], 2))
    tables = run_tables(_starts(keys.seq_lens)[:-1], keys.seq_lens)
    values = blocks[..., : v.shape[3]]
    return torch.cat([more, query], 2), Keys(blocks, values, tables, keys.seq_lens)


def _follow(first: Tensor, second: Tensor) -> bool:
    """Say whether each row of the second lies right behind that of the first, in one storage."""
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.stride() == second.stride()
        and first.storage_offset() + first.shape[3] == second.storage_offset()
    )


def _widened(rows: Tensor, width: int) -> Tensor:
    """View rows with what lies behind them."""
    return rows.as_strided((*rows.shape[:3], width), rows.stride(), rows.storage_offset())
