"""The attention function and the mask function that transformers calls under our name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function

from paged_ops.integrations.transformers.notes import NOTE, Note

NAME = "paged_ops"
"""What to give ``model.set_attn_implementation``."""

WINDOW = "paged_window"
"""Under this name a mask carries the sliding window that it stands for; None: it is causal."""

_NOT_SERVED = -1  # as a window: the rule is another one


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
        transformers' options.

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
    own = getattr(key, NOTE, None)
    note: Note | None = own or getattr(value, NOTE, None) or kwargs.get(NOTE)
    if note is None:
        return attend_without_cache(module, query, key, value, attention_mask, **kwargs)
    if note.written and not (own is note and getattr(value, NOTE, None) is note):
        raise ValueError(
            f"layer {note.layer} attends twice for one update of its cache, and the second time to "
            f"keys or values that the cache wasn't given"
        )
    options = attention_options(module, query, kwargs)
    options["sliding_window"] = masked_window(attention_mask, options["sliding_window"])
    note.module = module
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = attention_mask
    if mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    output = note.holder.attend(note, query, key, value, mask, options)
    note.written = True
    return output, None


def attend_without_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in an encoder, such as a vision tower, which has no cache; refuse a decoder."""
    is_causal = kwargs.pop("is_causal", None)
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        raise ValueError(
            f'attn_implementation is "{NAME}", which needs a PagedCache: pass '
            f"cache=PagedCache(...). {type(module).__name__} was called without one; caches that "
            f"generate() makes itself, for guidance_scale or assistant_early_exit, are others"
        )
    if hasattr(attention_mask, WINDOW):
        raise ValueError(
            f"{type(module).__name__} attends without a cache and with a mask, and that is served "
            f"only where all see all"
        )
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None]
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, is_causal=False, **kwargs
    )


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


def masked_window(mask: Tensor | None, sliding_window: int | None) -> int | None:
    """Return the window that a layer's mask stands for, which some layers don't name otherwise."""
    window: int | None = getattr(mask, WINDOW, sliding_window)
    if window == _NOT_SERVED:
        raise ValueError(
            "a layer's mask is neither causal nor a sliding window, and only those are served"
        )
    if sliding_window not in (None, window):
        raise ValueError(
            f"a layer attends with sliding_window {sliding_window}, but its mask is made for "
            f"{window}"
        )
    return window


_WITHOUT_A_PLACE = ("position_bias", "indices", "block_indices", "sinks")


def refuse_options(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what attention over the cache has no place for."""
    if kwargs.get("dropout"):
        raise ValueError(f"dropout is {kwargs['dropout']}, expected 0: call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions is True, but attention weights are never formed")
    for name in _WITHOUT_A_PLACE:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is a tensor, expected None")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("is_causal is False, expected True: the cache serves causal models")


def padding_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """Return the padding alone: what is causal or slides is the attention's own.

    Parameters
    ----------
    mask_function : callable
        transformers' rule of who sees whom.
    attention_mask : Tensor, optional
        ``[batch, seen + num_tokens]`` bool.
    use_vmap : bool
        Whether the model lays a rule of its own over the causal one.
    local_size : int, optional
        How far the rule reaches.
    device : torch.device, optional
        Where the rule is computed.

    Returns
    -------
    Tensor, optional
        The mask as ``[batch, 1, 1, seen + num_tokens]``, for models that take some queries' part
        of it; it carries the window of the rule. Encoders' as it came.

    Raises
    ------
    ValueError
        The model lays a rule of its own over the causal one, or it is an encoder's window.
    """
    if use_vmap or mask_function.__qualname__.startswith("or_masks"):
        raise ValueError(
            "the model lays a mask of its own over the causal one (as for images); only causal "
            "and sliding-window masks are served"
        )
    if mask_function is bidirectional_mask_function:
        return attention_mask
    if attention_mask is None:
        if _sees(mask_function, 0, [1], device) == [True]:
            raise ValueError("an encoder's sliding window is not served")
        return None
    mask = attention_mask[:, None, None]
    is_served = _is_causal_or_slides(mask_function, local_size, device)
    setattr(mask, WINDOW, local_size if is_served else _NOT_SERVED)
    return mask


def _is_causal_or_slides(
    mask_function: Callable[..., Any], local_size: int | None, device: torch.device | None
) -> bool:
    """Say whether a query sees just the last `local_size` keys; all up to its own, if None.

    Looked at is one query at the end of a chunk, if there were chunks: it would see its own
    chunk, which is a window, and the next query, which would see itself alone.
    """
    size = 4 if local_size is None else local_size
    far = local_size is None
    expected = [far, far, True, True, False]
    return all(
        _sees(mask_function, at, [0, at - size, at - size + 1, at, at + 1], device) == expected
        for at in (2 * size - 1, 2 * size)
    )


def _sees(
    mask_function: Callable[..., Any], query: int, keys: list[int], device: torch.device | None
) -> list[bool]:
    """Ask a rule which keys the query of the first row and head sees."""
    first = torch.zeros((), dtype=torch.int64, device=device)
    at = torch.tensor(keys, device=device)
    seen: list[bool] = mask_function(first, first, first + query, at).expand(len(keys)).tolist()
    return seen
