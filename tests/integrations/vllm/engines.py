"""vLLM's engines in this process, one at a time, and what they generate."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

OURS, THEIRS = "PAGED_OPS", "CPU_ATTN"


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
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]


def answers(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int = 32) -> Answers:
    """Generate greedily."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
    )
    chosen = [output.outputs[0] for output in outputs]
    return Answers(
        [list(output.token_ids) for output in chosen],
        [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in chosen
        ],
    )
