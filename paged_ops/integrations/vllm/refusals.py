"""What isn't served, said while vLLM builds the model: by the name that vLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from paged_ops.integrations.vllm.pages import SCALE_BYTES, SCALED_PER_TOKEN

_SPECS = (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def check_selection(backend: type[AttentionBackend], config: Any) -> None:
    """Refuse layers for which the backend was chosen and which it doesn't serve.

    Parameters
    ----------
    backend : type
        One of this package's backends.
    config
        vLLM's ``AttentionSelectorConfig``.

    Raises
    ------
    NotImplementedError
        With vLLM's words for everything that isn't served.
    """
    reasons = backend.validate_configuration(device_capability=None, **config._asdict())
    if config.use_non_causal and config.has_sliding_window:
        reasons.append("sliding window with non-causal attention not supported")
    if reasons:
        raise NotImplementedError(
            f"paged_ops doesn't serve {config}: {', '.join(reasons)}; vLLM's own attention is "
            f"--attention-backend CPU_ATTN"
        )


def check_layer(
    head_size: int,
    kv_cache_dtype: str,
    attn_type: str,
    sliding_window: int | None,
    others: Mapping[str, Any],
) -> None:
    """Refuse a layer that isn't served.

    Parameters
    ----------
    head_size, kv_cache_dtype, attn_type, sliding_window
        As vLLM gives them to a layer's attention.
    others : mapping of str to object
        What it gives besides, unknown here.

    Raises
    ------
    NotImplementedError
        With the name of what isn't served.
    """
    check_options(others)
    if sliding_window is not None and attn_type != AttentionType.DECODER:
        raise NotImplementedError(
            f"sliding_window is {sliding_window} in attention of type {attn_type}: paged_ops has "
            f"no window that ends behind a token"
        )
    if kv_cache_dtype in SCALED_PER_TOKEN and head_size % SCALE_BYTES:
        raise NotImplementedError(
            f"head_size is {head_size}, expected a multiple of {SCALE_BYTES}: with "
            f"kv_cache_dtype {kv_cache_dtype} a scale stands behind it"
        )


def check_options(others: Mapping[str, Any]) -> None:
    """Refuse options of a layer that are set and not served.

    Raises
    ------
    NotImplementedError
        With the option's name.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is {value!r}: paged_ops doesn't serve it here")


def check_group(kv_cache_spec: Any) -> None:
    """Refuse a group of layers whose memory is of another kind than those served.

    Raises
    ------
    NotImplementedError
        With the name of vLLM's class for that kind.
    """
    if type(kv_cache_spec) not in _SPECS:
        served = ", ".join(spec.__name__ for spec in _SPECS)
        raise NotImplementedError(
            f"the cache of {type(kv_cache_spec).__name__} isn't served by paged_ops, "
            f"expected one of {served}"
        )
