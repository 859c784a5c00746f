"""Blocks that parallel sampling and beam search save, counted by a real `BlockManager`.

Each prompt is allocated once and forked; every sequence then appends its own tokens. At each step
the blocks that the manager has in use are compared with those that the sequences would need without
sharing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paged_ops.bench.memory.lengths import Request
from paged_ops.blocks.manager import BlockManager

BLOCK_SIZE = 16
# The standard deviation of the toy model's logits: the best token has a probability of about 0.8.
_SHARPNESS = 6.0
_VOCABULARY = 32  # next tokens that have any weight in the toy language model


@dataclass
class Saving:
    """Blocks summed over steps: in use, and needed without sharing."""

    used: int = 0
    unshared: int = 0

    def add(self, manager: BlockManager, sequences: Sequence[int]) -> None:
        """Count one step."""
        self.used += manager.num_used
        self.unshared += sum(len(manager.block_table(sequence)) for sequence in sequences)

    @property
    def percent(self) -> float:
        """Blocks saved, in percent of those needed without sharing."""
        return 100 * (1 - self.used / self.unshared)


def parallel_sampling(requests: Sequence[Request], width: int) -> Saving:
    """Answer every prompt `width` times at once, all answers equally long.

    Parameters
    ----------
    requests : sequence of Request
        The prompts and the lengths of their answers.
    width : int
        Answers per prompt.
    """
    saving = Saving()
    for request in requests:
        manager, sequences = _started(request, width), range(width)
        for _ in range(request.output):
            for sequence in sequences:
                manager.append(sequence, 1)
            saving.add(manager, sequences)
    return saving


def beam_search(requests: Sequence[Request], width: int) -> Saving:
    """Search every answer with `width` beams, in a toy language model.

    The model's next-token logits are independent normal numbers. The sharper it is, the longer it
    takes until all beams descend from one, and the fewer blocks they share. At each step the
    `width` best continuations of all beams survive.

    Parameters
    ----------
    requests : sequence of Request
        The prompts and the lengths of their answers.
    width : int
        Beams.
    """
    saving, choose = Saving(), random.Random(0)
    for request in requests:
        manager = _started(request, width)
        scores = [0.0] + [-math.inf] * (width - 1)  # the beams are the same at first
        for _ in range(request.output):
            best = sorted(_continuations(scores, choose), reverse=True)[:width]
            scores = [score for score, _ in best]
            _survive(manager, [parent for _, parent in best])
            for sequence in range(width):
                manager.append(sequence, 1)
            saving.add(manager, range(width))
    return saving


def _continuations(scores: Sequence[float], choose: random.Random) -> list[tuple[float, int]]:
    """Return the log probability of every continuation of every beam, and the beam."""
    found = []
    for beam, score in enumerate(scores):
        if score == -math.inf:
            continue
        logits = [choose.gauss(0.0, _SHARPNESS) for _ in range(_VOCABULARY)]
        log_sum = math.log(sum(map(math.exp, logits)))
        found += [(score + logit - log_sum, beam) for logit in logits]
    return found


def _survive(manager: BlockManager, parents: Sequence[int]) -> None:
    """Make beam i the child of beam ``parents[i]``, for all beams at once.

    A beam with children goes on as one of them; the others of its children fork off it and take
    the names of beams that have none.
    """
    children = Counter(parents)
    names = [beam for beam in range(len(parents)) if not children[beam]]
    for name in names:
        manager.free(name)
    for parent, count in children.items():
        for _ in range(count - 1):
            manager.fork(parent, names.pop())


def _started(request: Request, width: int) -> BlockManager:
    """Return a manager with a prompt, as the first of `width` sequences that share it."""
    blocks = -(-(request.prompt + request.output) // BLOCK_SIZE)
    manager = BlockManager(width * blocks, BLOCK_SIZE, prefix_caching=False)
    manager.allocate(0, request.prompt)
    for sequence in range(1, width):
        manager.fork(0, sequence)
    return manager
