"""The benchmark of what calls cost beside their work."""

from __future__ import annotations

import argparse

import pytest

from paged_ops.bench import overhead


def test_it_names_every_op_and_the_steps_of_the_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "BOUND", 1e9)
    overhead.run(argparse.Namespace(samples=1))
    printed = capsys.readouterr().out
    for name in (
        "an empty op",
        "attention",
        "write_kv",
        "merge_states",
        "copy_blocks",
        "gather_kv",
    ):
        assert f"\n{name} " in printed
    assert "the bound is" in printed
    assert "checking the block ids of 64 sequences" in printed
    assert printed.splitlines()[-1].split()[0] == "64"


def test_it_fails_where_an_op_costs_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "BOUND", 0.0)
    with pytest.raises(SystemExit):
        overhead.run(argparse.Namespace(samples=1))
