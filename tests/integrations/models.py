"""Tiny random models of the families that are served, made offline."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 256
WINDOW = 12  # of the models that have one: less than the prompts, so that it matters at once

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# Configuration, model, what it has of its own, and the attention to compare with.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, "sdpa"),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}, "sdpa"),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}, "sdpa"),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
        "eager",
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "eager",
    ),
}


def peer(family: str) -> str:
    """Return the attention implementation that a family's tokens are compared with."""
    return FAMILIES[family][3]


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """Make a model whose next tokens depend on what it attends to, not on its last token alone."""
    config_class, model_class, extra, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**(_COMMON | extra | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def make_prompts(padding: str) -> dict[str, torch.Tensor]:
    """Make four prompts, of unequal lengths where there is padding: ``none``, left or right."""
    lengths = [20, 20, 20, 20] if padding == "none" else [20, 13, 17, 9]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (4, 20), generator=generator)
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]
    if padding == "left":
        mask = mask.flip(1)
    return {"input_ids": tokens * mask, "attention_mask": mask.long()}
