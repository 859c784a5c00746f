"""What isn't served, said while vLLM builds the model: by the name that vLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paged_ops import npu_attention_kernel

# They look up what to propose in the text. The others run a model, whose steps vllm-ascend changes
# after their metadata have been built.
_PROPOSERS = ("ngram", "suffix")


def check_layer(
    config: Any, head_size: int, kv_cache_dtype: str, attn_type: str, others: Mapping[str, Any]
) -> None:
    """Refuse a layer that isn't served.

    Parameters
    ----------
    config
        vLLM's configuration.
    head_size, kv_cache_dtype, attn_type
        As vLLM gives them to a layer's attention.
    others : mapping of str to object
        What it gives besides.

    Raises
    ------
    NotImplementedError
        With the name of what isn't served.
    """
    if attn_type != "decoder":
        _refuse("attn_type", attn_type, "decoder")
    for name, value in others.items():
        if value is not None and value is not False:
            _refuse(name, type(value).__name__, "None")
    dtype: torch.dtype = config.model_config.dtype
    name = str(dtype).removeprefix("torch.")
    if kv_cache_dtype not in ("auto", name):
        _refuse("kv_cache_dtype", kv_cache_dtype, f"auto or {name}")
    if getattr(config.quant_config, "enable_c8_quant", False):
        _refuse("enable_c8_quant", True, "False")
    if config.speculative_config is not None:
        method = config.speculative_config.method
        if method not in _PROPOSERS:
            _refuse("speculative_config.method", method, " or ".join(_PROPOSERS))
    try:
        npu_attention_kernel(dtype, head_size)
    except RuntimeError as error:
        raise NotImplementedError(f"head_size {head_size} in {name}: {error}") from error


def _refuse(name: str, value: object, served: str) -> None:
    raise NotImplementedError(f"{name} is {value!r}, expected {served}: paged_ops serves no other")
