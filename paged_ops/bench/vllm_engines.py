"""Whole engines of vLLM: with paged_ops' attention and with vLLM's own, step by step in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OURS, THEIRS = "PAGED_OPS", "CPU_ATTN"

_LAYERS = 4

# Qwen3-0.6B with fewer of its 28 layers, and its vocabulary cut with them, so that attention has
# the share of a step that it has there.
_VOCABULARY = 151936 // 28 * _LAYERS
_KV_HEADS, _HEAD_SIZE = 8, 128
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_SIZE,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Workload:
    """What an engine has to do.

    Attributes
    ----------
    running : int
        Requests that decode.
    length : int
        Their tokens before the first measured step.
    prompt : int
        Tokens of a prompt that arrives, or 0.
    chunk : int
        Tokens that a step may have.
    """

    running: int
    length: int
    prompt: int
    chunk: int


WORKLOADS = {
    "prefill": Workload(0, 0, 4096, 4096),
    "decode": Workload(16, 2048, 0, 2048),
    "mixed": Workload(8, 2048, 2048, 512 + 8),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9, help="measured steps, or prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the engine on paged_ops")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the results here")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    os.environ.update(PAGED_VLLM="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        config = {**_MODEL, "dtype": options.dtype}
        Path(folder, "config.json").write_text(json.dumps(config))
        for name in options.only:
            results[name] = measure(folder, WORKLOADS[name], options)
            _print(name, results[name])
    return results


def measure(
    folder: str, work: Workload, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Run a workload in two engines of one process, in turn.

    Returns
    -------
    dict of str to dict of str to float
        For each backend the medians of the rounds: milliseconds of a round, of the attention in
        it, and tokens per second. A round is a step, or all steps to an arriving prompt's first
        token.
    """
    cache_dtypes = {OURS: options.kv_cache_dtype, THEIRS: "auto"}
    engines = {
        backend: _Engine(folder, backend, cache_dtype, work, options)
        for backend, cache_dtype in cache_dtypes.items()
    }
    rounds: dict[str, list[tuple[float, float, int]]] = {backend: [] for backend in engines}
    for number in range(options.rounds + 1):
        order = list(engines.items())
        for backend, engine in order if number % 2 else order[::-1]:
            sample = engine.round()
            if number:  # the first one warms up
                rounds[backend].append(sample)
    return {backend: _summary(samples) for backend, samples in rounds.items()}


def _summary(samples: list[tuple[float, float, int]]) -> dict[str, float]:
    seconds = statistics.median(sample[0] for sample in samples)
    attention = statistics.median(sample[1] for sample in samples)
    tokens = samples[0][2]
    return {
        "milliseconds": 1e3 * seconds,
        "attention_milliseconds": 1e3 * attention,
        "tokens_per_second": tokens / seconds,
    }


def _print(name: str, result: Mapping[str, Mapping[str, float]]) -> None:
    for backend, found in result.items():
        share = found["attention_milliseconds"] / found["milliseconds"]
        what = "to the first token" if WORKLOADS[name].prompt else "a step"
        print(
            f"{name:8} {backend:10} {found['milliseconds']:8.1f} ms {what}  "
            f"{found['tokens_per_second']:8.1f} tokens/s  "
            f"attention {found['attention_milliseconds']:7.1f} ms, {share:.0%}",
            flush=True,
        )
    keys = "milliseconds", "attention_milliseconds"
    whole, alone = (result[OURS][key] / result[THEIRS][key] for key in keys)
    print(f"{name:8} time over vLLM's own: {whole:.2f}; attention alone: {alone:.2f}", flush=True)


class _Engine:
    """An engine with its requests, which do one round when asked."""

    def __init__(
        self,
        folder: str,
        backend: str,
        cache_dtype: str,
        work: Workload,
        options: argparse.Namespace,
    ) -> None:
        from vllm import LLM

        tokens = (work.running + 1) * (work.length + options.rounds + 2) + 2 * work.prompt
        width = torch.finfo(getattr(torch, options.dtype)).bits // 8
        page = 2 * _KV_HEADS * _HEAD_SIZE * width * _LAYERS * options.block_size
        blocks = tokens // options.block_size + 2 * (work.running + 4)
        self._llm = LLM(
            folder,
            load_format="dummy",
            dtype=options.dtype,
            attention_backend=backend,
            kv_cache_dtype=cache_dtype,
            block_size=options.block_size,
            max_model_len=8192,
            max_num_seqs=work.running + 1,
            max_num_batched_tokens=work.chunk,
            kv_cache_memory_bytes=page * blocks,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
        )
        self._engine = self._llm.llm_engine
        self._work = work
        self._generator = torch.Generator().manual_seed(0)
        self._attention = 0.0
        self._llm.apply_model(self._watch)
        self._names = iter(range(1_000_000))
        started = {self._add(work.length, 4 * options.rounds + 64) for _ in range(work.running)}
        while started:
            started -= {output.request_id for output in self._engine.step()}

    def _watch(self, model: torch.nn.Module) -> None:
        """Take the time of every layer's attention and of its writing."""
        for module in model.modules():
            impl = getattr(module, "impl", None)
            for name in ("forward", "do_kv_cache_update"):
                if hasattr(impl, name):
                    setattr(impl, name, self._timed(getattr(impl, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **named)
            self._attention += time.perf_counter() - start
            return result

        return timed

    def _add(self, length: int, answer: int) -> str:
        from vllm import SamplingParams

        tokens = torch.randint(3, _VOCABULARY, (length,), generator=self._generator).tolist()
        name = str(next(self._names))
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def round(self) -> tuple[float, float, int]:
        """Do a step; or where a prompt arrives, steps until its first token.

        Returns
        -------
        tuple of float, float and int
            Seconds, those of attention among them, and tokens that went in.
        """
        self._attention = 0.0
        prompt = self._work.prompt
        start = time.perf_counter()
        name = self._add(prompt, 1) if prompt else None
        steps = 0
        while True:
            outputs = self._engine.step()
            steps += 1
            if name is None or any(output.request_id == name for output in outputs):
                break
        seconds = time.perf_counter() - start
        return seconds, self._attention, prompt + steps * self._work.running
