"""Serve prompts with a transformers model: continuous batching, prefix cache, streaming.

    python docs/examples/serve.py                                 # the demo's small model
    python docs/examples/serve.py --model FOLDER "Once upon a time" "A long time ago"

Prompts arrive one after another, join the batch between two steps, and leave it when they are done.
What they begin with in common is computed once. When the pool is full, the youngest request gives
up its blocks and comes back later. Every finished line is printed with its request's number. Who
can't be served, or fails, is told so, and the others don't notice; who is done is forgotten.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_ops.demo.llama import load_llama, load_tokenizer
from paged_ops.engine import Engine, Request, Sampler, State
from paged_ops.integrations.transformers import PackedModel

SCENE = (
    "ACT I. SCENE I. A public place.\n\nEnter the KING, with his Lords and Attendants; then a "
    "Messenger, in haste.\n\n"
)
PROMPTS = [SCENE + speaker for speaker in ("KING.\n", "MESSENGER.\n", "FIRST LORD.\n", "ALL.\n")]


@dataclass(eq=False)
class Client:
    """Who sent a prompt: prints the answer's lines as they come, and keeps the times."""

    number: int
    request: Request
    arrived: float
    first_token: float = 0.0
    printed: int = 0

    def receive(self, tokenizer: AutoTokenizer, now: float) -> None:
        """Take note of a new token or of the end, and print what it completes."""
        self.first_token = self.first_token or now
        done = self.request.has_ended
        text = tokenizer.decode(self.request.generated, skip_special_tokens=True)
        end = len(text) if done else text.rfind("\n") + 1
        for line in filter(None, text[self.printed : end].splitlines()):
            print(f"{self.number:>3} | {line}", flush=True)
        self.printed = max(self.printed, end)
        if self.request.state is State.FAILED:
            print(f"{self.number:>3} | failed: {self.request.error}", flush=True)


class Server:
    """Feeds an engine with prompts at their times of arrival, and hands its tokens out.

    Parameters
    ----------
    engine : Engine
        Schedules, keeps the books, and runs the model.
    tokenizer
        Of the model.
    """

    def __init__(self, engine: Engine, tokenizer: AutoTokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.clients: dict[int, Client] = {}  # by the index of the request, until it ends
        self.waits: deque[float] = deque(maxlen=1000)  # for the first token, of the last clients
        self.num_prompts = self.num_tokens = self.num_preemptions = self.largest_batch = 0
        self.num_refused, self.last_refusal = 0, ""
        self.least_free = engine.manager.num_blocks

    def run(self, prompts: Sequence[str], new_tokens: int, interval: float) -> float:
        """Serve all prompts, one arriving every `interval` seconds; return the seconds it took."""
        started = time.perf_counter()
        waiting = deque(enumerate(prompts))
        while waiting or self.clients:
            now = time.perf_counter() - started
            while waiting and waiting[0][0] * interval <= now:
                self.submit(waiting.popleft()[1], new_tokens, now)
            if self.clients:
                self.step(started)
            elif waiting:
                time.sleep(max(0.0, waiting[0][0] * interval - now))
        return time.perf_counter() - started

    def step(self, started: float) -> None:
        """Let the engine make a step, and tell the clients what came of it."""
        report = self.engine.step()
        now = time.perf_counter() - started
        self.largest_batch = max(self.largest_batch, len(report.tokens))
        self.least_free = min(self.least_free, self.engine.manager.num_free)
        for index in dict.fromkeys([*report.tokens, *report.failed]):
            client = self.clients[index]
            try:
                client.receive(self.tokenizer, now)
            except OSError:  # nobody listens any longer
                self.engine.cancel(client.request)
            if client.request.has_ended:
                self.forget(client)

    def forget(self, client: Client) -> None:
        """Keep of a client that is served only what the summary says of all."""
        del self.clients[client.request.index]
        self.waits.append(1e3 * (client.first_token - client.arrived))
        self.num_tokens += len(client.request.generated)
        self.num_preemptions += client.request.preemptions

    def submit(self, prompt: str, new_tokens: int, now: float) -> None:
        """Queue a prompt; an answer ends at the model's end of text, or where positions end."""
        number, self.num_prompts = self.num_prompts, self.num_prompts + 1
        tokens = self.tokenizer(prompt)["input_ids"]
        limit = self.engine.model.config.max_positions - len(tokens) + 1
        end = self.tokenizer.eos_token_id
        try:
            request = self.engine.submit(
                tokens, max(1, min(new_tokens, limit)), lambda generated: generated[-1] == end
            )
        except ValueError as error:  # a prompt that the model or the pool can't hold
            self.num_refused, self.last_refusal = self.num_refused + 1, str(error)
            print(f"{number:>3} | refused: {error}", flush=True)
        else:
            self.clients[request.index] = Client(number, request, now)

    def summary(self, seconds: float) -> str:
        """Say how fast it was, and what the pool did."""
        stats = self.engine.manager.stats()
        used = stats.num_blocks - self.least_free
        return (
            f"{self.num_prompts} requests, {self.num_tokens} tokens in {seconds:.2f} s: "
            f"{self.num_tokens / seconds:.1f} tokens/s\n"
            f"time to first token: median {statistics.median(self.waits or [0]):.1f} ms, "
            f"longest {max(self.waits, default=0):.1f} ms\n"
            f"largest batch {self.largest_batch}, {self.num_preemptions} preemptions, {used} of "
            f"{stats.num_blocks} blocks in use at most\n"
            f"{stats.hit_tokens} of {stats.prompt_tokens} prompt tokens found in the cache "
            f"({stats.hit_rate:.0%})"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", default=PROMPTS)
    parser.add_argument("--model", metavar="FOLDER", help="of transformers; default: the demo's")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--new-tokens", type=int, default=80, help="of each answer, at most")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token")
    parser.add_argument("--num-blocks", type=int, default=64, help="of the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--max-batch", type=int, default=8, help="requests that run at once")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between prompts")
    parser.add_argument("--repeat", type=int, default=2, help="how often the prompts are sent")
    return parser.parse_args(arguments)


def load(folder: str | None, dtype: torch.dtype) -> tuple[PackedModel, AutoTokenizer]:
    """Load a model and its tokenizer; nothing is downloaded for the demo's."""
    if folder is None:
        torch.set_num_threads(1)  # its products are too small to share
        return PackedModel(load_llama(dtype=dtype)), load_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return PackedModel(model), AutoTokenizer.from_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the prompts of the command line and print the summary."""
    flags = parse(arguments)
    model, tokenizer = load(flags.model, getattr(torch, flags.dtype))
    engine = Engine(
        model,
        num_blocks=flags.num_blocks,
        block_size=flags.block_size,
        max_batch=flags.max_batch,
        sampler=Sampler(flags.temperature),
    )
    server = Server(engine, tokenizer)
    seconds = server.run(flags.prompts * flags.repeat, flags.new_tokens, flags.interval)
    print("\n" + server.summary(seconds))
    if server.num_refused:
        sys.exit(f"{server.num_refused} prompts were refused, the last: {server.last_refusal}")


if __name__ == "__main__":
    main()
