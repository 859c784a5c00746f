"""``python -m paged_ops.bench prefix``: what the prefix cache saves, in tokens and in time."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import paged_ops
from paged_ops.bench.serving.report import as_text
from paged_ops.demo.model import load_model
from paged_ops.engine import Engine, Model, Request

BLOCK_SIZE = 16
COMMON, OWN, NEW = 96, 16, 16
"""Tokens that all prompts begin with, those of each question, and those of each answer."""


@dataclass
class Outcome:
    """What came of serving some prompts, one after another.

    Attributes
    ----------
    answers : list of list of int
        The tokens of each.
    first_token_seconds : list of float
        From a prompt's arrival to its first token, for all but the first prompt, which finds
        nothing in any case.
    num_prompt_tokens, num_found : int
        Tokens of the prompts, and how many of them were in the pool.
    """

    answers: list[list[int]] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_found: int = 0

    def take(self, engine: Engine, prompt: Sequence[int]) -> Request:
        """Serve a prompt to its end."""
        start = time.perf_counter()
        request = engine.submit(prompt, NEW)
        engine.step()
        if self.answers:
            self.first_token_seconds.append(time.perf_counter() - start)
        for _ in engine.run():
            pass
        self.answers.append(request.generated)
        self.num_prompt_tokens += len(request.prompt)
        self.num_found += request.num_cached
        return request


def shared_beginning(
    model: Model, caching: bool, *, num_turns: int, common: int = COMMON
) -> Outcome:
    """Serve prompts that all begin with the same tokens, as those of one system prompt do."""
    outcome, engine = Outcome(), _engine(model, caching, common + OWN + NEW)
    beginning, *questions = _tokens(model, common, num_turns)
    for question in questions:
        outcome.take(engine, beginning + question)
    return outcome


def conversation(model: Model, caching: bool, *, num_turns: int, common: int = COMMON) -> Outcome:
    """Serve the turns of one conversation: each begins with all that was said before."""
    outcome, engine = Outcome(), _engine(model, caching, common + num_turns * (OWN + NEW))
    said, *questions = _tokens(model, common, num_turns)
    for question in questions:
        said = outcome.take(engine, said + question).tokens
    return outcome


WORKLOADS = {"one beginning": shared_beginning, "a conversation": conversation}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="of transformers, such as `make chat` leaves; default: the demo's model",
    )
    parser.add_argument("--turns", type=int, default=4, help="prompts of each workload")
    parser.add_argument("--common", type=int, default=COMMON, help="tokens that all begin with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """Serve each workload without the prefix cache and with it, and compare the answers."""
    model = _load(options.model)
    rows = []
    for name, serve in WORKLOADS.items():
        given = {"num_turns": options.turns, "common": options.common}
        serve(model, False, num_turns=1, common=options.common)  # the first calls take longer
        outcomes = {caching: serve(model, caching, **given) for caching in (False, True)}
        if outcomes[False].answers != outcomes[True].answers:
            raise AssertionError(f"{name}: the prefix cache has changed an answer")
        rows += [_row(name, caching, outcome) for caching, outcome in outcomes.items()]
    label = options.model.name if options.model else "the demo's model"
    print(f"{label}, {paged_ops.backend_info().cpu_isa}, {torch.get_num_threads()} threads")
    print(as_text(rows))
    return rows


def _row(name: str, caching: bool, outcome: Outcome) -> dict[str, object]:
    return {
        "prompts": name,
        "prefix cache": "on" if caching else "off",
        "prompt tokens": outcome.num_prompt_tokens,
        "found": outcome.num_found,
        "time to first token, ms": round(1e3 * statistics.median(outcome.first_token_seconds), 1),
    }


def _load(folder: Path | None) -> Model:
    if folder is None:
        torch.set_num_threads(1)  # its products are too small to share
        return load_model()
    from transformers import AutoModelForCausalLM

    from paged_ops.integrations.transformers import PackedModel

    return PackedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def _engine(model: Model, caching: bool, num_tokens: int) -> Engine:
    blocks = -(-num_tokens // BLOCK_SIZE) + 1
    return Engine(
        model, num_blocks=blocks, block_size=BLOCK_SIZE, max_batch=1, prefix_caching=caching
    )


def _tokens(model: Model, common: int, num_questions: int) -> list[list[int]]:
    """Draw the beginning and the questions, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    lengths = [common] + [OWN] * num_questions
    return [
        torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]
