"""The engine's tokens against those of contiguous attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_ops.demo.model import AttentionFunction, ContiguousAttention, LanguageModel
from paged_ops.engine import Request, Sampler

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""How far apart rounding alone may put two scores; about ten times what it does on this model."""


@dataclass
class Comparison:
    """How an engine's tokens compare with those of contiguous attention.

    Attributes
    ----------
    equal : int
        Tokens that are the same.
    tied : int
        Tokens that differ, but whose scores differ by no more than rounding can explain.
    worst_gap : float
        The largest such difference of scores.
    mismatch : str
        The first token that differs by more, described; empty if none does.
    """

    equal: int = 0
    tied: int = 0
    worst_gap: float = 0.0
    mismatch: str = ""


@torch.inference_mode()
def contiguous_scores(
    model: LanguageModel, request: Request, sampler: Sampler
) -> Iterator[tuple[int, Tensor]]:
    """Replay a finished request with an ordinary KV cache, one prompt pass, then token by token.

    Yields each token that the engine generated and the scores that it is chosen from here. As long
    as the tokens are equal, this is the request's own free run.
    """
    attend: AttentionFunction = ContiguousAttention(model.config)
    new, position = request.prompt, 0
    for token in request.generated:
        positions = torch.arange(position, position + len(new))
        last = torch.tensor([len(new) - 1])
        logits = model(torch.tensor(new), positions, attend, rows=last)
        position += len(new)
        yield token, sampler.scores(logits[0], request.index, position)
        new = [token]


def compare_with_contiguous(
    model: LanguageModel, requests: Sequence[Request], sampler: Sampler
) -> Comparison:
    """Check every generated token against ``scaled_dot_product_attention``.

    Both ways add the same numbers in another order, so their logits differ in the last bits. A
    token that differs passes only if its score is within that rounding of the best one
    (:data:`TOLERANCE`); in float32 this practically never happens, in bfloat16 now and then.
    """
    tolerance = TOLERANCE[model.embedding.weight.dtype]
    result = Comparison()
    for request in requests:
        for number, (token, scores) in enumerate(contiguous_scores(model, request, sampler)):
            gap = float(scores.max() - scores[token])
            if int(scores.argmax()) == token:
                result.equal += 1
            elif gap <= tolerance:
                result.tied += 1
                result.worst_gap = max(gap, result.worst_gap)
            else:
                result.mismatch = (
                    f"request {request.index}, new token {number}: the engine chose token {token}, "
                    f"contiguous attention chooses {int(scores.argmax())}, whose score is higher "
                    f"by {gap:.3g} (rounding explains {tolerance:.3g})"
                )
                return result
    return result
