"""``python -m paged_ops``: it says what is installed, and notices what is wrong."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import paged_ops
from paged_ops import __main__ as program
from paged_ops import functional
from paged_ops.self_test import CHECKS, self_test


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Change no cache."""


def _nan(result: Any) -> Any:
    """Return a result with a NaN at its end."""
    tensors = [tensor.clone() for tensor in result]
    for tensor in tensors:
        tensor.flatten()[-1:] = torch.nan
    return tuple(tensors)


BROKEN = {
    "attention": ("attention_with_lse", lambda real: lambda *a, **k: _nan(real(*a, **k))),
    "merge_states": ("merge_states", lambda real: lambda a, la, b, lb: (b, lb)),
    "write_kv": ("write_kv", lambda real: _nothing),
    "copy_blocks": ("copy_blocks", lambda real: _nothing),
    "gather_kv": ("gather_kv", lambda real: lambda *a, **k: real(*a, **k)[::-1]),
}


@pytest.mark.parametrize("op", CHECKS)
def test_a_wrong_op_is_named(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    name, wrong = BROKEN[op]
    monkeypatch.setattr(functional, name, wrong(getattr(functional, name)))
    failed = {finding.name for finding in self_test() if not finding.passed}
    dtypes = ["float32", "float16", "bfloat16"]
    if op != "merge_states":  # which knows nothing of caches
        dtypes += ["int8", "float8_e4m3fn", "float8_e5m2"]
    assert failed == {f"{op}, {dtype}" for dtype in dtypes}


def _output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    monkeypatch.setattr(sys, "argv", ["paged_ops"])
    with pytest.raises(SystemExit) as exit_:
        program.main()
    return exit_.value.code, capsys.readouterr().out


def test_the_program_prints_versions_backends_and_a_passed_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = _output(monkeypatch, capsys)
    info = paged_ops.backend_info()
    assert not code
    for text in (paged_ops.__version__, info.torch, info.cpu_isa, info.npu, "27 of 27 checks"):
        assert text in output


def test_the_program_fails_if_the_test_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(functional, "write_kv", _nothing)
    code, output = _output(monkeypatch, capsys)
    assert code
    assert "FAILED    write_kv, float16" in output
    assert "FAILED    write_kv, int8" in output
    assert "21 of 27 checks" in output
