"""Attention over sequences whose blocks lie on several ranks: attend locally, merge by LSE."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from paged_ops.distributed.context_batch import ContextBatch
from paged_ops.functional import attention_with_lse, merge_states
from paged_ops.ops.checks import AttentionOptions, refuse_unknown


def context_parallel_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: ContextBatch,
    *,
    group: dist.ProcessGroup | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attend to sequences that are spread over the ranks of a group.

    Every rank attends to its own part and receives the partial results of all; each merges them in
    the order of the ranks, in float32, so all ranks have the same bits. The sinks come last, as one
    more partial result. Every rank calls this with the same query and options.

    Parameters
    ----------
    query : Tensor
        ``[num_tokens, num_heads, head_dim]``: the new tokens, the same on all ranks.
    key_cache, value_cache : Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]``: this rank's pool. The keys and values
        of the new tokens have been written with ``batch.slot_mapping``.
    batch : ContextBatch
        What this rank holds.
    group : torch.distributed.ProcessGroup, optional
        The ranks, as in `build_context_batch`. None: all.
    **options
        As in `paged_ops.attention`, but no tree_mask, no key_ranges and no out. The scales are
        those of this rank's pool.

    Returns
    -------
    Tensor
        ``[num_tokens, num_heads, head_dim of value_cache]``, query's dtype: the same on all ranks.

    Raises
    ------
    RuntimeError
        An argument is refused. A rank that was given others than the rest leaves the rest waiting.

    See Also
    --------
    build_context_batch : makes `batch`.

    Examples
    --------
    A group of one rank, which holds everything:

    >>> import torch, torch.distributed as dist
    >>> from paged_ops import BlockManager, PagedKVCache
    >>> from paged_ops.distributed import build_context_batch, context_parallel_attention
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> manager, cache = BlockManager(8, 4), PagedKVCache(1, 8, 4, 2, 8)
    >>> _ = manager.allocate("a", 6)
    >>> batch = build_context_batch(manager, ["a"], [6])
    >>> context_parallel_attention(torch.randn(6, 4, 8), *cache.layer(0), batch).shape
    torch.Size([6, 4, 8])
    >>> dist.destroy_process_group()
    """
    sinks = options.pop("sinks", None)
    state = attend_to_part(query, key_cache, value_cache, batch, **options)
    outs, lses = (_gather(tensor, group) for tensor in state)
    return merge_parts(outs, lses, sinks).to(query.dtype)


def attend_to_part(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: ContextBatch,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """Attend to what this rank holds of each sequence.

    Parameters
    ----------
    query, key_cache, value_cache, batch
        As in `context_parallel_attention`.
    **options
        As in `context_parallel_attention`, without the sinks.

    Returns
    -------
    out : Tensor
        ``[num_tokens, num_heads, head_dim of value_cache]``, query's dtype; 0 for a row that sees
        nothing here.
    lse : Tensor
        ``[num_tokens, num_heads]`` float32; -inf for such a row.
    """
    refuse_unknown("attend_to_part", options, unserved=("sinks", "tree_mask", "key_ranges"))
    num_tokens = len(batch.slot_mapping)
    if query.shape[0] != num_tokens:
        raise RuntimeError(f"query.shape[0] is {query.shape[0]}, expected {num_tokens}, as batch")
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    slopes = options.get("alibi_slopes")
    for call in batch.calls(options.get("causal", True), options.get("sliding_window")):
        options["causal"], options["sliding_window"] = call.causal, call.sliding_window
        index = call.block_tables, call.seq_lens, call.query_start_loc
        rows_out, rows_lse = attention_with_lse(
            query[call.rows], key_cache, value_cache, *index, **options
        )
        if slopes is not None:
            # Every bias was too large by the same amount, which leaves the output as it is.
            rows_lse -= call.distance[:, None] * slopes
        out[call.rows], lse[call.rows] = rows_out, rows_lse
    return out, lse


def merge_parts(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None = None) -> Tensor:
    """Merge partial results in their order, then the sinks, in float32.

    Parameters
    ----------
    outs : list of Tensor
        ``[num_tokens, num_heads, head_dim_v]`` of each rank, one or more.
    lses : list of Tensor
        ``[num_tokens, num_heads]`` float32, as many.
    sinks : Tensor, optional
        ``[num_heads]`` float32.

    Returns
    -------
    Tensor
        ``[num_tokens, num_heads, head_dim_v]`` float32.
    """
    out, lse = outs[0].float(), lses[0]
    for other_out, other_lse in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge_states(out, lse, other_out.float(), other_lse)
    if sinks is not None:
        out, lse = merge_states(out, lse, torch.zeros_like(out), sinks.expand_as(lse).contiguous())
    return out


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensor of every rank, in their order."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered
