"""vLLM's page of a layer, seen as the caches and scales that the ops take: views, never a copy.

vLLM shows a layer's memory as ``[num_blocks, num_kv_heads, block_size, content]`` in any order of
strides but a dense content, and the content of a token and head is its key, then its value. With a
scale for each token and head, each is followed by its scale in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ELEMENTS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
"""What the bytes of a page are, by vLLM's name of the cache dtype; of others, the page's dtype."""

SCALED_PER_TOKEN = ("int8_per_token_head", "fp8_per_token_head")
"""The cache dtypes whose pages hold scales."""

SCALE_BYTES = torch.float32.itemsize


class Page(NamedTuple):
    """A layer's memory under the ops' names; the scales are None where the page has none."""

    key_cache: Tensor
    value_cache: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


def open_page(page: Tensor, head_size: int, cache_dtype: str = "auto") -> Page:
    """Show a layer's memory as what the ops take.

    Parameters
    ----------
    page : Tensor
        ``[num_blocks, num_kv_heads, block_size, content]``.
    head_size : int
        Elements of a key; a value has what is left.
    cache_dtype : str
        vLLM's name of the cache dtype.

    Returns
    -------
    Page
        ``[num_blocks, block_size, num_kv_heads, head_size]`` and so on, in the page's memory.

    Examples
    --------
    >>> import torch
    >>> from paged_ops.integrations.vllm.pages import open_page
    >>> page = torch.zeros(4, 2, 16, 2 * 64)
    >>> open_page(page, 64).value_cache.shape
    torch.Size([4, 16, 2, 64])
    """
    rows = page.transpose(1, 2)
    if cache_dtype not in SCALED_PER_TOKEN:
        elements = ELEMENTS.get(cache_dtype, page.dtype)
        return Page(rows[..., :head_size].view(elements), rows[..., head_size:].view(elements))
    elements, value_start = ELEMENTS[cache_dtype], head_size + SCALE_BYTES
    end = rows.shape[-1] - SCALE_BYTES
    return Page(
        rows[..., :head_size].view(elements),
        rows[..., value_start:end].view(elements),
        rows[..., head_size:value_start].view(torch.float32).squeeze(-1),
        rows[..., end:].view(torch.float32).squeeze(-1),
    )


def content_bytes(head_size: int, head_size_v: int) -> int:
    """Return the bytes of one token and head where the page holds scales."""
    return head_size + head_size_v + 2 * SCALE_BYTES


def open_latent_page(page: Tensor, lora_rank: int) -> Page:
    """Show a layer's latent memory as keys of one head, whose first elements are its values.

    Parameters
    ----------
    page : Tensor
        ``[num_blocks, block_size, head_size]``.
    lora_rank : int
        Elements of a value.

    Returns
    -------
    Page
        Two views that share the page.
    """
    key_cache = page.unsqueeze(2)
    return Page(key_cache, key_cache[..., :lora_rank])
