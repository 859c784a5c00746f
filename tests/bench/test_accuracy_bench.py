"""What quantised caches cost trained models in likelihood, and the benchmark that says so."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from paged_ops import BlockManager, PagedKVCache, build_batch
from paged_ops.bench import __main__ as program
from paged_ops.bench.accuracy import FORMS, Form, Subject, demo_subject, loss, stories_subjects
from paged_ops.demo.model import read_config
from paged_ops.engine import PagedLayers
from tests.test_stories260k import data_folder

PLAIN = Form(torch.float32)
INT8 = Form(torch.int8, "token")


@cache
def demo() -> Subject:
    return demo_subject()


def test_the_demos_loss_in_float32_is_the_recorded_one() -> None:
    recorded = read_config()["results"]["snippet"]["nats_per_token"]
    assert loss(demo(), PLAIN) == pytest.approx(recorded, abs=2e-3)


def test_int8_per_token_costs_the_demo_at_most_half_a_percent() -> None:
    assert loss(demo(), INT8) == pytest.approx(loss(demo(), PLAIN), rel=0.005)


@pytest.mark.parametrize("form", FORMS[1:], ids=lambda form: form.name)
def test_every_form_of_cache_shows_in_the_loss_and_costs_the_demo_little(form: Form) -> None:
    got, want = loss(demo(), form), loss(demo(), PLAIN)
    assert got != want
    assert got == pytest.approx(want, rel=0.01)


def test_int8_per_token_costs_stories260k_at_most_a_hundredth() -> None:
    greedy, written = stories_subjects(data_folder())
    assert loss(greedy, PLAIN) == pytest.approx(0.4734, abs=1e-4)
    for subject in (greedy, written):
        assert 0 < abs(loss(subject, INT8) - loss(subject, PLAIN)) <= 0.01


@torch.inference_mode()
def test_one_pass_gives_what_decoding_token_by_token_gives() -> None:
    """So the loss is that of a model that reads all of its past back from the cache."""
    model, tokens = demo().model, demo().texts[0][:41]
    config = model.config
    coarse = Form(torch.float8_e5m2, "token")
    pool = PagedKVCache(
        config.num_layers,
        3,
        16,
        config.num_kv_heads,
        config.head_dim,
        cache_dtype=coarse.cache_dtype,
    )
    manager, nats = BlockManager(3, 16), 0.0
    manager.allocate("a", 0)
    for position in range(40):
        manager.append("a", 1)
        layers = PagedLayers(pool, build_batch(manager, ["a"]))
        logits = model(tokens[position : position + 1], torch.tensor([position]), layers)
        nats += float(cross_entropy(logits, tokens[position + 1 : position + 2]))
    short = Subject("short", model, (tokens,))
    # Matrices of one row round otherwise, which moves an element by a step here and there.
    assert loss(short, coarse) == pytest.approx(nats / 40, rel=1e-3)
    assert loss(short, PLAIN) != pytest.approx(nats / 40, rel=2e-3)


def test_the_program_prints_a_row_for_each_form_and_writes_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("PAGED_TEST_DATA", raising=False)
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["bench", "accuracy", "--json", str(file)])
    program.main()
    printed = capsys.readouterr().out
    assert "stories260K is left out" in printed
    figures = json.loads(file.read_text())
    assert [row["cache"] for row in figures] == [form.name for form in FORMS]
    for row in figures:
        assert f"{row['cache']:24} {row['nats_per_token']:12.4f}" in printed
