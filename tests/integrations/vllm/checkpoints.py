"""Small checkpoints in folders, as vLLM loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedModel,
)

from paged_ops import demo
from paged_ops.demo.llama import load_llama
from tests.integrations.models import VOCABULARY, make_model

HEAD_SIZE = 32  # the smallest that vLLM's own attention has

_FURTHER = {
    "gpt-oss": {  # vLLM knows no other
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}


def make_deepseek() -> PreTrainedModel:
    """Make a random model with latent attention, of the one size of latents that vLLM takes."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=3,  # no layer is a mixture of experts
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=512,
    )
    return _with_large_weights(DeepseekV2ForCausalLM, config)


def make_bloom() -> PreTrainedModel:
    """Make a random model that knows positions by ALiBi alone."""
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=128, n_layer=3, n_head=4)
    return _with_large_weights(BloomForCausalLM, config)


def make_bert() -> PreTrainedModel:
    """Make a random encoder."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    return _with_large_weights(BertModel, config)


def _with_large_weights(model_class: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def save_random(family: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of a family whose next tokens depend on what it attends to."""
    model = make_model(family, **{"head_dim": HEAD_SIZE, **_FURTHER.get(family, {}), **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family == "gemma2" and "post_" in name:
                parameter.fill_(3)  # or the last token is the next one, over and over
    return save(model, folder)


def save_demo(folder: Path) -> Path:
    """Save the demo's trained model, whose choices are those of a language model."""
    save_tokenizer(folder)
    return save(load_llama(), folder)


def save_tokenizer(folder: Path) -> None:
    """Save the demo's tokenizer, for what asks for one though it is given tokens."""
    shutil.copy(Path(demo.__file__).parent / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model whose text neither begins nor ends with tokens of its own."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
