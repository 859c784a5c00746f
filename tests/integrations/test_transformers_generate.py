"""generate() and generate_batch() over the paged cache: the same tokens as without it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

from paged_ops.integrations import transformers as paged_transformers
from paged_ops.integrations.transformers import PagedCache, continuous_batching
from paged_ops.integrations.transformers import attention as paged_attention
from tests.integrations.models import FAMILIES, WINDOW, make_model, make_prompts, peer

NEW_TOKENS = 64
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models' products are too small to share
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of padding on the right
    paged_transformers.register()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    return make_model(family)


def contiguous(model: PreTrainedModel, family: str, **options: Any) -> torch.Tensor:
    """Generate with transformers' own cache and attention."""
    model.set_attn_implementation(peer(family))
    torch.manual_seed(1)
    return model.generate(**options)


def paged(model: PreTrainedModel, **options: Any) -> tuple[torch.Tensor, PagedCache]:
    """Generate with the paged cache, prove its books, and return it as well."""
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=120, block_size=8)
    torch.manual_seed(1)
    tokens = model.generate(cache=cache, **options)
    cache.groups.check()
    return tokens, cache


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_greedy_tokens_are_the_same(model: PreTrainedModel, family: str, padding: str) -> None:
    prompts = make_prompts(padding)
    expected = contiguous(model, family, **prompts, **OPTIONS)
    tokens, _ = paged(model, **prompts, **OPTIONS)
    assert tokens.shape == (4, 20 + NEW_TOKENS)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("mode", [{"do_sample": True, "top_k": 50}, {"num_beams": 3}])
def test_sampled_tokens_and_beams_are_the_same(
    model: PreTrainedModel, family: str, padding: str, mode: dict[str, Any]
) -> None:
    options = make_prompts(padding) | OPTIONS | mode
    expected = contiguous(model, family, **options)
    tokens, cache = paged(model, **options)
    assert torch.equal(tokens, expected)
    if "num_beams" in mode:
        alone = sum(-(-cache.groups.num_tokens(r) // 8) for r in cache._rows.requests)
        for name, pool in cache.pools.items():
            used = cache.groups[name].num_used
            assert used < alone  # beams share blocks, and a window gives some back
            assert pool.num_blocks > used


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "sinks"])
def test_the_models_feel_each_option(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option the tokens differ, so that equal tokens prove that it is honoured."""
    family = {"sliding_window": "mistral", "softcap": "gemma2", "sinks": "gpt-oss"}[option]
    model, prompts = make_model(family), make_prompts("none")
    expected, _ = paged(model, **prompts, **OPTIONS)
    original = paged_attention.attention_options
    dropped = {"sliding_window": 10_000, "softcap": 0.0, "sinks": None}[option]

    def without(*args: Any) -> dict[str, Any]:
        return original(*args) | {option: dropped}

    monkeypatch.setattr(paged_attention, "attention_options", without)
    if option == "sliding_window":
        with pytest.raises(ValueError, match="sliding_window 10000, but its cache was made for 12"):
            paged(model, **prompts, **OPTIONS)
        model = make_model(family, sliding_window=10_000)
    assert not torch.equal(paged(model, **prompts, **OPTIONS)[0], expected)


@pytest.mark.parametrize("prompt_lookup", [True, False])
def test_assisted_decoding_gives_the_same_tokens(
    model: PreTrainedModel, family: str, prompt_lookup: bool
) -> None:
    """Candidates that are turned down are cut off again; half of a near copy's are."""
    prompt = {name: tensor[:1] for name, tensor in make_prompts("none").items()}
    expected = contiguous(model, family, **prompt, **OPTIONS)
    if prompt_lookup:
        options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    else:
        draft = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.004)
        options = {"assistant_model": draft}
    tokens, cache = paged(model, **prompt, **OPTIONS, **options)
    assert torch.equal(tokens, expected)
    assert cache.get_seq_length() == 20 + NEW_TOKENS - 1


def test_a_prompt_in_chunks_and_an_answer_in_two_calls_give_the_same_tokens(
    model: PreTrainedModel, family: str
) -> None:
    prompts = make_prompts("left")
    expected = contiguous(model, family, **prompts, **OPTIONS)
    tokens, _ = paged(model, **prompts, **OPTIONS, prefill_chunk_size=7)
    assert torch.equal(tokens, expected)
    first, cache = paged(model, **prompts, **(OPTIONS | {"max_new_tokens": 30}))
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 30), value=1)
    rest = OPTIONS | {"max_new_tokens": NEW_TOKENS - 30, "attention_mask": mask}
    assert torch.equal(model.generate(first, cache=cache, **rest), expected)


def test_blocks_behind_the_window_go_back_while_a_request_runs() -> None:
    model = make_model("gpt-oss")
    _, cache = paged(model, **make_prompts("none"), **OPTIONS)
    assert cache.groups["full"].num_used == 4 * 11  # 83 tokens in blocks of 8
    assert cache.groups[f"window {WINDOW}"].num_used <= 4 * 3


