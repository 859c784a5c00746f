"""What padding does to a rectangular batch: which tokens are real, and what each one sees.

transformers lays out a batch as rows of equally many columns, some of them padding, and measures a
sliding window in columns. The pool holds real tokens only. As padding is never seen, what a query
sees is still a run of its row's real tokens, which `visible_runs` gives for every column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """The columns of a step among all that the cache has seen.

    Attributes
    ----------
    mask : Tensor
        ``[batch, seen + num_new]`` bool on the CPU: which columns are real tokens.
    num_new : int
        How many of the columns, the last ones, are new.
    """

    mask: Tensor
    num_new: int

    @property
    def new(self) -> Tensor:
        """``[batch, num_new]`` bool: which of the new columns are real tokens."""
        return self.mask[:, self.mask.shape[1] - self.num_new :]

    def visible_runs(self, sliding_window: int | None) -> tuple[Tensor, Tensor]:
        """Return where the run of tokens that each new column sees ends, and how long it is.

        Returns
        -------
        ends, lengths : Tensor
            ``[batch, num_new]`` int64: the column sees the real tokens ``ends - lengths`` to
            ``ends - 1`` of its row.
        """
        total = self.mask.shape[1]
        before = torch.nn.functional.pad(self.mask.cumsum(1), (1, 0))  # real tokens left of each
        columns = torch.arange(total - self.num_new, total) + 1
        ends = before[:, columns]
        if sliding_window is None:
            return ends, ends
        return ends, ends - before[:, (columns - sliding_window).clamp(min=0)]

    def is_ragged_left(self, sliding_windows: set[int | None]) -> bool:
        """Say whether each row's new real tokens are simply the last ones of its sequence.

        So it is where padding is at the left only, or far enough back. Then one call of the op
        serves all rows; otherwise padding is computed as well, for transformers looks at the last
        column, whatever it is, and each column is a sequence of its own.
        """
        if self.mask.all():
            return True
        new = self.new
        seen_before = self.mask[:, : self.mask.shape[1] - self.num_new].any(1, keepdim=True)
        started = (new.cumsum(1) > 0) | seen_before
        if bool((started & ~new).any()):
            return False
        for window in sliding_windows - {None}:
            ends, lengths = self.visible_runs(window)
            if bool((new & (lengths < ends.clamp(max=window))).any()):
                return False
        return True
