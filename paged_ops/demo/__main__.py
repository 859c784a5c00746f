"""``python -m paged_ops.demo "PROMPT" ...``: a small language model answers prompts at once."""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import paged_ops
from paged_ops.demo.comparison import compare_with_contiguous
from paged_ops.demo.display import choose_display
from paged_ops.demo.model import LanguageModel, load_model
from paged_ops.demo.pool_picture import draw_owners, draw_pool, save_image
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import Engine, Occupancy, Request, Sampler, StepReport, StopRule

PROMPTS = (
    "ROMEO:",
    "HAMLET:\nTo be, or not to be",
    "JULIET:\nO Romeo, Romeo,",
    "LADY MACBETH:\nOut, damned spot",
    "PORTIA:\nThe quality of mercy",
    "If music be the food of love,",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Refused(Exception):
    """The flags or prompts ask for something that can't be done; the message says what and why."""


def number(kind: type[int] | type[float], low: int, high: int) -> Callable[[str], float]:
    """Return an argument type: an integer or a number in a range, both ends included."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"is {text}, expected {what} from {low} to {high}")
        return value

    return read


def make_parser() -> argparse.ArgumentParser:
    """Describe the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m paged_ops.demo",
        description="A small Shakespeare model completes all prompts at once: continuous batching "
        "through a paged KV cache, whose pool of blocks is drawn. Every token is then compared "
        "with that of contiguous attention.",
        epilog="Try --num-blocks 24 to see requests preempted, --temperature 0.7 for freer text.",
    )

    def add(flag: str, default: object, what: str, **options: object) -> None:
        parser.add_argument(flag, default=default, help=f"{what} (default: {default})", **options)  # type: ignore[arg-type]

    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: six built-in ones")
    add("--max-new-tokens", 96, "tokens to generate per prompt, at most", type=number(int, 1, 4096))
    add(
        "--temperature",
        0.0,
        "0 takes the likeliest token, more samples",
        type=number(float, 0, 100),
    )
    add("--seed", 0, "of the samples", type=number(int, 0, 2**31))
    add("--block-size", 8, "tokens per block", type=number(int, 1, 256))
    add("--num-blocks", 32, "blocks of the pool", type=number(int, 1, 4096))
    add("--max-batch", 3, "prompts that run at the same time", type=number(int, 1, 1024))
    add("--dtype", "float32", "of the model and the cache", choices=DTYPES)
    parser.add_argument("--image", type=Path, metavar="FILE.png", help="draw the pool over time")
    return parser


def refuse_missing(flags: argparse.Namespace) -> None:
    """Refuse to start without what the run would miss only at its end, or with a bare traceback."""
    image: Path | None = flags.image
    for name in ["safetensors", "tokenizers"] + ["matplotlib"] * (image is not None):
        if importlib.util.find_spec(name) is None:
            raise Refused(f"{name} is not installed: pip install 'paged-ops[demo]'")
    if image is not None and image.suffix.lower() != ".png":
        raise Refused(f"--image is {image}, expected a name that ends in .png")
    if image is not None and not image.absolute().parent.is_dir():
        raise Refused(f"--image is {image}, but there is no such folder")


def end_of_speech(tokenizer: Tokenizer, max_new_tokens: int) -> StopRule:
    """Stop rule: at a blank line, once a speech of reasonable length is there; or at a work's end.

    So answers end where a speech ends, and requests leave the batch at different steps.
    """

    def stop(generated: Sequence[int]) -> bool:
        if generated[-1] == tokenizer.end_of_text:
            return True
        enough = len(generated) >= max_new_tokens // 2
        return enough and tokenizer.decode(generated[-2:]).endswith("\n\n")

    return stop


def prepare(flags: argparse.Namespace, prompts: Sequence[str], tokenizer: Tokenizer) -> Engine:
    """Build the engine and queue every prompt, or refuse, naming the flag or prompt at fault."""
    try:
        engine = Engine(
            load_model(dtype=DTYPES[flags.dtype]),
            num_blocks=flags.num_blocks,
            block_size=flags.block_size,
            max_batch=flags.max_batch,
            sampler=Sampler(flags.temperature, flags.seed),
        )
    except MemoryError as error:
        raise Refused(f"--num-blocks is {flags.num_blocks}: {error}") from error
    limit = engine.model.config.max_positions
    stop = end_of_speech(tokenizer, flags.max_new_tokens)
    for number, prompt in enumerate(prompts, 1):
        tokens = tokenizer.encode(prompt)
        if not 1 <= len(tokens) <= limit:
            raise Refused(f"prompt {number} has {len(tokens)} tokens, expected 1 to {limit}")
        new = min(flags.max_new_tokens, limit - len(tokens) + 1)
        try:
            engine.submit(tokens, new, stop)
        except ValueError as error:
            message = f"prompt {number}: {error}; raise --num-blocks or --block-size"
            raise Refused(message) from error
    return engine


