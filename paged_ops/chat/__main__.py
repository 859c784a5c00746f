"""``python -m paged_ops.chat``: conversations with a language model, several at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import paged_ops
from paged_ops.chat import lines, screen
from paged_ops.chat.console import HELP, Console
from paged_ops.chat.conversations import Chat
from paged_ops.engine import Engine, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL = Path("build", "smollm2")
SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Keep your answers short."
)
"""What SmolLM2 was trained with, and a sentence more: it wanders off otherwise."""


def make_parser() -> argparse.ArgumentParser:
    """Describe the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m paged_ops.chat",
        description="Talk to a language model in several conversations at once: their turns are "
        "computed together, out of one pool of blocks, in which what they have in common is kept "
        "once. Without a terminal, messages are read as lines.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(flag: str, default: object, what: str, **options: object) -> None:
        parser.add_argument(flag, default=default, help=f"{what} (default: {default})", **options)  # type: ignore[arg-type]

    add("--model", MODEL, "a folder of transformers with a chat template", type=Path)
    parser.add_argument("--system", default=SYSTEM, help="what each conversation begins with")
    add("--dtype", "float32", "of the model and the cache", choices=("float32", "bfloat16"))
    add("--temperature", 0.0, "0 takes the likeliest token, more samples", type=float)
    add("--seed", 0, "of the samples", type=int)
    add("--max-new-tokens", 200, "of an answer, at most", type=int)
    add("--num-blocks", 192, "blocks of the pool", type=int)
    add("--block-size", 8, "tokens per block", type=int)
    add("--max-batch", 8, "answers that are computed at the same time", type=int)
    return parser


def load(flags: argparse.Namespace) -> Chat:
    """Load the model and make a pool for it.

    Raises
    ------
    ValueError
        It can't be done, with the reason.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from paged_ops.integrations.transformers import PackedModel

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    if not tokenizer.chat_template:
        raise ValueError(f"--model is {flags.model}, whose tokenizer has no chat template")
    dtype = getattr(torch, flags.dtype)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=dtype).eval()
    engine = Engine(
        PackedModel(model),
        num_blocks=flags.num_blocks,
        block_size=flags.block_size,
        max_batch=flags.max_batch,
        sampler=Sampler(flags.temperature, flags.seed),
    )
    chat = Chat(
        engine,
        tokenizer,
        system=flags.system,
        max_new_tokens=flags.max_new_tokens,
        ends=ends_of(model, tokenizer.eos_token_id),
    )
    chat.warm_up()
    return chat


def ends_of(model: PreTrainedModel, eos: int | None) -> list[int]:
    """Return the tokens that end what a model says."""
    configured = model.generation_config.eos_token_id
    ends = [eos, *(configured if isinstance(configured, list) else [configured])]
    return [end for end in ends if end is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat; return the exit code.

    Raises
    ------
    SystemExit
        Code 2, after a message, if a flag is refused.
    """
    parser = make_parser()
    flags = parser.parse_args(arguments)
    if not (flags.model / "config.json").is_file():
        parser.error(
            f"--model is {flags.model}, where no model is; `make chat` brings "
            f"SmolLM2-135M-Instruct there, for which it needs a network the first time"
        )
    try:
        chat = load(flags)
    except ImportError as error:
        parser.error(f"{error}: pip install 'paged-ops[chat]'")
    except (ValueError, MemoryError) as error:
        parser.error(str(error))
    parameters = sum(each.numel() for each in chat.engine.model.parameters())
    print(
        f"{flags.model.name}: {parameters:,} parameters, {flags.dtype}; "
        f"kernel: {paged_ops.backend_info().cpu_isa}\n{HELP}\n",
        flush=True,
    )
    console = Console(chat)
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        screen.run(console, in_colour=not os.environ.get("NO_COLOR"))
    else:
        lines.run(console, sys.stdin.fileno())
    return 0


def main_of_a_process() -> int:
    """Run `main` as a well-behaved program: any encoding, a closed pipe, Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
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
