"""A tiny random model of every causal type that transformers has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 96
WINDOW = 6  # less than the prompts, so that it matters at once
LARGEST = 20_000_000  # parameters; what isn't smaller with all these settings isn't tiny

# Given to every configuration that has a setting of this name.
_SMALL: dict[str, Any] = {
    "attention_chunk_size": WINDOW,
    "attention_heads": 4,
    "bos_token_id": 1,
    "d_ff": 48,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": 3,
    "eos_token_id": None,
    "ffn_dim": 48,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "is_decoder": True,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
    "mamba_d_conv": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    "moe_intermediate_size": 16,
    "n_ctx": 256,
    "n_embd": 32,
    "n_group": 1,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 3,
    "n_positions": 256,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_layers": 3,
    "num_local_experts": 2,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "seq_length": 256,
    "shared_expert_intermediate_size": 16,
    "sliding_window": WINDOW,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": VOCABULARY,
}

_OMIT = object()  # nothing of this name

_LATENT: dict[str, Any] = {"head_dim": _OMIT, "num_key_value_heads": 4}
_FULL_LAST = {"layer_types": ["linear_attention", "full_attention"] * 2}
_GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": _OMIT,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}

# What a type needs besides, or instead.
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {**_LATENT, **_FULL_LAST},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon": {"head_dim": _OMIT},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _FULL_LAST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {**_LATENT, **_FULL_LAST},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {
        "head_dim": 4,
        "num_key_value_heads": 4,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "moe_topk": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minicpm3": _LATENT,
    "prophetnet": {
        "num_hidden_layers": _OMIT,
        "num_decoder_layers": 3,
        "num_encoder_layers": 3,
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2},
    "qwen3_5_moe_text": _FULL_LAST,
    "qwen3_5_text": _FULL_LAST,
    "qwen3_next": _FULL_LAST,
    "sarvam_mla": _LATENT,
    "xlm": {"emb_dim": 32, "n_layers": 3, "n_heads": 4},
    "xlstm": {"qk_head_dim": _OMIT, "v_head_dim": _OMIT},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
}


def make_config(kind: str, **changes: Any) -> PretrainedConfig:
    """Make a small configuration of a type."""
    kind_of = CONFIG_MAPPING[kind]
    own = _OWN.get(kind, {}) | changes
    config = kind_of(**_fitting(kind_of(), own))
    text = config.get_text_config(decoder=True)
    for name, value in vars(config).items():
        if value is text:
            return kind_of(**{name: type(text)(**_fitting(text, own))})
    return config


def _fitting(default: PretrainedConfig, own: dict[str, Any]) -> dict[str, Any]:
    known = dir(default)
    small = {name: value for name, value in _SMALL.items() if name in known}
    return {name: value for name, value in (small | own).items() if value is not _OMIT}


def make_causal_model(kind: str, **changes: Any) -> PreTrainedModel:
    """Make a model whose next tokens depend on what it attends to, not on its last token alone.

    Raises
    ------
    Exception
        Whatever transformers raises when such a configuration isn't possible.
    """
    config = make_config(kind, **changes)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind} has {size} parameters, expected at most {LARGEST}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
