"""How the next token is chosen from its logits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Chooses the next token from its logits.

    With a temperature of 0 that is the largest logit. Otherwise Gumbel noise, drawn from a
    generator that is seeded with (seed, request, position), is added to ``logits / temperature``:
    the choice is a sample of the softmax, and it depends neither on the rest of the batch nor on
    whether the request was preempted.
    """

    temperature: float = 0.0
    seed: int = 0

    def scores(self, logits: Tensor, request: int, position: int) -> Tensor:
        """Return float32 ``[vocab_size]`` whose largest entry is the token to choose."""
        if self.temperature == 0.0:
            return logits
        # torch's generator uses 32 bits of its seed, so the three numbers are hashed into those.
        digest = hashlib.blake2b(f"{self.seed} {request} {position}".encode(), digest_size=4)
        generator = torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little"))
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        return logits / self.temperature - noise
