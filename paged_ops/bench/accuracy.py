"""``python -m paged_ops.bench accuracy``: what quantised caches cost a model in likelihood."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import paged_ops
from paged_ops import BlockManager, PagedKVCache, build_batch
from paged_ops.bench.stories260k import (
    GREEDY_STORY,
    MODEL,
    WRITTEN_STORIES,
    encode,
    load_stories260k,
)
from paged_ops.demo.corpus import HELD_OUT, read_works
from paged_ops.demo.model import load_model, read_config
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.dtypes import LARGEST_ELEMENT, QUANTISED_DTYPES
from paged_ops.engine import Model, PagedLayers
from paged_ops.pool.scales import GRANULARITIES

BLOCK_SIZE = 16
WINDOW = 1024
"""Tokens that a model reads at once, at most: all of a long context would take a CPU minutes."""
CALIBRATION_TOKENS = 64


class Form(NamedTuple):
    """What a cache holds: its elements, and what has a scale of its own."""

    cache_dtype: torch.dtype
    granularity: str | None = None

    @property
    def name(self) -> str:
        """The dtype and the granularity in words."""
        dtype = str(self.cache_dtype).removeprefix("torch.")
        return dtype if self.granularity is None else f"{dtype}, per {self.granularity}"


FORMS = (
    Form(torch.float32),
    Form(torch.bfloat16),
    *itertools.starmap(Form, itertools.product(QUANTISED_DTYPES, GRANULARITIES[::-1])),
)


@dataclass(frozen=True)
class Subject:
    """A model, and texts that it is to predict.

    Attributes
    ----------
    name : str
        What the table calls it.
    model : Model
        The model, in float32.
    texts : tuple of Tensor
        ``[num_tokens]`` int64 each. They are read in windows of the model's positions, or of
        `WINDOW` tokens where it has more, each without what came before.
    """

    name: str
    model: Model
    texts: tuple[Tensor, ...]

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted: all but the first of each text."""
        return sum(len(tokens) - 1 for tokens in self.texts)

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return min(WINDOW, self.model.config.max_positions)

    def windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets)."""
        for tokens in self.texts:
            parts = tokens[:-1].split(self.window), tokens[1:].split(self.window)
            yield from zip(*parts, strict=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    data = os.environ.get("PAGED_TEST_DATA")
    stories = None if data is None else Path(data, "models", "stories260K")
    parser.add_argument(
        "--texts", type=Path, metavar="FOLDER", help="whole held-out plays, as demo.train reads"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of those plays: %(default)s")
    parser.add_argument("--stories260k", type=Path, metavar="FOLDER", default=stories, help=MODEL)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="of transformers, such as `make chat` leaves"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """Print a row for each form of cache: nats per token of each text, and their rise."""
    if options.model is None:
        torch.set_num_threads(1)  # Matrices this small gain nothing from more.
    subjects = [demo_subject(options.texts, options.tokens)]
    if options.model is not None:
        subjects.append(folder_subject(options.model, options.texts, options.tokens))
    if options.stories260k is not None:
        subjects += stories_subjects(options.stories260k)
    else:
        print("stories260K is left out: no --stories260k, and PAGED_TEST_DATA is not set")
    print(f"{paged_ops.backend_info().cpu_isa}; nats per token, and their rise over float32")
    for subject in subjects:
        print(f"  {subject.name}: {subject.num_predicted} tokens")
    print(f"{'cache':24} " + " ".join(f"{subject.name:>22}" for subject in subjects))
    rows: list[dict[str, object]] = []
    plain: list[float] = []
    for form in FORMS:
        losses = [loss(subject, form) for subject in subjects]
        plain = plain or losses
        cells = [
            f"{nats:12.4f} {nats - base:+9.4f}" for nats, base in zip(losses, plain, strict=True)
        ]
        print(f"{form.name:24} " + " ".join(cells), flush=True)
        rows += [
            {"cache": form.name, "text": subject.name, "nats_per_token": nats}
            for subject, nats in zip(subjects, losses, strict=True)
        ]
    return rows


def demo_subject(texts: Path | None = None, num_tokens: int = 4096) -> Subject:
    """Return the demo's model with the held-out text that it ships with, or more of it.

    Parameters
    ----------
    texts : Path, optional
        The folder of the whole plays.
    num_tokens : int
        How much to take of each play.

    Returns
    -------
    Subject
        Both.
    """
    tokenizer = Tokenizer.load()
    if texts is None:
        found = [torch.tensor(tokenizer.encode(read_config()["results"]["snippet"]["text"]))]
    else:
        found = [torch.tensor(tokenizer.encode(play)[:num_tokens]) for play in plays(texts)]
    return Subject("demo, plays" if texts else "demo", load_model(), tuple(found))


def folder_subject(folder: Path, texts: Path | None = None, num_tokens: int = 4096) -> Subject:
    """Return a model of transformers with three stories and the demo's text, or with whole plays.

    Parameters
    ----------
    folder : Path
        Of the model.
    texts, num_tokens
        As `demo_subject`.

    Returns
    -------
    Subject
        Both.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from paged_ops.integrations.transformers import PackedModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    snippet = read_config()["results"]["snippet"]["text"]
    found = [*WRITTEN_STORIES, snippet] if texts is None else list(plays(texts))
    tokens = (tokenizer.encode(text, return_tensors="pt")[0][:num_tokens] for text in found)
    return Subject(folder.name, PackedModel(model), tuple(tokens))