def test_continuous_batching_gives_the_same_tokens(
    model: PreTrainedModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests of unequal lengths through transformers' own scheduler and pool."""
    padded = make_prompts("left")
    rows = zip(padded["input_ids"], padded["attention_mask"], strict=True)
    prompts = [row[mask.bool()].tolist() for row, mask in rows]
    expected = [
        contiguous(model, family, input_ids=torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :]
        for prompt in prompts
    ]
    calls = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return torch.ops.paged.attention(*args, **options)

    monkeypatch.setattr(continuous_batching, "attention", counted)
    monkeypatch.setitem(AttentionInterface._global_mapping, "paged|eager", None)  # put back after
    paged_transformers.replace_paged_eager()
    model.set_attn_implementation("paged|eager")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=64
        ),
        progress_bar=False,
    )
    tokens = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    for prompt, answer in zip(prompts, expected, strict=True):
        assert tokens[tuple(prompt)] == answer.tolist()
    assert len(calls) >= NEW_TOKENS * model.config.num_hidden_layers


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_under_autocast_a_cache_takes_what_the_layers_compute(
    model: PreTrainedModel, family: str, padding: str, cache_dtype: torch.dtype | None
) -> None:
    """Keys are float32 after their rotation, values bfloat16; transformers' caches take both."""
    prompts = make_prompts(padding)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model.set_attn_implementation(peer(family))
        expected = model(**prompts).logits
        model.set_attn_implementation("paged_ops")
        cache = PagedCache(model, num_blocks=40, block_size=8, cache_dtype=cache_dtype)
        logits = model(**prompts, cache=cache).logits
        model.generate(
            **prompts, **(OPTIONS | {"max_new_tokens": 4}), cache=PagedCache(model, num_blocks=40)
        )
    assert next(iter(cache.pools.values())).dtype == torch.float32
    real = prompts["attention_mask"].bool()
    assert logits.dtype == expected.dtype
    # The mean: in bfloat16 a token may go to another expert now and then.
    error = (logits - expected)[real].float().abs().mean() / expected[real].float().abs().mean()
    assert error < (0.05 if cache_dtype is None else 0.1)


def test_a_prompt_is_reused_by_copies_that_share_its_blocks(
    model: PreTrainedModel, family: str
) -> None:
    """As transformers documents it: the prompt once, then a deep copy of its cache per answer."""
    prompt = make_prompts("none")["input_ids"][:1]
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=40, block_size=8)
    with torch.no_grad():
        model(prompt, cache=cache)
    used = {name: cache.groups[name].num_used for name in cache.groups}
    whole = [torch.cat([prompt, torch.tensor([[token, 7, 9]])], 1) for token in (5, 6)]
    answers = []
    for tokens in whole:
        copied = copy.deepcopy(cache)
        assert all(copied.pools[name] is pool for name, pool in cache.pools.items())
        assert {name: cache.groups[name].num_used for name in used} == used
        answers.append(model.generate(tokens, cache=copied, **OPTIONS))
        cache.groups.check()
        assert cache.get_seq_length() == 20
        assert copied.get_seq_length() == 22 + NEW_TOKENS
        assert any(cache.groups[name].num_used > used[name] for name in used)
        del copied
        assert {name: cache.groups[name].num_used for name in used} == used
    for tokens, answer in zip(whole, answers, strict=True):
        assert torch.equal(answer, contiguous(model, family, input_ids=tokens, **OPTIONS))
    model.set_attn_implementation("paged_ops")
    cache.reset()
    assert all(cache.groups[name].num_used == 0 for name in used)


def test_a_copy_outlives_the_cache_that_it_was_made_of(model: PreTrainedModel) -> None:
    prompt = make_prompts("none")["input_ids"]
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=20, block_size=8)
    with torch.no_grad():
        model(prompt, cache=cache)
        first, second = copy.deepcopy(cache), copy.deepcopy(cache)
        del cache
        expected = model(prompt[:, :1], cache=first).logits
        first.reset()
        assert torch.equal(model(prompt[:, :1], cache=second).logits, expected)
        second.groups.check()
        assert second.groups.num_tokens(second._rows.requests[0]) == 21
        first.groups.check()
        del second
        assert all(first.groups[name].num_used == 0 for name in first.groups)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[5, 6]])},
        {"assistant_early_exit": 1},
    ],
)
def test_a_second_cache_inside_generate_is_refused_by_name(options: dict[str, Any]) -> None:
    model = make_model("llama")
    model.set_attn_implementation("paged_ops")
    prompt = make_prompts("none")["input_ids"][:1]
    cache = PagedCache(model, num_blocks=40)
    with pytest.raises(ValueError, match=next(iter(options))):
        model.generate(prompt, cache=cache, **OPTIONS, **options)
    cache.groups.check()
