"""The engine: its schedule, its books, and its tokens against contiguous attention."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch

from paged_ops.demo.comparison import compare_with_contiguous
from paged_ops.demo.model import ContiguousAttention, LanguageModel, load_model
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import Engine, Request, Sampler, State, StepReport

PROMPTS = ("ROMEO:", "To be, or not to be,\nthat is the question", "O", "MACBETH:\nIs this a", "[")
NEW_TOKENS = (24, 17, 30, 9, 24)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Compute as the command does: the model's products are too small to share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load()


@pytest.fixture(scope="module")
def expected(model: LanguageModel, tokenizer: Tokenizer) -> list[list[int]]:
    """Greedy tokens of each prompt by itself, with an ordinary KV cache."""
    return [
        generate_alone(model, tokenizer.encode(text), count)
        for text, count in zip(PROMPTS, NEW_TOKENS, strict=True)
    ]


@torch.inference_mode()
def generate_alone(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    attend, new, tokens = ContiguousAttention(model.config), prompt, list(prompt)
    for _ in range(count):
        positions = torch.arange(len(tokens) - len(new), len(tokens))
        new = [int(model(torch.tensor(new), positions, attend)[-1].argmax())]
        tokens += new
    return tokens[len(prompt) :]


def run_all(
    model: LanguageModel,
    tokenizer: Tokenizer,
    sampler: Sampler | None = None,
    **pool: int,
) -> tuple[Engine, list[Request], list[StepReport]]:
    """Run every prompt; prove in each step that the books are in order."""
    engine = Engine(model, sampler=sampler, **pool)
    requests = [
        engine.submit(tokenizer.encode(text), count)
        for text, count in zip(PROMPTS, NEW_TOKENS, strict=True)
    ]
    reports = []
    for report in engine.run():
        engine.manager.check()
        reports.append(report)
    return engine, requests, reports


def generated(requests: list[Request]) -> list[list[int]]:
    return [request.generated for request in requests]


@pytest.mark.parametrize("max_batch", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_greedy_tokens_are_those_of_contiguous_attention(
    model: LanguageModel,
    tokenizer: Tokenizer,
    expected: list[list[int]],
    block_size: int,
    max_batch: int,
) -> None:
    num_blocks = -(-300 // block_size) + len(PROMPTS)
    _, requests, _ = run_all(
        model, tokenizer, num_blocks=num_blocks, block_size=block_size, max_batch=max_batch
    )
    assert generated(requests) == expected


def test_preempted_requests_end_with_the_same_tokens(
    model: LanguageModel, tokenizer: Tokenizer, expected: list[list[int]]
) -> None:
    _, requests, reports = run_all(model, tokenizer, num_blocks=12, block_size=4, max_batch=5)
    assert sum(request.preemptions for request in requests) >= 2
    assert sum(len(report.preempted) for report in reports) >= 2
    assert generated(requests) == expected


def test_the_oldest_request_is_never_preempted(model: LanguageModel, tokenizer: Tokenizer) -> None:
    _, requests, reports = run_all(model, tokenizer, num_blocks=12, block_size=4, max_batch=5)
    finished: set[int] = set()
    for report in reports:
        oldest = min(set(range(len(PROMPTS))) - finished)
        assert oldest not in report.preempted
        finished |= set(report.finished)
    assert requests[0].preemptions == 0


def test_after_a_run_the_pool_is_empty_and_its_books_are_in_order(
    model: LanguageModel, tokenizer: Tokenizer
) -> None:
    engine, requests, _ = run_all(model, tokenizer, num_blocks=16, block_size=4, max_batch=3)
    engine.manager.check()
    assert engine.manager.num_used == 0
    assert engine.occupancy().used == 0
    assert all(request.state is State.FINISHED for request in requests)
    assert engine.requests == []


def test_waiting_prompts_join_when_others_leave(model: LanguageModel, tokenizer: Tokenizer) -> None:
    _, _, reports = run_all(model, tokenizer, num_blocks=64, block_size=4, max_batch=2)
    joined_in = {index: report.step for report in reports for index in report.joined}
    assert joined_in[0] == joined_in[1] == 1
    assert len(set(joined_in.values())) >= 3
    for before, report in itertools.pairwise(reports):
        assert len(report.tokens) <= 2
        if report.joined:
            assert before.finished
    mixed = [report for report in reports if report.joined and len(report.tokens) == 2]
    assert any(report.num_computed > len(report.tokens) for report in mixed)


def test_a_stop_rule_ends_a_request_early(model: LanguageModel, tokenizer: Tokenizer) -> None:
    engine = Engine(model, num_blocks=16, block_size=4, max_batch=1)
    request = engine.submit(tokenizer.encode("ROMEO:"), 20, lambda tokens: len(tokens) == 7)
    assert [report.finished for report in engine.run()][-1] == [0]
    assert len(request.generated) == 7


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_preemption(
    model: LanguageModel, tokenizer: Tokenizer
) -> None:
    sampler = Sampler(temperature=0.9, seed=3)
    _, tight, _ = run_all(model, tokenizer, sampler, num_blocks=12, block_size=4, max_batch=5)
    _, roomy, _ = run_all(model, tokenizer, sampler, num_blocks=100, block_size=16, max_batch=1)
    _, other, _ = run_all(
        model, tokenizer, Sampler(0.9, 4), num_blocks=100, block_size=16, max_batch=5
    )
    assert generated(tight) == generated(roomy)
    assert generated(tight) != generated(other)
    assert not compare_with_contiguous(model, tight, sampler).mismatch


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 1, "0 prompt tokens"),
        ([5], 0, "0 new ones"),
        ([5] * 200, 100, "more than the model's 256 positions"),
        ([5] * 10, 40, "need 13 blocks of 4, but the pool has 12"),
    ],
)
def test_a_request_that_could_never_finish_is_refused(
    model: LanguageModel, prompt: list[int], count: int, message: str
) -> None:
    engine = Engine(model, num_blocks=12, block_size=4, max_batch=2)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, count)
    assert engine.requests == []


def test_a_request_may_fill_the_whole_pool_and_every_position(model: LanguageModel) -> None:
    engine = Engine(model, num_blocks=32, block_size=8, max_batch=2)
    requests = [engine.submit([5] * 250, 7), engine.submit([6] * 256, 1)]
    assert max(report.occupancy.utilisation for report in engine.run()) == 1.0
    assert [len(request.generated) for request in requests] == [7, 1]


def test_the_waste_of_a_step_is_the_managers(model: LanguageModel, tokenizer: Tokenizer) -> None:
    engine = Engine(model, num_blocks=64, block_size=8, max_batch=5)
    for text in PROMPTS:
        engine.submit(tokenizer.encode(text), 20)
    for _ in range(10):
        engine.step()
        stats, occupancy = engine.manager.stats(), engine.occupancy()
        assert occupancy.waste == stats.internal_waste
        assert occupancy.utilisation == stats.pool_utilisation
        assert occupancy.used == stats.num_used


# ------------------------------------------------------------------ the check


def test_the_check_counts_every_token(model: LanguageModel, tokenizer: Tokenizer) -> None:
    _, requests, _ = run_all(model, tokenizer, num_blocks=64, block_size=4, max_batch=5)
    result = compare_with_contiguous(model, requests, Sampler())
    assert (result.equal, result.tied, result.mismatch) == (sum(NEW_TOKENS), 0, "")


def test_the_check_names_the_first_token_that_differs(
    model: LanguageModel, tokenizer: Tokenizer, expected: list[list[int]]
) -> None:
    wrong = list(expected[0])
    wrong[5] = (wrong[5] + 1) % model.config.vocab_size
    request = Request(0, tokenizer.encode(PROMPTS[0]), len(wrong), generated=wrong)
    result = compare_with_contiguous(model, [request], Sampler())
    assert result.equal == 5
    assert re.match(
        rf"request 0, new token 5: .* token {wrong[5]}, .*{expected[0][5]}", result.mismatch
    )


def test_bfloat16_agrees_within_its_rounding(tokenizer: Tokenizer) -> None:
    model = load_model(dtype=torch.bfloat16)
    engine, requests, _ = run_all(model, tokenizer, num_blocks=64, block_size=4, max_batch=5)
    assert engine.cache.dtype is torch.bfloat16
    result = compare_with_contiguous(model, requests, Sampler())
    assert not result.mismatch
    assert result.equal + result.tied == sum(NEW_TOKENS)
    assert result.tied <= sum(NEW_TOKENS) // 10
