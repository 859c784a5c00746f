"""The benchmark of the prefix cache, on the demo's model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from paged_ops.bench import __main__ as program
from paged_ops.bench.prefix import BLOCK_SIZE, COMMON, OWN, conversation, shared_beginning
from paged_ops.demo.model import load_model


def test_what_is_found_is_all_full_blocks_and_nothing_without_the_cache() -> None:
    torch.set_num_threads(1)
    model = load_model()
    beginnings = shared_beginning(model, True, num_turns=3)
    assert beginnings.num_prompt_tokens == 3 * (COMMON + OWN)
    assert beginnings.num_found == 2 * (COMMON // BLOCK_SIZE * BLOCK_SIZE)
    turns = conversation(model, True, num_turns=2)
    assert turns.num_found == (COMMON + OWN) // BLOCK_SIZE * BLOCK_SIZE
    for workload, found in ((shared_beginning, beginnings), (conversation, turns)):
        without = workload(model, False, num_turns=len(found.answers))
        assert without.num_found == 0
        assert without.answers == found.answers
        assert len(without.first_token_seconds) == len(found.answers) - 1


def test_the_command_prints_and_writes_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ["--turns", "2", "--common", "32", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench", "prefix", *options])
    program.main()
    rows = json.loads(file.read_text())
    assert [row["prefix cache"] for row in rows] == ["off", "on"] * 2
    printed = capsys.readouterr().out
    for row in rows:
        assert str(row["time to first token, ms"]) in printed
