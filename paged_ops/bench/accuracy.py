"""``python -m paged_ops.bench accuracy``: what quantised caches cost a model in likelihood."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from paged_ops.demo.model import ContiguousAttention, LanguageModel, load_model, read_config
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.dtypes import LARGEST_ELEMENT, QUANTISED_DTYPES
from paged_ops.engine import PagedLayers
from paged_ops.pool.scales import GRANULARITIES

BLOCK_SIZE = 16
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
    model : LanguageModel
        The model, in float32.
    texts : tuple of Tensor
        ``[num_tokens]`` int64 each. They are read in windows of the model's positions, each without
        what came before.
    """

    name: str
    model: LanguageModel
    texts: tuple[Tensor, ...]

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted: all but the first of each text."""
        return sum(len(tokens) - 1 for tokens in self.texts)

    def windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets)."""
        length = self.model.config.max_positions
        for tokens in self.texts:
            yield from zip(tokens[:-1].split(length), tokens[1:].split(length), strict=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    data = os.environ.get("PAGED_TEST_DATA")
    stories = None if data is None else Path(data, "models", "stories260K")
    parser.add_argument(
        "--texts", type=Path, metavar="FOLDER", help="whole held-out plays, as demo.train reads"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of those plays: %(default)s")
    parser.add_argument("--stories260k", type=Path, metavar="FOLDER", default=stories, help=MODEL)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """Print a row for each form of cache: nats per token of each text, and their rise."""
    torch.set_num_threads(1)  # Matrices this small gain nothing from more.
    subjects = [demo_subject(options.texts, options.tokens)]
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
    model, tokenizer = load_model(), Tokenizer.load()
    if texts is None:
        snippet = read_config()["results"]["snippet"]["text"]
        return Subject("demo", model, (torch.tensor(tokenizer.encode(snippet)),))
    plays = [work.text for work in read_works(texts) if work.file in HELD_OUT]
    tokens = tuple(torch.tensor(tokenizer.encode(text)[:num_tokens]) for text in plays)
    return Subject("demo, plays", model, tokens)


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
    shape = config.pool_shape(-(-config.max_positions // BLOCK_SIZE), BLOCK_SIZE)
    cache = PagedKVCache(
        *shape,
        torch.float32 if is_quantised else form.cache_dtype,
        cache_dtype=form.cache_dtype,
        scale_granularity=form.granularity or "token",
    )
    if form.granularity in ("head", "tensor"):
        calibrate(cache, model, subject.texts[0][:CALIBRATION_TOKENS])
    manager = BlockManager(cache.num_blocks, BLOCK_SIZE, prefix_caching=False)
    nats = 0.0
    for inputs, targets in subject.windows():
        manager.allocate("window", len(inputs))
        layers = PagedLayers(cache, build_batch(manager, ["window"], [len(inputs)]))

        def attend(layer: int, *rows: Tensor, layers: PagedLayers = layers) -> Tensor:
            return layers(layer, *(each.to(cache.dtype) for each in rows)).float()

        logits = model(inputs, torch.arange(len(inputs)), attend)
        nats += float(F.cross_entropy(logits, targets, reduction="sum"))
        manager.free("window")
    return nats / subject.num_predicted


def calibrate(cache: PagedKVCache, model: LanguageModel, tokens: Tensor) -> None:
    """Set the scales so that the largest magnitude of some tokens becomes the largest element."""
    plain = ContiguousAttention(model.config)
    largest = LARGEST_ELEMENT[cache.cache_dtype]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scales = [rows.abs().amax((0, 2)) / largest for rows in (key, value)]
        if cache.scale_granularity == "tensor":
            scales = [per_head.max() for per_head in scales]
        cache.set_scales(layer, *scales)
        return plain(layer, query, key, value)

    model(tokens, torch.arange(len(tokens)), attend)
