"""The ops have no gradient, and say so instead of returning a wrong one or none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import paged_ops
from tests.support.checks import same_bits
from tests.support.sequences import PagedCase, Placement, make_sequences, normal, place

READING = ("attention", "attention_with_lse", "gather_kv", "merge_states")
WRITING = ("attention.out", "write_kv", "copy_blocks")
KV = ("key", "value")


def arguments_of(op: str) -> dict[str, Any]:
    case = place(make_sequences([5, 9], [2, 3]), Placement(block_size=4))
    if op == "merge_states":
        names = ("out_a", "lse_a", "out_b", "lse_b")
        return dict(zip(names, (*case.run(), *case.run()), strict=True))
    caches = {"key_cache": case.key_cache, "value_cache": case.value_cache}
    if op == "write_kv":
        rows = normal((2, 1, 16), torch.float32, 1)
        return {**caches, "key": rows, "value": rows.clone(), "slot_mapping": torch.tensor([0, 5])}
    if op == "copy_blocks":
        return {**caches, "block_mapping": torch.tensor([[0, 1]])}
    tables = {"block_tables": case.block_tables, "seq_lens": case.seq_lens}
    if op == "gather_kv":
        return {**caches, **tables}
    arguments = {**caches, **tables, "query": case.query, "query_start_loc": case.query_start_loc}
    if op == "attention.out":
        arguments["out"] = torch.empty(5, 2, 16)
    return arguments


def function_of(op: str) -> Callable[..., Any]:
    name, _, overload = op.partition(".")
    packet = getattr(torch.ops.paged, name)
    return getattr(packet, overload) if overload else packet


def float_arguments(op: str) -> list[str]:
    return [
        name
        for name, value in arguments_of(op).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op in READING for name in float_arguments(op)]
)
def test_forward_runs_and_backward_says_that_there_is_none(op: str, argument: str) -> None:
    arguments = arguments_of(op)
    want = first(function_of(op)(**arguments))
    arguments[argument] = arguments[argument].clone().requires_grad_()
    output = first(function_of(op)(**arguments))
    assert same_bits(output.detach(), want)
    assert output.requires_grad
    with pytest.raises(NotImplementedError, match=f"paged::{op} "):
        output.sum().backward()
    assert arguments[argument].grad is None


def test_backward_through_the_lse_alone_is_refused_too() -> None:
    arguments = arguments_of("attention_with_lse")
    arguments["query"].requires_grad_()
    _, lse = torch.ops.paged.attention_with_lse(**arguments)
    with pytest.raises(NotImplementedError, match="paged::attention_with_lse "):
        lse.sum().backward()


@pytest.mark.parametrize(("name", "size"), [("alibi_slopes", 2), ("sinks", 2)])
def test_learned_sinks_and_slopes_get_no_silent_zero_gradient(name: str, size: int) -> None:
    arguments = arguments_of("attention")
    arguments[name] = torch.zeros(size, requires_grad=True)
    output = torch.ops.paged.attention(**arguments)
    with pytest.raises(NotImplementedError, match="paged::attention "):
        output.sum().backward()


@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op in WRITING for name in float_arguments(op)]
)
def test_a_write_that_would_need_a_gradient_is_refused_at_the_call(op: str, argument: str) -> None:
    """Nothing would ever call the backward of a write: waiting for it loses the gradient."""
    arguments = arguments_of(op)
    before = {name: value.clone() for name, value in arguments.items()}
    arguments[argument] = arguments[argument].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"paged::{op.partition('.')[0]}"):
        function_of(op)(**arguments)
    for name, value in arguments.items():
        if name != "out":
            assert same_bits(value.detach(), before[name])


@pytest.mark.parametrize("op", [*READING, *WRITING])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients_inputs_that_require_one_are_fine(op: str, mode: Any) -> None:
    arguments = arguments_of(op)
    want = arguments_of(op)
    for name in float_arguments(op):
        arguments[name].requires_grad_()
    with mode():
        result = function_of(op)(**arguments)
    expected = function_of(op)(**want)
    if op in READING:
        assert not first(result).requires_grad
        assert same_bits(first(result), first(expected))
    else:
        written = "out" if op == "attention.out" else "key_cache"
        assert same_bits(arguments[written].detach(), want[written])


@pytest.mark.parametrize("op", [*READING, *WRITING])
def test_tensors_made_in_inference_mode_are_taken(op: str) -> None:
    with torch.inference_mode():
        arguments = arguments_of(op)
        function_of(op)(**arguments)


def test_inputs_without_gradients_give_outputs_without_gradients() -> None:
    for op in READING:
        assert not first(function_of(op)(**arguments_of(op))).requires_grad


@pytest.mark.parametrize("op", WRITING)
def test_autograd_sees_that_a_write_changed_its_tensors(op: str) -> None:
    """A tensor saved for another backward, then overwritten, must not be used silently."""
    arguments = arguments_of(op)
    written = ("out",) if op == "attention.out" else ("key_cache", "value_cache")
    versions = {name: arguments[name]._version for name in written}
    function_of(op)(**arguments)
    for name in written:
        assert arguments[name]._version > versions[name]


@pytest.mark.parametrize("op", ["write_kv", "copy_blocks"])
def test_autograd_sees_that_scales_per_token_were_written_and_no_others(op: str) -> None:
    arguments = arguments_of(op)
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].to(torch.int8)
    per_token = {f"{name}_scale": torch.ones(arguments[f"{name}_cache"].shape[:3]) for name in KV}
    one = {f"{name}_scale": torch.ones(()) for name in KV}
    function_of(op)(**arguments, **per_token)
    function_of(op)(**arguments, **one)
    assert all(scale._version > 0 for scale in per_token.values())
    assert all(scale._version == 0 for scale in one.values())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op in (*READING, *WRITING) for name in float_arguments(op)]
)
def test_a_forward_derivative_is_refused_at_the_call(op: str, argument: str) -> None:
    """It travels with the outputs: an op that knows nothing of it would drop it silently."""
    arguments = arguments_of(op)
    with forward_ad.dual_level():
        function_of(op)(**arguments_of(op))
        value = arguments[argument]
        arguments[argument] = forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(NotImplementedError, match=f"paged::{op.partition('.')[0]}"):
            function_of(op)(**arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.jacrev, torch.func.grad])
def test_function_transforms_are_refused(transform: Any) -> None:
    arguments = arguments_of("attention")
    query = arguments.pop("query")

    def summed(query: Tensor) -> Tensor:
        return torch.ops.paged.attention(query, **arguments).sum()

    with pytest.raises(NotImplementedError, match=r"paged::attention has no gradient"):
        transform(summed)(query)


# Every form of derivative that a tensor may carry, in every mode: torch's own arithmetic on the
# same tensors says whether there is one.

MODES: dict[str, Callable[[], Any]] = {
    "gradients on": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "no forward mode": lambda: forward_ad._set_fwd_grad_enabled(False),
}
WRITTEN = {"attention.out": ("out",), "write_kv": ("key_cache", "value_cache")}
WRITTEN["copy_blocks"] = WRITTEN["write_kv"]
FORMS = ("plain", "requires grad", "of a gradient", "view of one", "tangent", "view of a tangent")


def carrying(form: str, tensor: Tensor) -> Tensor:
    if form == "requires grad":
        return tensor.clone().requires_grad_()
    if form == "of a gradient":
        return tensor.clone().requires_grad_() * 1.0
    if form == "view of one":
        with torch.no_grad():
            return (tensor.clone().requires_grad_() * 1.0)[:]
    if form == "tangent":
        return forward_ad.make_dual(tensor, torch.ones_like(tensor))
    if form == "view of a tangent":
        return forward_ad.make_dual(tensor, torch.ones_like(tensor))[:]
    return tensor


def carried(tensors: list[Tensor]) -> tuple[bool, bool]:
    """Say whether torch's arithmetic on these tensors has a gradient, and whether a tangent."""
    total = torch.stack([tensor.sum() for tensor in tensors]).sum()
    return total.requires_grad, forward_ad.unpack_dual(total).tangent is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@given(st.sampled_from([*READING, *WRITING]), st.sampled_from(list(MODES)), st.data())
