"""The dtypes that the ops take."""

from __future__ import annotations

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of queries, new rows and outputs, and of caches that aren't quantised."""

LARGEST_ELEMENT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Of each dtype of a quantised cache: the element that a row's largest value becomes."""

QUANTISED_DTYPES = tuple(LARGEST_ELEMENT)
"""Of caches whose elements stand for themselves times a scale."""


def as_bytes(content: torch.Tensor) -> torch.Tensor:
    """View elements of one byte as integers: torch indexes no float8 tensor with another one."""
    return content.view(torch.uint8) if content.dtype.itemsize == 1 else content