def shorten(prompt: str) -> str:
    """Return the prompt as a label: one printable line of at most 40 characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in prompt).split())
    return line if len(line) <= 40 else line[:39] + "…"


def run(
    engine: Engine, tokenizer: Tokenizer, *, live: bool, in_colour: bool
) -> tuple[list[StepReport], float]:
    """Run every request to its end and show the text as it comes; return the steps and seconds."""
    display = choose_display(engine, tokenizer, live=live, in_colour=in_colour)
    reports = []
    started = time.perf_counter()
    try:
        for report in engine.run():
            reports.append(report)
            display.show(report)
    finally:
        seconds = time.perf_counter() - started
        display.close()
    return reports, seconds


def summarise(requests: Sequence[Request], reports: Sequence[StepReport], seconds: float) -> str:
    """Say how much was generated, how fast, and how often blocks changed hands."""
    generated = sum(len(request.generated) for request in requests)
    preemptions = sum(request.preemptions for request in requests)
    num_computed = sum(report.num_computed for report in reports)
    columns = zip(*(report.occupancy.owners for report in reports), strict=True)
    owners = [set(column) - {-1} for column in columns]
    return (
        f"{generated} tokens in {seconds:.2f} s: {generated / seconds:.0f} tokens/s "
        f"({len(reports)} steps; {num_computed} tokens computed with the prompts)\n"
        f"{sum(map(bool, owners))} blocks were used, {sum(len(each) > 1 for each in owners)} of "
        f"them by several requests in turn; requests lost their blocks {preemptions} times"
    )


def reserved(engine: Engine, occupancy: Occupancy) -> str:
    """Say what the requests in the pool would take if each reserved all the model's positions."""
    requests = len(set(occupancy.owners) - {-1})
    positions = engine.model.config.max_positions
    blocks = -(-positions // occupancy.block_size)
    return (
        f"   reserving all {positions} positions would take {blocks} blocks per request, "
        f"{blocks * requests} in all"
    )


def check(model: LanguageModel, requests: Sequence[Request], sampler: Sampler) -> int:
    """Compare with contiguous attention, print the outcome, return the exit code."""
    result = compare_with_contiguous(model, requests, sampler)
    if result.mismatch:
        print(f"check FAILED: {result.mismatch}", file=sys.stderr)
        return 1
    tied = f", {result.tied} tied with it (scores within {result.worst_gap:.2g})"
    print(
        f"check: {result.equal} tokens equal to contiguous scaled_dot_product_attention"
        + tied * bool(result.tied)
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line. Default: that of the process.

    Returns
    -------
    int
        0, or 1 if a token differs from that of contiguous attention.

    Raises
    ------
    SystemExit
        Code 2, after a message, if a flag or prompt is refused.
    """
    parser = make_parser()
    flags = parser.parse_args(arguments)
    prompts = flags.prompts or PROMPTS
    # The model's products are too small to be worth sharing among threads.
    torch.set_num_threads(1)
    try:
        refuse_missing(flags)
        tokenizer = Tokenizer.load()
        engine = prepare(flags, prompts, tokenizer)
    except Refused as error:
        parser.error(str(error))
    labels = [shorten(prompt) for prompt in prompts]
    live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    in_colour = live and not os.environ.get("NO_COLOR")
    width = os.get_terminal_size().columns if live else 80

    def print_pool(title: str, occupancy: Occupancy) -> None:
        print(title)
        print("\n".join(draw_pool(occupancy, width=width, in_colour=in_colour)))
        for line in draw_owners(occupancy, labels, in_colour=in_colour):
            print(line)

    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    print(
        f"{len(prompts)} prompts, at most {flags.max_batch} at a time; model: {parameters:,} "
        f"parameters, {flags.dtype}; kernel: {paged_ops.backend_info().cpu_isa}\n"
    )
    print_pool("pool before", engine.occupancy())
    print()
    requests = engine.requests  # before it forgets them, each when it ends
    reports, seconds = run(engine, tokenizer, live=live, in_colour=in_colour)
    print()
    history = [report.occupancy for report in reports]
    fullest = max(history, key=lambda occupancy: (occupancy.used, occupancy.live_tokens))
    print_pool(f"pool at its fullest, step {fullest.step}", fullest)
    print(reserved(engine, fullest) + "\n")
    print_pool("pool after", engine.occupancy())
    print("\n" + summarise(requests, reports, seconds))
    if flags.image is not None:
        try:
            preempted_at = [report.step for report in reports if report.preempted]
            size = save_image(history, labels, flags.image, preempted_at=preempted_at)
        except OSError as error:
            parser.error(f"--image is {flags.image}, but it can't be written: {error.strerror}")
        print(f"image: {flags.image}, {size[0]} x {size[1]} pixels")
    assert isinstance(engine.model, LanguageModel)
    return check(engine.model, requests, engine.sampler)


def main_of_a_process() -> int:
    """Run `main` as a well-behaved program: any encoding, a closed pipe, Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whatever is still buffered has nowhere to go: let the interpreter flush it into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main_of_a_process())
