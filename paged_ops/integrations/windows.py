"""Attention in FlashAttention's two-sided windows, by the op's causal and sliding-window rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops.arguments import INT32_MAX, checked_int
from paged_ops.functional import attention_with_lse, merge_states
from paged_ops.ops.checks import AttentionOptions


@dataclass(frozen=True)
class Window:
    """How far a query sees: a query at position p sees keys p - left to p + right, both included.

    The last query of a sequence has the position of its last key.

    Attributes
    ----------
    left, right : int or None
        0 or more; None is without limit.
    """

    left: int | None
    right: int | None

    @classmethod
    def of(cls, window_size: Sequence[int], causal: bool) -> Window:
        """Read FlashAttention's ``window_size``, where -1 is without limit, and its ``causal``.

        Raises
        ------
        ValueError, TypeError
            `window_size` is no pair of integers of -1 or more.
        """
        if not isinstance(window_size, Sequence) or len(window_size) != 2:
            raise ValueError(f"window_size is {window_size}, expected a pair (left, right)")
        limits = [checked_int(f"window_size[{i}]", window_size[i], -1) for i in range(2)]
        # No sequence is longer than an int32 counts.
        left, right = (None if not 0 <= limit < INT32_MAX else limit for limit in limits)
        return cls(left, 0 if causal else right)

    @property
    def is_local(self) -> bool:
        """Whether there is a limit at all."""
        return self.left is not None or self.right is not None

    def settled(self, query_start_loc: Tensor) -> Window:
        """Return the window that does the same for these queries, causal if there is one each."""
        if query_start_loc.numel() <= 1 or int(query_start_loc.diff().max()) <= 1:
            return Window(self.left, 0)  # the only query is the last: nothing comes after it
        return self


class Cut(NamedTuple):
    """What cuts off keys beside a window.

    Attributes
    ----------
    leftpad : Tensor or None
        ``[batch]`` int32: keys before it don't exist; positions count as ever.
    chunk : int
        A query sees the keys of its own chunk of so many positions, counted from `leftpad` on. 0:
        all.
    """

    leftpad: Tensor | None = None
    chunk: int = 0


WHOLE = Cut()


def check_cut(query: Tensor, window: Window, cut: Cut, alibi_slopes: Tensor | None) -> None:
    """Refuse what needs key ranges where no kernel reads them.

    Raises
    ------
    ValueError
        The query isn't on the CPU, and an argument says what only the CPU's kernels serve.
    """
    given = {
        "cache_leftpad": cut.leftpad is not None,
        "attention_chunk": cut.chunk > 0,
        "alibi_slopes": alibi_slopes is not None and window.right != 0,
    }
    for name, is_given in given.items():
        if is_given and query.device.type != "cpu":
            raise ValueError(f"{name} is served in this way on the CPU, not on {query.device}")


class Keys(NamedTuple):
    """Where the keys and values of each sequence are: as for `paged_ops.attention`."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


