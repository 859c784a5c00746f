"""The attention function and the mask function that transformers calls under our name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "paged_ops"
"""What to give ``model.set_attn_implementation``."""

KEYWORD = "paged"
"""Under this name the keyword arguments of a model's forward carry who attends."""


class Attends(Protocol):
    """Whatever holds the keys and values: writes the new ones, then attends to all."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attend in one layer.

        Parameters
        ----------
        layer : int
            The layer's index.
        query, key, value : Tensor
            ``[batch, num_tokens, num_heads, head_dim]``, key and value with num_kv_heads.
        mask : Tensor, optional
            ``[batch, seen + num_tokens]`` bool: which tokens are no padding. None: all.
        options : dict
            scale, sliding_window, softcap and sinks, as `paged_ops.attention`.

        Returns
        -------
        Tensor
            ``[batch, num_tokens, num_heads, head_dim of value]``.
        """
        ...


def register() -> None:
    """Make the attention known to transformers, as ``"paged_ops"``.

    Then ``model.set_attn_implementation("paged_ops")``, or ``attn_implementation="paged_ops"``
    where the model is loaded, and give each call a `PagedCache`. Calling this twice does no harm.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from paged_ops.integrations.transformers import PagedCache, register
    >>> register()
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("paged_ops")
    >>> cache = PagedCache(model, num_blocks=8)
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> model.generate(prompt, cache=cache, max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    """
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks its attention functions to.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    query, key, value : Tensor
        ``[batch, num_heads, num_tokens, head_dim]``: the new tokens.
    attention_mask : Tensor, optional
        What `padding_mask` returned.
    **kwargs
        transformers' options, and under ``"paged"`` who attends.

    Returns
    -------
    output : Tensor
        ``[batch, num_tokens, num_heads, head_dim]``.
    weights : None
        Attention weights are never formed.

    Raises
    ------
    ValueError
        No paged cache takes part in the call, or an option can't be honoured.
    """
    holder: Attends | None = kwargs.get(KEYWORD)
    if holder is None:
        raise ValueError(
            f'attn_implementation is "{NAME}", which needs a PagedCache: pass cache=PagedCache(...)'
        )
    options = attention_options(module, query, kwargs)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    layer = cast("int", module.layer_idx)
    return holder.attend(layer, query, key, value, attention_mask, options), None


def attention_options(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Translate transformers' options into those of `paged_ops.attention`, or refuse them."""
    refuse_options(module, kwargs)
    sinks = kwargs.get("s_aux")
    return {
        "scale": kwargs.get("scaling"),
        "sliding_window": kwargs.get("sliding_window"),
        "softcap": kwargs.get("softcap") or 0.0,
        "sinks": None if sinks is None else sinks.to(torch.float32),
    }


def refuse_options(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what attention over the cache has no place for."""
    if kwargs.get("dropout"):
        raise ValueError(f"dropout is {kwargs['dropout']}, expected 0: call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions is True, but attention weights are never formed")
    if kwargs.get("position_bias") is not None:
        raise ValueError("position_bias is a tensor, expected None")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("is_causal is False, expected True: the cache serves causal models")


def padding_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Return the padding mask as it came: what is causal or slides is the attention's own.

    Parameters
    ----------
    mask_function : callable
        transformers' rule of who sees whom.
    attention_mask : Tensor, optional
        ``[batch, seen + num_tokens]`` bool.
    use_vmap : bool
        Whether the model lays a rule of its own over the causal one.

    Raises
    ------
    ValueError
        There is such a rule.
    """
    if use_vmap or mask_function.__qualname__.startswith("or_masks"):
        raise ValueError(
            "the model lays a mask of its own over the causal one (as for images); only causal "
            "and sliding-window masks are served"
        )
    return attention_mask
