"""Models for which transformers, not vLLM's own attention, says what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.integrations.models import VOCABULARY
from tests.integrations.vllm import checkpoints
from tests.integrations.vllm.engines import OURS, Tokens, answers, engine, make_prompts

PROMPTS = make_prompts(VOCABULARY, (40, 90, 3, 120, 17))
CHUNKS = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "enable_prefix_caching": True}


def generated(model: PreTrainedModel, num_tokens: int) -> list[Tokens]:
    """Let transformers generate, one prompt after another."""
    return [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("options", [{}, CHUNKS, {"enforce_eager": False}])
def test_latent_attention_gives_the_tokens_of_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = checkpoints.make_deepseek()
    model.generation_config.eos_token_id = None
    expected = generated(model, 16)
    with engine(checkpoints.save(model, tmp_path), "PAGED_OPS_MLA", **options) as llm:
        assert answers(llm, PROMPTS, 16).tokens == expected
        assert answers(llm, PROMPTS, 16).tokens == expected


def test_alibi_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = checkpoints.make_bloom()
    model.generation_config.eos_token_id = None
    expected = generated(model, 16)
    with engine(checkpoints.save(model, tmp_path), OURS) as llm:
        assert answers(llm, PROMPTS, 16).tokens == expected


def test_an_encoder_gives_the_vectors_of_transformers(tmp_path: Path) -> None:
    model = checkpoints.make_bert()
    checkpoints.save_tokenizer(tmp_path)
    options = {
        "runner": "pooling",
        "pooler_config": {"pooling_type": "CLS", "use_activation": False},
        "skip_tokenizer_init": False,
    }
    with engine(checkpoints.save(model, tmp_path), OURS, **options) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
