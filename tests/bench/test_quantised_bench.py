"""The benchmark of quantised caches on tiny workloads; no time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import paged_ops
from paged_ops.bench import quantised
from paged_ops.bench.__main__ import main
from paged_ops.bench.attention import measure
from paged_ops.bench.peers import Call, Latent, Peer, Quantised, Unsupported
from paged_ops.bench.workloads import WORKLOADS, Inputs


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
    assert {row["workload"] for row in rows} == {"D2", "MLA-16", "MLA-128"}
    for row in rows:
        if "not_timed" in row:
            continue
        is_float = row["cache"] == "bfloat16"
        assert (row["bytes"] == 1.0) == is_float
        assert is_float or 0.5 < row["bytes"] < 0.55
        assert row["seconds"] > 0.0
        assert row["speed"] > 0.0
        assert len(row["samples"]["cold"]) == len(row["samples"]["warm"]) == 1


def _peers(change: float) -> dict[str, Peer]:
    """Return peers that compute what ours does, times a number."""

    def attention(inputs: Inputs) -> Call:
        return lambda: measure.ours(inputs)() * change

    def latent(rows: Latent) -> Call:
        caches = rows.cache, rows.cache[..., : rows.head_dim_v]
        index = rows.block_tables, rows.seq_lens
        return lambda: paged_ops.attention(rows.query, *caches, *index) * change

    def refuse(inputs: Inputs) -> Call:
        raise Unsupported("no such length")

    cache = {"u8": Quantised(attention, 264), "u4": Quantised(refuse, 132)}
    here = Peer(None, lambda: None, attention, quantised=cache, latent=latent)
    return {"peer": here, "absent": replace(here, absence=lambda: "not installed")}


@pytest.mark.usefixtures("_small")
def test_caches_of_peers_stand_beside_ours_with_their_bytes_and_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantised, "PEERS", _peers(1.0))
    file = tmp_path / "rows.json"
    command = f"bench quantised --samples 1 --only D2 MLA-16 --json {file}"
    monkeypatch.setattr("sys.argv", command.split())
    main()
    rows = {(row["workload"], row["cache"]): row for row in json.loads(file.read_text())["results"]}
    assert rows["D2", "peer u8"]["bytes"] == 264 / 512
    assert rows["D2", "peer u4"]["not_timed"] == "no such length"
    assert rows["MLA-16", "peer bfloat16"]["bytes"] == 1.0
    assert {workload for workload, _ in rows} == {"D2", "MLA-16"}
    assert not any("absent" in cache for _, cache in rows)
    assert "peer u4 not timed: no such length" in capsys.readouterr().out


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("change", [1.3, float("nan")])
def test_a_peer_s_cache_that_gives_another_result_is_not_timed(
    change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "PEERS", _peers(change))
    made = quantised._decode(quantised.WORKLOADS[0], 32), quantised._latent(16, 32)
    for (timed, _, notes), name in zip(made, ("peer u8", "peer bfloat16"), strict=True):
        assert name not in timed
        assert notes[name].startswith("wrong: differs from ours by")


@pytest.mark.usefixtures("_small")
def test_all_cache_dtypes_hold_about_the_same() -> None:
    workload = quantised.WORKLOADS[0]
    timed, _, _ = quantised._decode(workload, 32)
    results = {cache: each.call() for cache, each in timed.items()}
    want = results.pop("bfloat16").float()
    for cache, output in results.items():
        limit = 0.02 if cache == "int8" else 0.15
        assert float((output.float() - want).norm() / want.norm()) < limit, cache
