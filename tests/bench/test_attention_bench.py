"""The attention benchmark on workloads so small that it takes seconds; no time is asserted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from paged_ops.bench import workloads
from paged_ops.bench.__main__ import main
from paged_ops.bench.attention import command, limits, measure, report
from paged_ops.bench.attention.result import Result
from paged_ops.bench.peers import PEERS, Call, Peer, Unsupported
from paged_ops.bench.timing import Samples, interleaved_medians, interleaved_samples
from paged_ops.bench.workloads import Inputs, Workload, make_inputs

TINY = Workload("tiny", "three sequences", (40, 7, 33), (1, 7, 5), 4, 2, torch.float32)
DECODE = Workload("decode", "one token each", (40, 7), (1, 1), 4, 2, torch.bfloat16)
SHARED = Workload("shared", "a prefix", (40, 57), (1, 1), 4, 2, torch.bfloat16, num_shared=32)
PRESENT, ABSENT = measure.present(PEERS)


def _attend(inputs: Inputs) -> Call:
    return measure.ours(inputs)


def clock(samples: int) -> measure.Clock:
    return partial(interleaved_samples, samples=samples, flush=lambda: None)


# ------------------------------------------------------------------ inputs


def test_gathered_rows_are_where_the_slots_say() -> None:
    inputs = make_inputs(TINY, 16)
    key, value = inputs.gathered()
    slots = inputs.slots()
    assert len(slots) == 80
    assert torch.equal(inputs.key_cache.flatten(0, 1)[slots], key)
    assert torch.equal(inputs.value_cache.flatten(0, 1)[slots], value)


def test_a_shared_prefix_is_in_the_same_blocks_and_its_bytes_count_once() -> None:
    inputs = make_inputs(SHARED, 16)
    tables, (key, _) = inputs.block_tables, inputs.gathered()
    assert (tables[0, :2] == tables[:, :2]).all()
    assert sorted(tables[tables >= 0].unique().tolist()) == list(range(len(inputs.key_cache)))
    assert len(inputs.key_cache) == 2 + 1 + 2
    assert torch.equal(key[:32], key[40:72])
    assert not torch.equal(key[32:40], key[72:80])
    assert SHARED.kv_bytes == 2 * (32 + 8 + 25) * 2 * workloads.HEAD_DIM * 2


def test_new_tokens_are_the_last_of_each_sequence() -> None:
    inputs = make_inputs(TINY, 16)
    rows = [39, *range(40, 47), *range(75, 80)]
    assert torch.equal(inputs.new_tokens()[0], inputs.gathered()[0][rows])
    assert torch.equal(inputs.new_tokens()[1], inputs.gathered()[1][rows])


# ------------------------------------------------------------------ peers


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("workload", [TINY, DECODE, SHARED], ids=lambda workload: workload.name)
def test_a_peer_computes_what_ours_does_or_says_why_not(name: str, workload: Workload) -> None:
    if name in ABSENT:
        pytest.skip(ABSENT[name])
    if name == "sgl" and workload.dtype == torch.float32:
        with pytest.raises(Unsupported, match="no float32"):
            PRESENT[name].attention(make_inputs(workload, 32))
        return
    calls, notes = measure.checked(make_inputs(workload, 32), {name: PRESENT[name]})
    assert list(calls) == [name]
    assert notes == {}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compilation_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    if "flex" in ABSENT:
        pytest.skip(ABSENT["flex"])
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    no_caches = torch.compiler.config.patch(force_disable_caches=True)
    with no_caches, pytest.raises(Unsupported, match=r"^not compiled: .*not supported for CPU"):
        PRESENT["flex"].attention(make_inputs(DECODE, 32))


@pytest.mark.parametrize(
    ("machine", "has_amx", "dtype", "block_size", "kernel"),
    [
        ("x86_64", True, torch.bfloat16, 32, "amx"),
        ("x86_64", True, torch.bfloat16, 16, "vec16"),
        ("x86_64", True, torch.float16, 64, "vec"),
        ("x86_64", False, torch.bfloat16, 32, "vec"),
        ("aarch64", False, torch.bfloat16, 16, "neon"),
    ],
)
def test_vllm_takes_the_kernels_that_its_engine_would_choose(
    machine: str,
    has_amx: bool,
    dtype: torch.dtype,
    block_size: int,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    choose = PEERS["vllm"].kernel
    assert choose is not None
    assert choose(make_inputs(replace(DECODE, dtype=dtype), block_size)) == kernel
    with pytest.raises(Unsupported, match="block size 8 is no multiple of 16"):
        choose(make_inputs(DECODE, 8))


@pytest.mark.parametrize("name", PEERS)
def test_an_absence_is_one_line(name: str) -> None:
    reason = PEERS[name].absence()
    assert reason is None or (reason and "\n" not in reason)


def test_torch_is_always_there() -> None:
    assert {"gather+sdpa", "sdpa"} <= set(PRESENT)


def test_a_wrong_peer_is_reported_and_not_timed() -> None:
    calls_after_the_check = []

    def off_by_little(inputs: Inputs) -> Call:
        def call() -> torch.Tensor:
            calls_after_the_check.append(1)
            output = measure._rows(_attend(inputs)()).clone()
            output[3, 2] *= 1.001
            return output

        return call

    def nan(inputs: Inputs) -> Call:
        return lambda: inputs.query * float("nan")

    peers = {
        "good": Peer(None, lambda: None, _attend),
        "wrong": Peer(None, lambda: None, off_by_little),
        "nan": Peer(None, lambda: None, nan),
    }
    result = measure.measure_attention(TINY, peers, 16, clock(2))
    assert set(result.samples) == {"paged", "good"}
    assert result.notes["wrong"].startswith("wrong: differs from ours by 0.001")
    assert result.notes["nan"].startswith("wrong: differs from ours by nan")
    assert len(calls_after_the_check) == 1


def test_a_peer_that_cannot_run_a_workload_says_why() -> None:
    def refuse(inputs: Inputs) -> Call:
        raise Unsupported("no such block size")

    peers = {"peer": Peer(None, lambda: None, refuse)}
    result = measure.measure_attention(TINY, peers, 16, clock(1))
    assert report.notes(result) == ["  peer not timed: no such block size"]


# ------------------------------------------------------------------ limits


def test_the_reader_reads_every_byte_in_any_order() -> None:
    inputs = make_inputs(TINY, 16)
    calls = limits.limits(inputs)
    if "blocks" not in calls:
        pytest.skip("no compiler")
    pool = inputs.key_cache.untyped_storage()
    words = torch.empty(0, dtype=torch.int64).set_(pool)
    expected = int(words.sum()) % 2**64
    assert calls["read"]() == calls["blocks"]() == expected


def test_without_a_compiler_there_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    caches = limits._library, limits._fastest_unit
    for function in caches:
        function.cache_clear()
    try:
        assert set(limits.limits(make_inputs(TINY, 16))) == {"matmul"}
        result = measure.measure_attention(TINY, {}, 16, clock(1))
        assert result.kernels == {}
        assert result.cold.share_of_limit is None
        assert result.cold.share_of_products is not None
    finally:
        for function in caches:
            function.cache_clear()


def test_blocks_that_sequences_share_are_read_once_in_the_order_of_the_tables() -> None:
    tables = torch.tensor([[5, 2, 7, -1], [5, 2, 0, 3], [2, 9, -1, -1]], dtype=torch.int32)
    assert limits.in_order(tables).tolist() == [5, 2, 7, 0, 3, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_unit_makes_as_many_operations_as_it_is_said_to(dtype: torch.dtype) -> None:
    unit = limits.fastest_unit(dtype)
    if unit is None:
        pytest.skip("no compiler")
    name, call = unit
    assert name in (("tiles", "pairs", "floats") if dtype == torch.bfloat16 else ("floats",))
    library = limits._library()
    per_round = getattr(library, f"products_by_{name}")(0, 1)
    rounds, threads = call.args
    assert limits.UNIT_FLOPS <= rounds * threads * per_round < 1.001 * limits.UNIT_FLOPS
    # What nothing depends on may be left out by a compiler: then it would take no time.
    assert limits._seconds(call) > limits.UNIT_FLOPS / (torch.get_num_threads() * 50e12)


# ------------------------------------------------------------------ results


def same(seconds: float) -> Samples:
    return Samples((seconds,) * 3, (seconds / 2,) * 3)


def test_the_share_is_that_of_the_limit_that_binds() -> None:
    work = replace(TINY, name="x")
    bounds = {
        "blocks": same(1.0),
        "matmul": same(3.0 * limits.MATMUL_FLOPS / work.flops),
        "unit": same(2.0 * limits.UNIT_FLOPS / work.flops),
    }
    samples = {"paged": same(4.0), "a": same(2.0), "b": same(8.0)}
    figures = Result(work, samples, bounds).cold
    assert figures.share_of_memory == pytest.approx(0.25)
    assert figures.share_of_products == figures.share_of_limit == pytest.approx(0.5)
    assert figures.ratios == {"a": 2.0, "b": 0.5}
    assert figures.best_peer == "a"
    bounds["blocks"] = same(3.5)
    assert Result(work, samples, bounds).cold.share_of_limit == pytest.approx(0.875)
    del bounds["unit"]
    assert Result(work, samples, bounds).cold.share_of_products == pytest.approx(0.75)
    del bounds["blocks"]
    assert Result(work, samples, bounds).cold.share_of_limit is None


def test_cold_and_warm_calls_are_medians_of_their_own() -> None:
    samples = {"paged": Samples((3.0, 9.0, 4.0), (1.0, 0.5, 0.75))}
    result = Result(TINY, samples, {"matmul": same(1.0)})
    assert (result.cold.seconds, result.warm.seconds) == ({"paged": 4.0}, {"paged": 0.75})


def test_ratios_and_shares_are_medians_of_those_within_a_round() -> None:
    """Here the machine became slower from round to round, and the ratio stayed."""

    def cold(*seconds: float) -> Samples:
        return Samples(seconds, seconds)

    work = replace(TINY, name="x")
    bounds = {"blocks": cold(1.0, 2.0, 6.0), "matmul": cold(1.0, 1.0, 1.0)}
    samples = {"paged": cold(2.0, 4.0, 8.0), "a": cold(1.0, 2.0, 3.0), "b": cold(4.0, 1.0, 8.0)}
    figures = Result(work, samples, bounds).cold
    assert figures.ratios == {"a": 2.0, "b": 1.0}
    assert figures.share_of_memory == 0.5
    assert figures.seconds == {"paged": 4.0, "a": 2.0, "b": 4.0}


def test_a_write_is_compared_with_a_plain_copy() -> None:
    work = Workload("w", "write", (40,), (1,), 4, 2, torch.bfloat16)
    result = measure.measure_write(work, PRESENT, 16, clock(2))
    figures = result.cold
    assert {"paged", "index_copy"} <= set(figures.seconds)
    assert set(figures.limits) == {"copy"}
    rounds = zip(result.limits["copy"].cold, result.samples["paged"].cold, strict=True)
    assert figures.share_of_limit == statistics.median(copy / ours for copy, ours in rounds)


# ------------------------------------------------------------------ timing


class FakeTime:
    """A clock that calls move on, and what happened."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, ""

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.events += name
            self.now += seconds

        return run

    def flush(self) -> None:
        self.events += "."
        self.now += 100.0


