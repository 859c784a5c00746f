"""The serving benchmark, on a model and a queue so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from paged_ops.bench.__main__ import main
from paged_ops.bench.serving import contiguous, paged
from paged_ops.bench.serving.outcome import Outcome
from paged_ops.bench.serving.workload import Job, Shape, make_jobs
from paged_ops.integrations.transformers import PagedCache, register


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_command_prints_and_writes_every_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--requests 12 --max-length 64 --rows 2 --layers 1 --heads 4 --batch 2 --context 9 "
        f"--steps 4 --threads 1 --output {tmp_path}"
    )
    monkeypatch.setattr("sys.argv", ["bench", "serving", *options.split()])
    main()
    text = capsys.readouterr().out
    results = json.loads((tmp_path / "serving.json").read_text())
    rows = {row["cache"]: row for row in results["serving"]}
    assert list(rows) == ["static", "dynamic", "paged"]
    most = {name: row["most requests at once"] for name, row in rows.items()}
    assert most["static"] == 2
    assert most["paged"] >= 2 * most["static"]
    assert [row["cache"] for row in results["equal batch"]] == [
        "dynamic",
        "static",
        "PagedCache",
        "engine",
    ]
    for row in (*rows.values(), *results["equal batch"]):
        assert str(row["tokens/s"]) in text
        assert row["tokens/s"] > 0
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_all_caches_decode_the_same_tokens() -> None:
    model = Shape(num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64).build(64)
    for parameter in model.parameters():
        parameter.data.mul_(4)
    prompts = [[5, 6, 7], [8, 9], [10] * 6]
    tokens = []
    with torch.inference_mode():
        for new_cache in (contiguous.dynamic_cache, contiguous.static_cache):
            steps = contiguous.decode(model, prompts, new_cache(model, 40), 20)
            tokens.append(torch.cat(list(steps), 1))
        register()
        model.set_attn_implementation("paged_ops")
        steps = contiguous.decode(model, prompts, PagedCache(model, 20, 4), 20)
        tokens.append(torch.cat(list(steps), 1))
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])
    assert len(tokens[0].unique()) > 5


def test_outcomes_count_every_token_and_every_wait() -> None:
    model = Shape(num_layers=1, num_heads=4, num_kv_heads=1, vocab_size=64).build(64)
    jobs = [Job([3, 4], 5), Job([5], 2), Job([6, 7, 8], 3)]
    with torch.inference_mode():
        batches = contiguous.serve(
            model, jobs, 14, 7, contiguous.dynamic_cache, contiguous.rows_at_full_length
        )
        blocks = paged.serve(model, jobs, 16, 2)
    for outcome, most in ((batches, 2), (blocks, 3)):
        assert outcome.tokens == 10
        assert len(outcome.first_token_seconds) == 3
        assert outcome.most_running == most
        assert 0 < outcome.median_first_token <= outcome.seconds
    # Rows 0 and 1 hold 2 and 1 tokens, then 3 and 2, then 4 alone, 5, 6; then row 2 alone.
    assert batches.live == [3, 5, 4, 5, 6, 3, 4, 5]
    assert batches.utilisation == pytest.approx(35 / 8 / 14)
    assert sum(blocks.live) == sum(batches.live)


def test_batches_fill_the_memory_and_no_more() -> None:
    jobs = [Job([1] * prompt, output) for prompt, output in [(3, 4), (5, 2), (1, 9), (2, 2)]]
    assert contiguous.rows_at_full_length(jobs, 40, 10) == 4
    assert contiguous.rows_at_full_length(jobs, 39, 10) == 3
    # The rows take as many columns as the longest prompt and the longest answer together.
    assert contiguous.rows_at_longest(jobs, 3 * 13, 10) == 3
    assert contiguous.rows_at_longest(jobs, 3 * 13 - 1, 10) == 2
    assert contiguous.rows_at_longest(jobs, 4 * 13, 10) == 4


def test_the_queue_is_the_same_every_time_and_keeps_to_the_length() -> None:
    jobs = make_jobs(200, 128, 50)
    assert jobs == make_jobs(200, 128, 50)
    assert max(len(job.prompt) + job.num_new for job in jobs) <= 128
    assert sum(len(job.prompt) for job in jobs) / 200 == pytest.approx(161.3 * 128 / 2048, rel=0.3)
    assert {token for job in jobs for token in job.prompt} == set(range(50))
    assert Outcome(10, tokens=6, seconds=2.0).tokens_per_second == 3.0
