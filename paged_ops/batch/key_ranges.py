"""Which keys each query token sees, where one rule for the whole call doesn't say it."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_ops.arguments import INT32_MAX, checked_int


def build_key_ranges(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    causal: Tensor | None = None,
    sliding_window: int | None = None,
    spans: Tensor | None = None,
    num_tokens: int | None = None,
) -> Tensor:
    """Build the ``key_ranges`` of a call whose sequences, or parts of them, see differently.

    The ranges say everything, so the call itself is ``causal=False`` and has no window; ALiBi goes
    by position as ever.

    Parameters
    ----------
    seq_lens, query_start_loc : Tensor
        As in `paged_ops.attention`.
    causal : Tensor, optional
        ``[batch]`` bool: whether a query token of the sequence sees nothing behind itself. None:
        all are.
    sliding_window : int, optional
        A query token sees no key further back than this many, its own included.
    spans : Tensor, optional
        ``[num_spans, 3]`` integers (sequence, first, end): the tokens at positions first to end - 1
        of the sequence see each other, whatever `causal` and `sliding_window` say, as the parts of
        an image in a prompt do. Spans of one sequence don't overlap.
    num_tokens : int, optional
        Rows of the query where it has more than query_start_loc says: rows past the last start see
        nothing. A compiled graph needs it, to know the result's size. None: those that it says.

    Returns
    -------
    Tensor
        ``[num_tokens, 2]`` int32, on the device of seq_lens.

    Raises
    ------
    ValueError, TypeError
        `sliding_window` is no positive integer.

    Examples
    --------
    A prompt of 6 tokens, of which 2 to 4 are an image, and one of 3 tokens without causal order.

    >>> seq_lens = torch.tensor([6, 3], dtype=torch.int32)
    >>> starts = torch.tensor([0, 6, 9], dtype=torch.int32)
    >>> causal = torch.tensor([True, False])
    >>> ranges = build_key_ranges(seq_lens, starts, causal=causal, spans=torch.tensor([[0, 2, 5]]))
    >>> ranges.clamp(max=6).tolist()  # an end past a sequence's is its end
    [[0, 1], [0, 2], [0, 5], [0, 5], [0, 5], [0, 6], [0, 6], [0, 6], [0, 6]]
    """
    if num_tokens is None:
        num_tokens = int(query_start_loc[-1])
    rows = torch.arange(num_tokens, device=seq_lens.device)
    is_real = rows < query_start_loc[-1]
    sequence = torch.searchsorted(query_start_loc[1:].contiguous(), rows, right=True)
    sequence = sequence.clamp(max=max(len(seq_lens) - 1, 0))
    if not len(seq_lens):
        return rows.new_zeros((num_tokens, 2), dtype=torch.int32)
    ends = query_start_loc[1:].long()[sequence]
    positions = seq_lens.long()[sequence] - ends + rows
    first = torch.zeros_like(rows)
    if sliding_window is not None:
        first = positions + 1 - checked_int("sliding_window", sliding_window, 1)
    end = positions + 1
    if causal is not None:
        end = torch.where(causal[sequence], end, INT32_MAX)
    if spans is not None and len(spans):
        owner, span_first, span_end = spans.long().unbind(1)
        at = positions[:, None]
        inside = (sequence[:, None] == owner) & (at >= span_first) & (at < span_end)
        first = torch.minimum(first, torch.where(inside, span_first, INT32_MAX).amin(1))
        end = torch.maximum(end, torch.where(inside, span_end, 0).amax(1))
    ranges = torch.stack([first.clamp(min=0), end.clamp(min=0)], 1)
    return torch.where(is_real[:, None], ranges, 0).to(torch.int32)
