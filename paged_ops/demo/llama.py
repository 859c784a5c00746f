"""The demo's model as transformers knows it: a `LlamaForCausalLM`. Needs transformers, an extra."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_ops.demo.corpus import END_OF_TEXT
from paged_ops.demo.model import FOLDER, LanguageModel, ModelConfig, load_model
from paged_ops.demo.tokenizer import FILE

_NAMES = {  # of the parameters: a part of ours, a part of transformers'
    "blocks.": "model.layers.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def llama_config(config: ModelConfig) -> LlamaConfig:
    """Return the same architecture as a configuration of transformers."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def load_llama(folder: Path = FOLDER, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Build the model of ``config.json`` with its weights; nothing is downloaded.

    Save it with ``load_llama().save_pretrained(folder)`` for programs that load a folder.

    Parameters
    ----------
    folder : Path
        Where ``config.json`` and ``model.safetensors`` are.
    dtype : torch.dtype
        What the model computes in.

    Examples
    --------
    >>> model = load_llama()
    >>> model.config.num_hidden_layers, model.config.vocab_size
    (4, 2048)
    """
    ours = load_model(folder)
    theirs = LlamaForCausalLM(llama_config(ours.config))
    theirs.load_state_dict(_renamed(ours), strict=True)
    theirs.tie_weights()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)  # rotation angles stay float32
    theirs.eval().requires_grad_(False)
    return theirs


def load_tokenizer(folder: Path = FOLDER) -> PreTrainedTokenizerFast:
    """Read ``tokenizer.json`` as a tokenizer of transformers.

    Examples
    --------
    >>> tokenizer = load_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("ROMEO: ça va?"))
    'ROMEO: ça va?'
    """
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / FILE), eos_token=END_OF_TEXT)


def _renamed(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the weights under transformers' names."""
    weights = {
        "model.embed_tokens.weight": model.embedding.weight,
        "lm_head.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
    }
    for name, weight in model.blocks.state_dict(prefix="blocks.").items():
        for part, theirs in _NAMES.items():
            name = name.replace(part, theirs)
        weights[name] = weight
    return weights
