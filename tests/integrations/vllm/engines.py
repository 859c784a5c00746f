"""vLLM's engines in this process, one at a time, and what they generate."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

OURS, THEIRS = "PAGED_OPS", "CPU_ATTN"

Tokens = list[int]


def make_prompts(vocabulary: int, lengths: Sequence[int]) -> list[Tokens]:
    """Make random prompts."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


@contextmanager
def _without_llvmlite() -> Iterator[None]:
    """Hide the compiler that vLLM's speculation loads.

    An engine that starts looks through all modules for kernels of its own, and stumbles over it.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if "llvmlite" in name}
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def engine(model: Path, backend: str = OURS, **options: Any) -> Iterator[LLM]:
    """Start an engine; it is gone after the block."""
    usual = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
        "kv_cache_memory_bytes": 32 << 20,
        "disable_log_stats": False,
    }
    with _without_llvmlite():
        llm = LLM(str(model), attention_backend=backend, **{**usual, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclass(frozen=True)
class Answers:
    """What an engine generated for a list of prompts.

    Attributes
    ----------
    tokens : list of list of int
        Greedy.
    logprobs : list of list of float
        Those of the tokens.
    metrics : mapping of str to float
        What the engine counted.
    """

    tokens: list[Tokens]
    logprobs: list[list[float]]
    metrics: Mapping[str, float] = field(default_factory=dict)


def answers(llm: LLM, prompts: Sequence[Tokens], num_tokens: int = 32) -> Answers:
    """Generate greedily."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    chosen = [output.outputs[0] for output in outputs]
    metrics = {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in llm.get_metrics()
        if hasattr(metric, "value")
    }
    logprobs = [
        [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
        for answer in chosen
    ]
    return Answers([list(answer.token_ids) for answer in chosen], logprobs, metrics)


def likelihoods(llm: LLM, texts: Sequence[Tokens]) -> torch.Tensor:
    """Return the log-probability of each token of each text but the first, one after another."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    found = [
        step[token].logprob
        for output in outputs
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert all(map(math.isfinite, found))
    return torch.tensor(found, dtype=torch.float64)
