"""transformers' continuous batching, ``model.generate_batch``, with its attention computed here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from paged_ops.functional import attention
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.transformers.attention import attention_options

PAGED_EAGER = "paged|eager"


def replace_paged_eager() -> None:
    """Compute the attention of transformers' continuous batching with `paged_ops.attention`.

    Continuous batching accepts a few names only; ``"paged|eager"`` is the one that may be given
    another function. So from here on every model with this name, or with ``"eager"`` in
    ``model.generate_batch``, is served by it, in the whole process. transformers keeps its own
    pool and scheduler, and gathers the keys and values of each request before every call.
    """
    AttentionInterface.register(PAGED_EAGER, gathered_attention)


def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | dict[str, Tensor] | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over keys and values that lie one request after another.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    query : Tensor
        ``[1, num_heads, num_tokens, head_dim]``: the new tokens of all requests.
    key, value : Tensor
        ``[1, num_kv_heads, num_keys, head_dim]``: what each request's tokens may see.
    attention_mask
        Says the same as the lengths, in a dense form; not looked at.
    cu_seq_lens_q, cu_seq_lens_k : Tensor
        ``[batch + 1]`` int32: where each request begins in query, and in key and value.
    **kwargs
        transformers' options.

    Returns
    -------
    output : Tensor
        ``[1, num_tokens, num_heads, head_dim]``.
    weights : None
        Attention weights are never formed.
    """
    # is_causal is False whenever a dense mask is made, which is causal nevertheless.
    options = attention_options(module, query, kwargs | {"is_causal": True})
    seq_lens = cu_seq_lens_k.diff()
    rows = query[0].transpose(0, 1)
    used = int(cu_seq_lens_q[-1])  # what follows is padding
    output = rows.new_zeros(*rows.shape[:2], value.shape[-1])
    output[:used] = attention(
        rows[:used],
        as_blocks(key[0].transpose(0, 1)),
        as_blocks(value[0].transpose(0, 1)),
        run_tables(cu_seq_lens_k[:-1], seq_lens),
        seq_lens,
        cu_seq_lens_q,
        **options,
    )
    return output[None], None