def attention_in_window(
    query: Tensor,
    query_start_loc: Tensor,
    keys: Keys,
    window: Window,
    options: AttentionOptions,
    cut: Cut = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Attend as `paged_ops.attention_with_lse`, in a window with two sides.

    Parameters
    ----------
    query : Tensor
        ``[num_tokens, num_heads, head_dim]``.
    query_start_loc : Tensor
        ``[batch + 1]`` int32.
    keys : Keys
        The caches, the tables and the lengths.
    window : Window
        What a query sees.
    options : AttentionOptions
        As in `paged_ops.attention`: what makes the scores. ALiBi goes by the absolute distance.
    cut : Cut
        Which keys there are, and how far a query sees beside the window.

    Returns
    -------
    output : Tensor
        ``[num_tokens, num_heads, head_dim of value_cache]``.
    lse : Tensor
        ``[num_tokens, num_heads]`` float32.

    Examples
    --------
    >>> pool = torch.randn(1, 2, 8, 1, 4)
    >>> keys = Keys(pool[:, 0], pool[:, 1], torch.tensor([[0]], dtype=torch.int32),
    ...             torch.tensor([8], dtype=torch.int32))
    >>> starts = torch.tensor([0, 3], dtype=torch.int32)
    >>> output, lse = attention_in_window(
    ...     torch.zeros(3, 1, 4), starts, keys, Window(left=2, right=1), {}
    ... )
    >>> [round(count) for count in lse.exp()[:, 0].tolist()]  # keys that each of them sees
    [4, 4, 3]
    """
    window = window.settled(query_start_loc)
    is_alibi_two_sided = window.right != 0 and options.get("alibi_slopes") is not None
    if cut != WHOLE or is_alibi_two_sided:
        return _in_ranges(query, query_start_loc, keys, window, options, cut)
    if window.right:
        return _two_sided(query, query_start_loc, keys, window, window.right, options)
    return _one_sided(query, query_start_loc, keys, window.left, window.right == 0, options)


def _one_sided(
    query: Tensor,
    starts: Tensor,
    keys: Keys,
    left: int | None,
    causal: bool,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Attend causally, or to everything that comes after."""
    window = None if left is None else left + 1
    visible: AttentionOptions = {**options, "causal": causal, "sliding_window": window}
    return attention_with_lse(query, *keys, starts, **visible)


def _in_ranges(
    query: Tensor,
    starts: Tensor,
    keys: Keys,
    window: Window,
    options: AttentionOptions,
    cut: Cut,
) -> tuple[Tensor, Tensor]:
    """Attend with the keys that each query sees said one by one."""
    owners = torch.repeat_interleave(starts.diff())
    rows = torch.arange(len(query), device=query.device)
    at = keys.seq_lens.long()[owners] - starts[1:].long()[owners] + rows
    pad = torch.zeros_like(at) if cut.leftpad is None else cut.leftpad.long()[owners]
    first, end = pad, keys.seq_lens.long()[owners]
    if window.left is not None:
        first = torch.maximum(first, at - window.left)
    if window.right is not None:
        end = torch.minimum(end, at + window.right + 1)
    if cut.chunk:
        begin = at - (at - pad) % cut.chunk
        first, end = torch.maximum(first, begin), torch.minimum(end, begin + cut.chunk)

    def attend(first: Tensor, end: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
        ranges = torch.stack([first, torch.maximum(first, end)], 1).clamp(min=0).to(torch.int32)
        visible: AttentionOptions = {
            **options,
            "causal": False,
            "key_ranges": ranges,
            "alibi_slopes": slopes,
        }
        return attention_with_lse(query, *keys, starts, **visible)

    slopes = options.get("alibi_slopes")
    if slopes is None or window.right == 0:
        return attend(first, end, slopes)
    # The op's bias grows with the key's position: behind the query it has to fall again.
    before = attend(first, torch.minimum(end, at + 1), slopes)
    return merge_states(*before, *attend(torch.maximum(first, at + 1), end, -slopes))


def _two_sided(
    query: Tensor,
    starts: Tensor,
    keys: Keys,
    window: Window,
    right: int,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Attend in two calls.

    The last `right` queries of a sequence see up to its end. Of the others alone, taken as if they
    were the last ones, each stands `right` positions further on, where causal is what is wanted.
    """
    counts = starts.diff()
    owners = torch.repeat_interleave(counts)
    behind = starts[1:][owners] - torch.arange(len(query), device=query.device)  # 1 for the last
    early, late = (behind > right).nonzero()[:, 0], (behind <= right).nonzero()[:, 0]
    left = None if window.left is None else window.left + right
    parts = [
        (early, _starts((counts - right).clamp(min=0)), left, True),
        (late, _starts(counts.clamp(max=right)), window.left, False),
    ]
    output = query.new_empty(*query.shape[:2], keys.value_cache.shape[-1])
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    for rows, part_starts, part_left, causal in parts:
        output[rows], lse[rows] = _one_sided(
            query[rows], part_starts, keys, part_left, causal, options
        )
    return output, lse


def _starts(counts: Tensor) -> Tensor:
    """Return where each sequence begins, from how many queries it has."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