def plays(folder: Path) -> Iterator[str]:
    """Yield the texts of the held-out plays."""
    return (work.text for work in read_works(folder) if work.file in HELD_OUT)


def stories_subjects(folder: Path) -> Iterator[Subject]:
    """Yield stories260K with its own story, and with others."""
    model = load_stories260k(folder)
    for name, stories in (("greedy story", [GREEDY_STORY]), ("written stories", WRITTEN_STORIES)):
        yield Subject(name, model, tuple(torch.tensor(encode(text, folder)) for text in stories))


@torch.inference_mode()
def loss(subject: Subject, form: Form) -> float:
    """Return the nats per token of a text, predicted through a paged cache of some form.

    Every token, the newest included, is attended to as the cache holds it: written first, and then
    read back. So one pass over a window gives what decoding it token by token would.
    """
    model, config = subject.model, subject.model.config
    is_quantised = form.granularity is not None
    cache = PagedKVCache(
        config.num_layers,
        -(-subject.window // BLOCK_SIZE),
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        torch.float32 if is_quantised else form.cache_dtype,
        cache_dtype=form.cache_dtype,
        scale_granularity=form.granularity or "token",
    )
    if form.granularity in ("head", "tensor"):
        calibrate(cache, model, subject.texts[0][:CALIBRATION_TOKENS])
    nats = sum(
        float(F.cross_entropy(_logits(model, cache, inputs), targets, reduction="sum"))
        for inputs, targets in subject.windows()
    )
    return nats / subject.num_predicted


def calibrate(cache: PagedKVCache, model: Model, tokens: Tensor) -> None:
    """Set the scales so that the largest magnitude of some tokens becomes the largest element."""
    config = model.config
    plain = PagedKVCache(
        config.num_layers,
        -(-len(tokens) // BLOCK_SIZE),
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
    )
    largest = LARGEST_ELEMENT[cache.cache_dtype]

    def set_scales(layer: int, key: Tensor, value: Tensor) -> None:
        scales = [rows.abs().amax((0, 2)) / largest for rows in (key, value)]
        if cache.scale_granularity == "tensor":
            scales = [per_head.max() for per_head in scales]
        cache.set_scales(layer, *scales)

    _logits(model, plain, tokens, set_scales)


def _logits(
    model: Model,
    cache: PagedKVCache,
    tokens: Tensor,
    see: Callable[[int, Tensor, Tensor], None] = lambda layer, key, value: None,
) -> Tensor:
    """Return the logits of every token, through the empty cache; `see` is shown keys and values."""
    manager = BlockManager(cache.num_blocks, BLOCK_SIZE, prefix_caching=False)
    manager.allocate("window", len(tokens))
    layers = PagedLayers(cache, build_batch(manager, ["window"], [len(tokens)]))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        see(layer, key, value)
        rows = (each.to(cache.dtype) for each in (query, key, value))
        return layers(layer, *rows, **options).float()

    everyone = torch.arange(len(tokens))
    return model(tokens, everyone, attend, rows=everyone)
