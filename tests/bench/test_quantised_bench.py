"""The benchmark of quantised caches on tiny workloads; no time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paged_ops.bench import quantised
from paged_ops.bench.__main__ import main
from paged_ops.bench.workloads import WORKLOADS


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [
        replace(w, seq_lens=(70, 33), query_lens=(1, 1)) for w in WORKLOADS if w.name in ("D2",)
    ]
    monkeypatch.setattr(quantised, "WORKLOADS", short)
    monkeypatch.setattr(quantised, "LATENT_LENS", (50, 20))
    monkeypatch.setattr(quantised, "Flusher", lambda: lambda: None)


@pytest.mark.usefixtures("_small")
def test_every_row_has_its_bytes_and_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    arguments = ["bench", "quantised", "--samples", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    rows = json.loads(file.read_text())["results"]
    assert {row["workload"] for row in rows} == {"D2", "MLA 16", "MLA 128"}
    for row in rows:
        is_float = row["cache"] == "bfloat16"
        assert (row["bytes"] == 1.0) == is_float
        assert is_float or 0.5 < row["bytes"] < 0.55
        assert row["seconds"] > 0.0
        assert row["speed"] > 0.0


@pytest.mark.usefixtures("_small")
def test_all_cache_dtypes_hold_about_the_same() -> None:
    workload = quantised.WORKLOADS[0]
    timed, _ = quantised._decode(workload, 32)
    results = {cache: each.call() for cache, each in timed.items()}
    want = results.pop("bfloat16").float()
    for cache, output in results.items():
        limit = 0.02 if cache == "int8" else 0.15
        assert float((output.float() - want).norm() / want.norm()) < limit, cache
