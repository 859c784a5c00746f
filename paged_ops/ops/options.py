"""The options of attention, as one type for every function that hands them on."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import TypedDict


class AttentionOptions(TypedDict, total=False):
    """What attention may be given beside its tensors: see `paged_ops.attention`."""

    scale: float | None
    causal: bool
    sliding_window: int | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    tree_mask: Tensor | None


def refuse_unknown(
    function: str, options: AttentionOptions, unserved: tuple[str, ...] = ()
) -> None:
    """Refuse a name that is no option, or none of this function, as Python does in a signature."""
    for name in options:
        if name not in AttentionOptions.__annotations__ or name in unserved:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