def test_no_form_of_derivative_is_dropped_in_any_mode(
    op: str, mode: str, data: st.DataObject
) -> None:
    arguments, want = arguments_of(op), arguments_of(op)
    names = float_arguments(op)
    with forward_ad.dual_level():
        for name in names:
            form = data.draw(st.sampled_from(FORMS), label=name)
            arguments[name] = carrying(form, arguments[name])
        with MODES[mode]():
            needs_gradient, has_tangent = carried([arguments[name] for name in names])
            expected = function_of(op)(**want)
            if has_tangent or (needs_gradient and op in WRITING):
                with pytest.raises(NotImplementedError, match=f"paged::{op.partition('.')[0]}"):
                    function_of(op)(**arguments)
                return
            result = function_of(op)(**arguments)
        if op in WRITING:
            for name in WRITTEN[op]:
                assert same_bits(arguments[name].detach(), want[name])
            return
        assert same_bits(first(result).detach(), first(expected))
        assert first(result).requires_grad == needs_gradient
        if needs_gradient:
            with pytest.raises(NotImplementedError, match=f"paged::{op} "):
                first(result).sum().backward()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "jvp of jvp": lambda f, x: torch.func.jvp(
        lambda y: torch.func.jvp(f, (y,), (x,))[1], (x,), (x,)
    ),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x[None]),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(y).sum())(x[None]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
@pytest.mark.parametrize(
    ("op", "argument"), [(op, name) for op in (*READING, *WRITING) for name in float_arguments(op)]
)
def test_every_transform_of_every_argument_is_refused(
    op: str, argument: str, transform: Callable[..., Any]
) -> None:
    arguments = arguments_of(op)

    def called(value: Tensor) -> Tensor:
        result = function_of(op)(**{**arguments, argument: value})
        return value.sum() if result is None else first(result)

    says = rf"paged::{op.partition('.')[0]}(\.out)? has no gradient|Batching rule not implemented"
    with pytest.raises(RuntimeError, match=says):
        transform(called, arguments[argument])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_of_an_op_that_reads_is_a_call_for_each_sample() -> None:
    arguments = arguments_of("attention")
    queries = torch.stack([arguments.pop("query"), torch.randn(5, 2, 16)]).requires_grad_()

    def call(query: Tensor) -> Tensor:
        return torch.ops.paged.attention(query, **arguments)

    got = torch.func.vmap(call)(queries)
    assert same_bits(got.detach(), torch.stack([call(query).detach() for query in queries]))
    with pytest.raises(NotImplementedError, match="paged::attention "):
        got.sum().backward()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("op", WRITING)
def test_a_write_in_any_mode_is_seen_by_the_backward_that_saved_its_tensor(
    op: str, mode: str
) -> None:
    arguments = arguments_of(op)
    for name in WRITTEN[op]:
        whole = torch.stack([arguments[name], arguments[name]])
        factor = torch.ones_like(whole, requires_grad=True)
        product = (whole * factor).sum()
        with MODES[mode]():
            function_of(op)(**{**arguments, name: whole[1]})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("op", WRITING)
def test_a_write_counts_on_the_tensor_that_wraps_what_is_written(op: str) -> None:
    arguments = arguments_of(op)
    for name in WRITTEN[op]:
        arguments[name] = TwoTensor(arguments[name], arguments[name].clone())
    versions = {name: arguments[name]._version for name in WRITTEN[op]}
    function_of(op)(**arguments)
    for name in WRITTEN[op]:
        assert arguments[name]._version > versions[name]


@pytest.mark.parametrize("op", WRITING)
def test_a_write_counts_where_a_mode_takes_the_call_first(op: str) -> None:
    arguments = arguments_of(op)
    versions = {name: arguments[name]._version for name in WRITTEN[op]}
    with FlopCounterMode(display=False):
        function_of(op)(**arguments)
    for name in WRITTEN[op]:
        assert arguments[name]._version > versions[name]


@pytest.mark.parametrize("op", [*READING, *WRITING])
def test_a_call_in_inference_mode_runs_no_python(op: str) -> None:
    arguments, function, called = arguments_of(op), function_of(op), []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "paged_ops" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    with torch.inference_mode():
        sys.setprofile(profile)
        try:
            function(**arguments)
        finally:
            sys.setprofile(None)
    assert called == []


def test_tensors_made_in_inference_mode_may_be_written_outside_of_it() -> None:
    """They count no versions, and no backward may save them."""
    for op in WRITING:
        with torch.inference_mode():
            arguments = arguments_of(op)
        want = arguments_of(op)
        function_of(op)(**arguments)
        function_of(op)(**want)
        for name in WRITTEN[op]:
            assert same_bits(arguments[name], want[name])


def test_the_public_functions_behave_like_the_ops() -> None:
    case: PagedCase = place(make_sequences([5], [2]), Placement())
    query = case.query.requires_grad_()
    output = paged_ops.attention(query, *case.tensors[1:])
    with pytest.raises(NotImplementedError, match="paged::attention "):
        output.sum().backward()
