"""torch's ``varlen_attn`` on the CPU, where torch itself has no kernel for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # defines the ops
from torch import Tensor

from paged_ops.arguments import INT32_MAX, checked_float
from paged_ops.integrations.refusals import (
    check_heads,
    check_lengths,
    check_offsets,
    check_tables,
    check_tensor,
)
from paged_ops.integrations.runs import as_blocks, run_tables
from paged_ops.integrations.windows import Keys, Window, attention_in_window


def enable() -> None:
    """Serve ``torch.nn.attention.varlen.varlen_attn`` and ``varlen_attn_out`` on CPU tensors.

    From here on, in the whole process, they compute with `paged_ops.attention` there: with pages
    (``block_table=``) or without, eagerly and in compiled graphs. Calling this twice does no harm.
    ``num_splits``, ``max_q`` and ``max_k`` have no effect. There is no backward.

    Raises
    ------
    RuntimeError
        This torch's ops take an argument that is not known here.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.attention.varlen import varlen_attn
    >>> from paged_ops.integrations import varlen
    >>> varlen.enable()
    >>> pool = torch.randn(2, 8, 16, 2, 32)
    >>> varlen_attn(
    ...     torch.randn(4, 2, 32), pool[0], pool[1], torch.tensor([0, 3, 4]).int(), None, 3, 20,
    ...     window_size=(-1, 0), seqused_k=torch.tensor([20, 5]).int(),
    ...     block_table=torch.tensor([[3, 1], [6, 0]]).int(),
    ... ).shape
    torch.Size([4, 2, 32])
    """
    served = {*inspect.signature(_attend).parameters, "out"}
    for op in (torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_out):
        names = [argument.name for argument in op.default._schema.arguments]
        unknown = sorted(set(names) - served)
        if unknown:
            raise RuntimeError(
                f"torch {torch.__version__}: {op.default.name()} takes {', '.join(unknown)}, "
                f"which is unknown here"
            )
        torch.library.register_kernel(op.default, "cpu", _kernel(names))


def _kernel(names: list[str]) -> Callable[..., Any]:
    """Return the kernel of an op: it returns its output, or writes it into the caller's ``out``."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        target = given.pop("out", None)
        out, lse = _attend(**given)
        if target is None:
            return out, lse, torch.zeros(2, dtype=torch.uint64)  # the state of no random numbers
        if target.shape != out.shape or target.dtype != out.dtype:
            raise ValueError(
                f"out is {target.dtype} {list(target.shape)}, expected {out.dtype} "
                f"{list(out.shape)}"
            )
        target.copy_(out)
        return lse

    return kernel


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend; return the output and ``[num_heads, num_tokens]`` of log-sum-exp, as torch does."""
    window = Window.of((-1, -1) if window_size is None else window_size, is_causal)
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k is None, expected the lengths: block_table is given")
    if block_table is None and cu_seq_k is None:
        raise ValueError("cu_seq_k is None, expected offsets: block_table is None")
    given = ("query", query), ("key", key), ("value", value)
    check_heads(*given, 3 if block_table is None else 4)
    if query.dim() != 3:
        raise ValueError(
            f"query has {query.dim()} dimensions, expected 3: [total_q, num_heads, head_dim]"
        )
    batch = check_offsets("cu_seq_q", cu_seq_q, None, query, len(query), is_whole=True)
    if block_table is not None:
        assert seqused_k is not None
        check_tensor("seqused_k", seqused_k, {"batch": batch}, (torch.int32,), query)
        check_lengths("seqused_k", seqused_k, INT32_MAX, "a length")
        check_tables("block_table", block_table, seqused_k, "seqused_k", key)
        keys = Keys(key, value, block_table, seqused_k)
    else:
        assert cu_seq_k is not None
        check_offsets("cu_seq_k", cu_seq_k, batch, query, len(key))
        seq_lens = _used(cu_seq_k.diff(), seqused_k)
        tables = run_tables(cu_seq_k[:-1], seq_lens)
        keys = Keys(as_blocks(key), as_blocks(value), tables, seq_lens)
    scale = None if scale is None else checked_float("scale", scale)
    out, lse = attention_in_window(query, cu_seq_q, keys, window, {"scale": scale})
    return out, lse.t().contiguous()


def _used(seq_lens: Tensor, seqused_k: Tensor | None) -> Tensor:
    """Return how many keys of each sequence count."""
    if seqused_k is None:
        return seq_lens
    check_tensor("seqused_k", seqused_k, {"batch": len(seq_lens)}, (torch.int32,), seq_lens)
    pairs = zip(seqused_k.tolist(), seq_lens.tolist(), strict=True)
    for i, (used, length) in enumerate(pairs):
        if not 0 <= used <= length:
            raise ValueError(
                f"seqused_k[{i}] is {used}, expected 0 to {length}, as cu_seq_k has it"
            )
    return seqused_k
