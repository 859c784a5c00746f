"""What goes wrong in an engine: steps that are broken off, requests that fail, clients that go."""

from __future__ import annotations

import contextlib
import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_ops.engine import Engine, PagedLayers, Request, Sampler, State, StepReport
from paged_ops.engine import engine as engine_module
from tests.support.broken_off import break_off
from tests.support.tiny_model import TinyModel

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [1, 2, 3, 4, 9], [11, 12, 13]]
NEW_TOKENS = [9, 3, 7, 10]


def make_engine(num_blocks: int = 8, max_batch: int = 3, poison: int | None = None) -> Engine:
    return Engine(TinyModel(poison), num_blocks=num_blocks, block_size=3, max_batch=max_batch)


def alone(prompt: list[int], count: int) -> list[int]:
    engine = make_engine(30)
    request = engine.submit(prompt, count)
    list(engine.run())
    return request.generated


def busy_engine() -> tuple[Engine, list[Request]]:
    """Return an engine in whose steps requests join, share, are preempted, finish, and fail."""
    engine = make_engine()
    requests = [
        engine.submit(prompt, count) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)
    ]
    return engine, [*requests, engine.submit([1, 2, 3, 4], 5, raises_after(2))]


def raises_after(count: int) -> Callable[[Sequence[int]], bool]:
    def stop(generated: Sequence[int]) -> bool:
        if len(generated) == count:
            raise RuntimeError("the client went away")
        return False

    return stop


def end(engine: Engine) -> list[StepReport]:
    """Run to the end, and see that nothing is left."""
    reports = []
    for report in engine.run():
        engine.manager.check()
        reports.append(report)
    assert engine.requests == []
    assert engine.manager.num_used == 0
    return reports


def outcome(requests: list[Request]) -> list[tuple[list[int], State]]:
    return [(request.generated, request.state) for request in requests]


def undisturbed() -> tuple[list[tuple[list[int], State]], list[StepReport]]:
    engine, requests = busy_engine()
    reports = end(engine)
    return outcome(requests), reports


EXPECTED, REPORTS = undisturbed()
ALONE = [alone(prompt, count) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)]


def test_the_steps_have_everything_in_them() -> None:
    assert [generated for generated, _ in EXPECTED[:4]] == ALONE
    assert EXPECTED[4] == (alone([1, 2, 3, 4], 2), State.FAILED)
    assert any(report.preempted for report in REPORTS)
    assert any(len(report.joined) > 1 for report in REPORTS)
    assert any(report.failed for report in REPORTS)


@given(step=st.integers(0, len(REPORTS) - 1), point=st.integers(0, 500))
def test_a_step_that_is_broken_off_anywhere_is_repeated_with_the_same_tokens(
    step: int, point: int
) -> None:
    """At any line of the package that the step runs through."""
    engine, requests = busy_engine()
    reports = [engine.step() for _ in range(step)]
    break_off(lambda: reports.append(engine.step()), point)
    engine.manager.check()
    reports += end(engine)
    assert outcome(requests) == EXPECTED
    expected = {(report.step, tuple(report.tokens.items())) for report in REPORTS}
    told = {(report.step, tuple(report.tokens.items())) for report in reports}
    # A report is lost only by what comes between the end of a step and its caller.
    assert told <= expected
    assert len(expected - told) <= 1


def test_a_step_may_be_broken_off_again_and_again() -> None:
    for seed in range(4):
        choose = random.Random(seed)
        engine, requests = busy_engine()
        for _ in range(20):
            break_off(engine.step, choose.randrange(4000))
        list(engine.run())
        assert outcome(requests) == EXPECTED
        engine.manager.check()
        assert engine.manager.num_used == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, MemoryError])
