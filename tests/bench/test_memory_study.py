"""The memory study: its parts against counting by hand, and its figures against the paper's."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from paged_ops.bench.__main__ import main
from paged_ops.bench.memory import lengths, reuse, saturated, sharing
from paged_ops.bench.memory.buddy import Buddies
from paged_ops.bench.memory.lengths import DISTRIBUTIONS, Request, at_most, read_trace

# ------------------------------------------------------------------ requests


def test_drawn_lengths_have_the_papers_means_and_fit_the_positions() -> None:
    requests = DISTRIBUTIONS["alpaca-means"].draw(20_000)
    assert sum(r.prompt for r in requests) / 20_000 == pytest.approx(19.31, rel=0.03)
    assert sum(r.output for r in requests) / 20_000 == pytest.approx(58.45, rel=0.03)
    assert min(min(r.prompt, r.output) for r in requests) == 1
    assert max(r.prompt + r.output for r in DISTRIBUTIONS["sharegpt-means"].draw(20_000)) <= 2048
    assert requests[:10] == DISTRIBUTIONS["alpaca-means"].draw(10)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023,374,44\n2023,0,9\n2023,5,6\n"),
        ("b.csv", "num_prefill_tokens,num_decode_tokens,pd_ratio\n374,44,1.5\n5,6,1.0\n"),
        (
            "c.jsonl",
            '{"input_length": 374, "output_length": 44}\n{"input_length": 5, "output_length": 6}\n',
        ),
    ],
)
def test_every_kind_of_trace_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_trace(tmp_path / name) == [Request(374, 44), Request(5, 6)]


def test_prefix_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 600, "output_length": 2, "hash_ids": [4, 7]}\n')
    assert read_trace(path) == [Request(600, 2, (4, 7))]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"has the columns \['a', 'b'\], expected ContextTokens"):
        read_trace(path)


def test_long_requests_are_left_out_and_the_count_is_kept() -> None:
    requests = [Request(5, 5), Request(9, 9), Request(1, 1), Request(2, 2)]
    assert at_most(requests, 10, 2) == [Request(5, 5), Request(1, 1)]


# ------------------------------------------------------------------ the buddy allocator


def test_ranges_are_aligned_disjoint_and_join_again() -> None:
    choose, buddies = random.Random(0), Buddies(1000)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and choose.random() < 0.5:
            start = choose.choice(list(held))
            buddies.give_back(start)
            del held[start]
        elif (start := buddies.take(choose.randint(1, 200))) is not None:
            held[start] = buddies.size(start)
            assert start % held[start] == 0
        slots = [slot for start, size in held.items() for slot in range(start, start + size)]
        assert len(slots) == len(set(slots))
        assert max(slots, default=0) < 1000
    for start in held:
        buddies.give_back(start)
    assert buddies.take(512) is not None
    assert buddies.take(256) is not None


# ------------------------------------------------------------------ the queue


def paged_by_steps(
    requests: list[Request], num_slots: int, block_size: int, watermark: float
) -> tuple[int, int, int, int]:
    """Run the queue with every token of every request told to nobody: counts alone."""
    total = num_slots // block_size
    kept = int(watermark * total)
    queue = [[number, r.prompt, r.prompt + r.output] for number, r in enumerate(requests)]
    running: list[list[int]] = []
    steps = live = held = preemptions = 0

    def blocks(length: int) -> int:
        return -(-length // block_size)

    while queue:
        running = [r for r in running if r[1] < r[2]]
        before = preemptions
        for request in sorted(running):
            if request not in running:
                continue
            while request in running:
                used = sum(blocks(r[1]) for r in running)
                if used + blocks(request[1] + 1) - blocks(request[1]) <= total:
                    request[1] += 1
                    break
                youngest = running.pop()
                queue.insert(0, youngest)
                preemptions += 1
                if youngest is not request and youngest[0] < request[0]:
                    youngest[1] -= 1  # it had its token of this step already
        while queue and before == preemptions:
            used = sum(blocks(r[1]) for r in running)
            if blocks(queue[0][1]) + (kept if used else 0) > total - used:
                break
            running.append(queue.pop(0))
        if queue:
            steps += 1
            live += sum(r[1] for r in running)
            held += block_size * sum(blocks(r[1]) for r in running)
    return steps, live, held, preemptions


@pytest.mark.parametrize("watermark", [0.0, 0.1])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_paged_queue_is_what_counting_every_token_gives(
    block_size: int, watermark: float
) -> None:
    choose = random.Random(block_size)
    requests = [Request(choose.randint(1, 40), choose.randint(1, 60)) for _ in range(150)]
    usage = saturated.paged(requests, 600, block_size, watermark)
    steps, live, held, preemptions = paged_by_steps(requests, 600, block_size, watermark)
    assert (usage.steps, usage.live, usage.live + usage.internal, usage.preemptions) == (
        steps,
        live,
        held,
        preemptions,
    )


def test_a_contiguous_queue_holds_as_many_as_their_reserve_allows() -> None:
    usage = saturated.contiguous([Request(10, 20)] * 50, 15_700, lambda _: 2048)
    assert usage.mean_running == 7
    assert usage.share(usage.external) == pytest.approx(100 * (1 - 7 * 2048 / 15_700))
    with pytest.raises(ValueError, match="needs more than the whole pool of 1000 slots"):
        saturated.contiguous([Request(10, 20)], 1000, lambda _: 2048)


def test_pool_utilisation_is_near_the_papers_figures() -> None:
    requests = DISTRIBUTIONS["sharegpt-means"].draw(1500)
    reserves = {
        20.4: lambda r: 2048,
        26.8: lambda r: min(2048, r.prompt + saturated.power_of_two(r.output)),
        38.2: lambda r: r.prompt + r.output,
    }
    for paper, reserve in reserves.items():
        usage = saturated.contiguous(requests, 15_700, reserve)
        assert usage.share(usage.live) == pytest.approx(paper, abs=2)
    usage = saturated.paged(requests, 15_700, 16, watermark=0.02)
    assert usage.share(usage.live) >= 96.3
    assert usage.preemptions_per_request <= 0.7


# ------------------------------------------------------------------ sharing and reuse


def test_one_answer_to_a_prompt_saves_nothing_and_a_long_prompt_saves_nearly_all() -> None:
    assert sharing.parallel_sampling([Request(20, 30)], 1).percent == 0
    assert sharing.beam_search([Request(20, 30)], 1).percent == 0
    long_prompt = sharing.parallel_sampling([Request(1600, 1)], 4)
    assert long_prompt.unshared == 4 * 101
    assert long_prompt.used == 100 + 4


def test_savings_are_near_the_papers_figures() -> None:
    requests = DISTRIBUTIONS["alpaca-means"].draw(300)
    for width, paper in {2: 6.09, 4: 8.53, 6: 9.79}.items():
        assert sharing.parallel_sampling(requests, width).percent == pytest.approx(paper, abs=3)
    for width, paper in {2: 37.56, 4: 53.13, 6: 55.16}.items():
        assert sharing.beam_search(requests[:60], width).percent == pytest.approx(paper, abs=5)


def test_reuse_counts_the_prefix_blocks_that_a_pool_still_has() -> None:
    requests = [Request(1500, 5, blocks) for blocks in [(1, 2, 3), (4, 5, 6), (1, 2, 7), (1, 2, 3)]]
    unlimited = reuse.replay(requests, None)
    assert (unlimited.prompt_blocks, unlimited.hit_blocks, unlimited.evictions) == (12, 5, 0)
    assert unlimited.percent == 100 * 5 / 12
    small = reuse.replay(requests, 4)
    assert small.hit_blocks == 2
    assert reuse.replay(requests, 3).hit_blocks == 0  # no prompt fits with a token to compute


# ------------------------------------------------------------------ the command


def test_the_command_prints_tables_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the matplotlib package")
    prefixes = tmp_path / "prefixes.jsonl"
    prefixes.write_text('{"input_length": 600, "output_length": 2, "hash_ids": [4, 7]}\n' * 3)
    plain = tmp_path / "plain.csv"
    plain.write_text("ContextTokens,GeneratedTokens\n" + "50,60\n" * 40)
    monkeypatch.setattr(lengths.Distribution, "draw", lambda _, count: [Request(9, 9)] * count)
    arguments = ["memory", "--requests", "40", "--slots", "1000", "--output", str(tmp_path / "out")]
    traces = ["--trace", str(prefixes), "--trace", str(plain)]
    monkeypatch.setattr("sys.argv", ["bench", *arguments, *traces])
    # So few requests never wait in the paper's pool.
    monkeypatch.setattr("paged_ops.bench.memory.command.PAPER_SLOTS", 300)
    main()
    printed = capsys.readouterr().out
    assert "plain, 40 requests, 1000 slots" in printed
    assert "prefixes: prompt blocks found, percent" in printed
    with (tmp_path / "out" / "memory-usage.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["workload"] for row in rows} == {"sharegpt-means", "plain"}
    for row in rows:
        parts = [float(row[part]) for part in ("live", "reserved", "internal", "external")]
        assert sum(parts) == pytest.approx(100)
    names = ["memory-reuse.csv", "memory-reuse.png", "memory-sharing.csv"]
    names += ["memory-usage.csv", "memory-usage.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