def test_candidates_take_turns_cold_after_a_flush_and_then_warm() -> None:
    time = FakeTime()
    candidates = {"a": time.call("a", 2.0), "b": time.call("b", 0.002)}
    found = interleaved_samples(candidates, 2, time.flush, lambda: time.now)
    assert time.events == "ab" + 2 * (".aa" + ".bbb")
    assert found["a"] == Samples((2.0, 2.0), (2.0, 2.0))
    assert found["b"].warm == pytest.approx((0.002, 0.002))


def test_medians_take_one_call_after_each_flush() -> None:
    time = FakeTime()
    candidates = {"a": time.call("a", 2.0), "b": time.call("b", 1.0)}
    found = interleaved_medians(candidates, 3, time.flush, lambda: time.now)
    assert time.events == "ab" + 3 * ".a.b"
    assert found == {"a": 2.0, "b": 1.0}


# ------------------------------------------------------------------ the command


def test_the_command_prints_and_writes_every_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "WORKLOADS", (TINY, DECODE))
    monkeypatch.setattr(command, "WRITES", workloads.WRITES[1:])
    curve = [replace(DECODE, name=f"length {length}") for length in (16, 32)]
    monkeypatch.setattr(command, "CURVES", {"length": curve})
    monkeypatch.setattr(command, "Flusher", lambda: lambda: None)
    out = tmp_path / "figures.json"
    options = f"attention --samples 1 --block-size 16 --json {out} --png {tmp_path}"
    monkeypatch.setattr("sys.argv", ["bench", *options.split()])
    main()
    printed = capsys.readouterr().out
    content = json.loads(out.read_text())
    names = ["tiny", "decode", "W1-8", "length 16", "length 32"]
    assert [row["workload"] for row in content["results"]] == names
    assert all(f"\n{name} " in printed for name in names)
    assert content["command"] == f"python -m paged_ops.bench {options}"
    assert content["block_size"] == 16
    assert {"machine", "date", "threads", "versions"} <= set(content)
    first = content["results"][0]
    assert first["flops"] == TINY.flops
    assert set(first["samples"]) == {*first["cold"]["seconds"], *first["cold"]["limits"]}
    assert all(len(each["cold"]) == len(each["warm"]) == 1 for each in first["samples"].values())
    for name in ("attention.png", "attention-cost.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_slow_peer_is_timed_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def slow(inputs: Inputs) -> Call:
        asked.append(inputs.workload)
        return _attend(inputs)

    stand_in = replace(PEERS["flex"], absence=lambda: None, attention=slow)
    monkeypatch.setitem(PEERS, "flex", stand_in)
    monkeypatch.setattr(command, "WORKLOADS", (DECODE,))
    monkeypatch.setattr(command, "Flusher", lambda: lambda: None)
    monkeypatch.setattr(command, "WRITES", ())
    monkeypatch.setattr(command, "CURVES", {})
    for options in ("", " --peers sdpa flex"):
        monkeypatch.setattr("sys.argv", f"bench attention --samples 1{options}".split())
        main()
        printed = capsys.readouterr().out
        assert ("/ flex" in printed) == bool(asked) == bool(options)
        assert ("/ gather+sdpa" in printed) == (not options)


def test_an_unknown_workload_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "attention", "--only", "D9"])
    with pytest.raises(SystemExit):
        main()
    assert "invalid choice: 'D9'" in capsys.readouterr().err
