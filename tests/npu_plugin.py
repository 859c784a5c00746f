"""A pytest plugin with which the tests of the ops run on the NPU.

::

    python -m tests.npu_environment -m pytest -p tests.npu_plugin tests/ops/test_attention.py

Every call of an op on CPU tensors is then made on ``npu:0``: the tensors go there with their
strides and with whatever shares their memory, and results and written tensors come back. So one
suite serves both devices. ``PAGED_CHECK`` is set to 1, for the refusals of bad values that the
tests expect.

A test that calls an op with a shape that no NPU kernel serves is skipped, an example of a property
is rejected; the op has then refused it by name. `gather_kv`, which has no kernel, stays on the CPU.
Tensors of more than a GiB aren't sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import reject
from hypothesis.control import currently_in_test_context
from torch import Tensor

from tests import npu_environment as environment

WRITTEN = {
    "attention": (),
    "attention.out": ("out",),
    "attention_with_lse": (),
    "write_kv": ("key_cache", "value_cache"),
    "copy_blocks": ("key_cache", "value_cache"),
    "merge_states": (),
}
NOT_SERVED = re.compile(r"on the NPU|of a vector core|only the CPU")
MOST_BYTES = 2**30
# Tests of what the mixed kernel's matrix unit doesn't give, and why. PAGED_NPU_KERNEL=vector runs
# them.
NOT_ON_THE_CUBE = {
    "test_equal_values_come_out_as_they_are_though_all_weights_round_the_same_way": (
        "the cube takes weights of 16 bits, and they are divided by their sum before rounding"
    ),
}

_library: torch.library.Library | None = None
_launches_before = 0


class _Storages:
    """CPU storages of one call and their copies on the device."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}

    def on_npu(self, tensor: Tensor) -> Tensor:
        """Return a tensor that lies in the copy as the given one lies in its storage."""
        storage = tensor.untyped_storage()
        if storage.nbytes() > MOST_BYTES:
            pytest.skip("more bytes than are sent to the NPU")
        if storage._cdata not in self.copies:
            self.copies[storage._cdata] = torch.tensor(storage, dtype=torch.uint8).npu()
        copy = self.copies[storage._cdata].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device="npu")
        return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    def bring_back(self, tensor: Tensor) -> None:
        """Copy the whole storage of a tensor back from the device."""
        storage = tensor.untyped_storage()
        here = torch.empty(0, dtype=torch.uint8).set_(storage)
        here.copy_(self.copies[storage._cdata].cpu())


def _refused(error: RuntimeError) -> None:
    """Skip what no kernel serves; anything else is the test's."""
    if NOT_SERVED.search(str(error)) is None:
        raise error
    if currently_in_test_context():
        reject()
    pytest.skip(str(error))


def _call_on_npu(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.paged, base), overload or "default")
    schema = op._schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        storages = _Storages()
        sent = {
            key: storages.on_npu(value)
            if isinstance(value, Tensor) and value.device.type == "cpu"
            else value
            for key, value in given.items()
        }
        positional = [sent.pop(a.name) for a in schema if not a.kwarg_only and a.name in sent]
        try:
            result = op(*positional, **sent)
        except RuntimeError as error:
            return _refused(error)
        for written in WRITTEN[name]:
            storages.bring_back(given[written])
        if overload == "out":
            return given["out"]
        if isinstance(result, tuple):
            return tuple(tensor.cpu() for tensor in result)
        return result if result is None else result.cpu()

    return call


def pytest_configure(config: pytest.Config) -> None:
    """Put the NPU in the CPU's place."""
    global _library, _launches_before
    reason = environment.why_not()
    if reason is not None:
        raise pytest.UsageError(reason)
    environment.load()
    import paged_ops  # noqa: F401  (defines the ops)
    from tests.support import strategies

    strategies.drawn_quantisations = ()
    os.environ["PAGED_CHECK"] = "1"
    # torch_npu warns about itself, and torch about the kernels that are replaced here.
    config.addinivalue_line("filterwarnings", "ignore::UserWarning")
    _library = torch.library.Library("paged", "IMPL")
    for name in WRITTEN:
        _library.impl(name, _call_on_npu(name), "CPU", allow_override=True)
    if environment.is_simulated():
        _launches_before = environment.report()["launches"]["count"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of 16-bit dtypes that only hold on vector cores."""
    if os.environ.get("PAGED_NPU_KERNEL") == "vector":
        return
    for item in items:
        reason = NOT_ON_THE_CUBE.get(getattr(item, "originalname", ""))
        if reason is not None and "float32" not in item.name:
            item.add_marker(pytest.mark.skip(reason))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many kernels ran, so that nobody mistakes a run on the CPU for one on the NPU."""
    if environment.is_simulated():
        launched = environment.report()["launches"]["count"] - _launches_before
        terminalreporter.write_line(f"{launched} kernels were launched on the simulated NPU")