def test_what_the_model_raises_once_changes_no_token(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises in one call of a layer, after the keys of this layer were written."""
    calls, fatal = 0, 0

    class Layers(PagedLayers):
        def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
            nonlocal calls
            output = super().__call__(*args, **options)
            calls += 1
            if calls == fatal:
                raise error
            return output

    monkeypatch.setattr(engine_module, "PagedLayers", Layers)
    for fatal in range(1, 2 * len(REPORTS) + 1, 3):  # noqa: B007
        engine, requests = busy_engine()
        calls = 0
        while engine.requests:
            with contextlib.suppress(error):
                engine.step()
            engine.manager.check()
        assert outcome(requests) == EXPECTED


def test_a_call_of_cancel_or_submit_may_be_broken_off_anywhere() -> None:
    for call in (
        lambda engine, requests: engine.cancel(requests[0]),
        lambda engine, requests: engine.cancel(requests[3]),
        lambda engine, requests: engine.submit([5, 6], 3),
    ):
        point = 0
        while True:
            engine, requests = busy_engine()
            engine.step()
            broken = break_off(lambda: call(engine, requests), point)  # noqa: B023
            end(engine)
            for request, expected in zip(requests, EXPECTED, strict=True):
                assert request.state is State.CANCELLED or outcome([request]) == [expected]
            if not broken:
                break
            point += 4
        assert point > 20


# ------------------------------------------------------------------ one fails, the others don't


def test_a_stop_rule_that_raises_ends_its_request_alone() -> None:
    engine, requests = busy_engine()
    reports = end(engine)
    assert [report.failed for report in reports if report.failed] == [[4]]
    assert isinstance(requests[4].error, RuntimeError)
    assert [request.generated for request in requests[:4]] == ALONE


@pytest.mark.parametrize("others", [[], PROMPTS])
def test_a_request_that_the_model_raises_for_ends_alone(others: list[list[int]]) -> None:
    engine = make_engine(poison=30)
    requests = [engine.submit(prompt, 5) for prompt in others[:2]]
    bad = engine.submit([3, 30, 4], 5)
    requests += [engine.submit(prompt, 5) for prompt in others[2:]]
    reports = end(engine)
    assert bad.state is State.FAILED
    assert isinstance(bad.error, IndexError)
    assert bad.generated == []
    assert [report.failed for report in reports if report.failed] == [[bad.index]]
    assert [r.generated for r in requests] == [alone(prompt, 5) for prompt in others]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([5, 40], 4), ValueError, r"prompt\[1\] is 40, expected 0 to 39"),
        (([-1], 4), ValueError, r"prompt\[0\] is -1, expected 0 to 39"),
        (([2.0], 4), TypeError, r"prompt\[0\] is 2.0, expected an integer"),
        (([True], 4), TypeError, r"prompt\[0\] is True, expected an integer"),
        (("abc", 4), TypeError, r"prompt\[0\] is 'a', expected an integer"),
        (([5], 2.5), TypeError, "max_new_tokens is 2.5"),
        (([5], 3, 7), TypeError, "stop is 7, expected a function"),
    ],
)
def test_a_request_that_no_model_can_serve_is_refused_when_it_comes(
    arguments: Any, error: type[Exception], message: str
) -> None:
    engine = make_engine()
    good = engine.submit(PROMPTS[0], NEW_TOKENS[0])
    engine.step()
    with pytest.raises(error, match=message):
        engine.submit(*arguments)
    end(engine)
    assert good.generated == ALONE[0]


@pytest.mark.parametrize(
    "prompt", [bytes([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), range(5, 8)]
)
def test_any_sequence_of_integers_is_a_prompt(prompt: Any) -> None:
    engine = make_engine()
    request = engine.submit(prompt, 4)
    end(engine)
    assert request.prompt == [5, 6, 7]
    assert request.generated == alone([5, 6, 7], 4)


def test_requests_can_be_cancelled_wherever_they_are() -> None:
    for steps in range(0, len(REPORTS), 3):
        for who in range(4):
            engine, requests = busy_engine()
            for _ in range(steps):
                engine.step()
            ended, had = requests[who].has_ended, list(requests[who].generated)
            engine.cancel(requests[who])
            engine.cancel(requests[who])
            engine.manager.check()
            end(engine)
            if not ended:
                assert outcome([requests[who]]) == [(had, State.CANCELLED)]
            others = [i for i in range(4) if i != who]
            assert [requests[i].generated for i in others] == [ALONE[i] for i in others]


def test_a_stop_rule_may_cancel_and_submit() -> None:
    engine = make_engine(30)
    later: list[Request] = []

    def stop(generated: Sequence[int]) -> bool:
        if len(generated) == 2:
            engine.cancel(first)
            engine.cancel(last)
            later.append(engine.submit(PROMPTS[3], 4))
        return False

    first = engine.submit(PROMPTS[0], 9)
    middle = engine.submit(PROMPTS[2], 6, stop)
    last = engine.submit(PROMPTS[1], 9)
    reports = end(engine)
    assert [first.state, last.state] == [State.CANCELLED] * 2
    assert first.generated == alone(PROMPTS[0], 2)[: len(first.generated)]
    assert middle.generated == alone(PROMPTS[2], 6)
    assert later[0].generated == alone(PROMPTS[3], 4)
    finished = [index for report in reports for index in report.finished]
    assert sorted(finished) == [middle.index, later[0].index]


def test_another_engines_request_is_not_cancelled() -> None:
    engine, other = make_engine(), make_engine()
    mine, stranger = engine.submit([5], 2), other.submit([5], 2)
    with pytest.raises(ValueError, match="request 0 is not one of this engine's"):
        engine.cancel(stranger)
    end(engine)
    assert mine.state is State.FINISHED
    assert stranger.state is State.WAITING


def test_a_step_with_nothing_to_do_does_nothing() -> None:
    report = make_engine().step()
    assert (report.step, report.tokens, report.num_computed) == (1, {}, 0)


# ------------------------------------------------------------------ who has ended is forgotten


def test_memory_stays_flat_over_many_requests() -> None:
    engine = Engine(TinyModel(), num_blocks=32, block_size=3, max_batch=8, sampler=Sampler())

    def serve(count: int) -> int:
        for i in range(count):
            request = engine.submit([i % 40, i // 40 % 40, i // 1600 % 40, 5], 2)
            if i % 7 == 0:
                engine.cancel(request)
            if i % 8 == 0:
                list(engine.run())
        list(engine.run())
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(200)
        assert serve(800) - before < 50_000
        alive = sum(type(each) is Request for each in gc.get_objects())
    finally:
        tracemalloc.stop()
    assert alive <= 60  # those of the other tests here
