"""One trained model in every way that an engine can run it: its tokens stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.checkpoints import save_demo
from tests.integrations.vllm.engines import (
    OURS,
    THEIRS,
    Answers,
    answers,
    engine,
    likelihoods,
    make_prompts,
)

PROMPTS = make_prompts(2048, (40, 90, 3, 120, 1, 17, 64, 33))
PROMPTS[-1] = [*PROMPTS[1][:72], *PROMPTS[0]]  # a prefix that two have in common
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
CHUNKS = {"max_num_batched_tokens": 48, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def usual(model: Path) -> Answers:
    """vLLM's own attention."""
    with engine(model, THEIRS) as llm:
        return answers(llm, PROMPTS)


def check_same(ours: Answers, theirs: Answers) -> None:
    assert ours.tokens == theirs.tokens
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({}, ()),
        ({"block_size": 16}, ()),
        ({"block_size": 5}, ()),
        (CHUNKS, ()),
        ({"block_size": 32, "enable_prefix_caching": True}, ("prefix_cache_hits",)),
        ({"speculative_config": NGRAM}, ("spec_decode_num_accepted_tokens",)),
        (
            {
                "block_size": 16,
                "enable_prefix_caching": True,
                "speculative_config": NGRAM,
                **CHUNKS,
            },
            ("prefix_cache_hits", "spec_decode_num_accepted_tokens"),
        ),
        ({"block_size": 16, "num_gpu_blocks_override": 24}, ("num_preemptions",)),
        ({"enforce_eager": False}, ()),
    ],
    ids=[
        "plain",
        "blocks of 16",
        "blocks of 5",
        "chunks",
        "prefix cache",
        "speculation",
        "all of these",
        "preemption",
        "compiled",
    ],
)
def test_the_tokens_are_those_of_vllms_own_attention(
    options: dict[str, Any], counted: tuple[str, ...], model: Path, usual: Answers
) -> None:
    with engine(model, OURS, **options) as llm:
        first = answers(llm, PROMPTS)
        second = answers(llm, PROMPTS) if "enable_prefix_caching" in options else first
    check_same(first, usual)
    check_same(second, usual)
    for name in counted:
        assert second.metrics[name] > 0


@pytest.mark.parametrize("layout", ["LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_order_of_a_pages_memory_gives_the_same_tokens(
    layout: str, model: Path, usual: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    with engine(model, OURS) as llm:
        config = llm.llm_engine.vllm_config.cache_config
        ours = answers(llm, PROMPTS)
    assert config.kv_cache_layout == layout
    check_same(ours, usual)


def test_quantised_caches_stay_near_the_models_own_words(model: Path, usual: Answers) -> None:
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, usual.tokens, strict=True)]
    with engine(model, THEIRS) as llm:
        exact = likelihoods(llm, texts)
    drift, blocks = {}, {}
    for dtype in ("auto", "int8_per_token_head", "fp8_per_token_head", "fp8", "fp8_e5m2"):
        with engine(model, OURS, dtype="bfloat16", kv_cache_dtype=dtype) as llm:
            drift[dtype] = float((likelihoods(llm, texts) - exact).abs().mean())
            blocks[dtype] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    print(drift, blocks)
    assert drift["int8_per_token_head"] < 1.5 * drift["auto"]
    assert drift["fp8_per_token_head"] < 4 * drift["auto"]
    assert drift["fp8"] < 5 * drift["auto"]
    assert drift["fp8_e5m2"] < 8 * drift["auto"]
    # Scales are counted: a token and head takes 32 + 32 + 8 bytes, where bfloat16 takes 128.
    assert blocks["int8_per_token_head"] / blocks["auto"] == pytest.approx(128 / 72, rel=0.02)
    assert blocks["fp8"] / blocks["auto"] == pytest.approx(2, rel=0.02)
