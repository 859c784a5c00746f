"""Small random models of several families, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.models import VOCABULARY
from tests.integrations.vllm.checkpoints import save_random
from tests.integrations.vllm.engines import (
    OURS,
    THEIRS,
    answers,
    engine,
    likelihoods,
    make_prompts,
)

PROMPTS = make_prompts(VOCABULARY, (40, 90, 3, 120, 17))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt-oss"])
def test_tokens_are_equal_in_float32_and_likelihoods_as_near_in_bfloat16(
    family: str, tmp_path: Path
) -> None:
    model = save_random(family, tmp_path)
    with engine(model, THEIRS) as llm:
        theirs = answers(llm, PROMPTS)
        texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, theirs.tokens, strict=True)]
        exact = likelihoods(llm, texts)
    assert all(len(set(tokens)) > 1 for tokens in theirs.tokens)
    with engine(model, OURS) as llm:
        ours = answers(llm, PROMPTS)
        assert float((likelihoods(llm, texts) - exact).abs().max()) < 1e-2
    assert ours.tokens == theirs.tokens

    error: dict[str, torch.Tensor] = {}
    for backend in (THEIRS, OURS):
        with engine(model, backend, dtype="bfloat16") as llm:
            error[backend] = (likelihoods(llm, texts) - exact).abs()
    print(family, {backend: float(each.mean()) for backend, each in error.items()})
    assert float(error[OURS].mean()) < 1.1 * float(error[THEIRS].mean())
