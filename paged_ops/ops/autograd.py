"""The autograd rule of each op: there is no derivative, and asking for one is refused.

Outside inference mode every call of an op passes through its function here, because torch's stable
ABI can neither see from C++ that a tensor requires a gradient nor call the kernel below. So each
function asks only what may need a derivative, and goes on to the kernel, which also counts the
versions of what it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]


def _any_requires_grad(*args: Any, **kwargs: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(args, kwargs))


# torch's own is three times as fast, and nearly every call asks it.
_any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_requires_grad)


def _redispatch(overload: Any) -> Any:
    """Return what calls the kernel below: what `overload.redispatch` calls, if it is there."""
    return getattr(getattr(overload, "_handle", None), "redispatch_boxed", overload.redispatch)


def _no_gradient(op: str) -> NotImplementedError:
    return NotImplementedError(
        f"paged::{op} has no gradient: it is for inference. Call it under torch.no_grad() or "
        "torch.inference_mode(), or detach its inputs"
    )


def _refuse_tangents(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse forward-mode derivatives, which nothing later would miss; no_grad leaves them on."""
    if not torch._C._is_fwd_grad_enabled():
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(args, kwargs)):
        raise _no_gradient(op)


class _NoBackward(torch.autograd.Function):
    """Runs an op and connects its outputs to a backward that refuses."""

    @staticmethod
    def forward(ctx: Any, op: str, call: Callable[[], Any], *tensors: Tensor) -> Any:
        ctx.op = op
        with torch._C._AutoDispatchBelowAutograd():
            return call()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise _no_gradient(ctx.op)


def _reading(overload: Any, op: str) -> Callable[..., Any]:
    """Return the Autograd kernel of an op that writes nothing: only its backward refuses."""
    is_grad_enabled, below = torch.is_grad_enabled, torch._C._after_autograd_keyset
    redispatch = _redispatch(overload)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if getattr(forward_ad, "_current_level", 0) >= 0:  # otherwise no tensor has a tangent
            _refuse_tangents(op, args, kwargs)
        if not (is_grad_enabled() and _any_requires_grad(*args, **kwargs)):
            return redispatch(keyset & below, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise _no_gradient(op)  # its rules know no backward that refuses
        needing = [tensor for tensor in _tensors(args, kwargs) if tensor.requires_grad]
        return _NoBackward.apply(  # type: ignore[no-untyped-call]
            op, lambda: redispatch(keyset & below, *args, **kwargs), *needing
        )

    return kernel


def _writing(overload: Any, op: str, written: Callable[..., list[Tensor]]) -> Callable[..., Any]:
    """Return the Autograd kernel of an op that writes its arguments: a gradient is refused at once.

    Nothing would ever call a backward of the write itself, so a later one would silently miss it.
    """
    is_grad_enabled, below = torch.is_grad_enabled, torch._C._after_autograd_keyset
    redispatch, goes_on_in_python = _redispatch(overload), torch._C.DispatchKey.Python

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if getattr(forward_ad, "_current_level", 0) >= 0:  # otherwise no tensor has a tangent
            _refuse_tangents(op, args, kwargs)
        if is_grad_enabled() and _any_requires_grad(*args, **kwargs):
            raise _no_gradient(op)
        result = redispatch(keyset & below, *args, **kwargs)
        # The kernel counts what it writes, but not what wraps it, nor where a mode comes first.
        if keyset.has(goes_on_in_python):
            increment_version(written(args, kwargs))
        return result

    return kernel


def _scales(kwargs: dict[str, Tensor]) -> list[Tensor]:
    """Return the scales that are written: those per token."""
    return [kwargs[n] for n in ("key_scale", "value_scale") if n in kwargs and kwargs[n].dim() == 3]


def register(library: torch.library.Library) -> None:
    """Register the autograd rule of every op."""
    ops = torch.ops.paged

    def impl(name: str, kernel: Callable[..., Any]) -> None:
        library.impl(name, kernel, "Autograd", with_keyset=True)

    for name in ("attention", "attention_with_lse", "merge_states", "gather_kv"):
        impl(name, _reading(getattr(ops, name).default, name))
    # The dispatcher hands on keyword-only arguments by name, and no others.
    for name, overload, written in (
        ("attention.out", ops.attention.out, lambda args, kwargs: [kwargs["out"]]),
        ("write_kv", ops.write_kv.default, lambda args, kwargs: [*args[2:4], *_scales(kwargs)]),
        (
            "copy_blocks",
            ops.copy_blocks.default,
            lambda args, kwargs: [*args[:2], *_scales(kwargs)],
        ),
    ):
        impl(name, _writing(overload, name, written))
