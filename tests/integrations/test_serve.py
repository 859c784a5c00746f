"""Serving: the demo's model as transformers knows it, and the example around it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from paged_ops.batch.batch import build_batch
from paged_ops.demo.llama import load_llama, load_tokenizer
from paged_ops.demo.model import ContiguousAttention, load_model
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import Engine, PagedLayers, Sampler
from paged_ops.integrations.transformers import PackedModel
from tests.integrations.models import FAMILIES, make_model, make_prompts, peer

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "serve.py"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def serve() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("serve", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve"]


def test_the_demos_model_is_the_same_in_transformers(tmp_path: Path) -> None:
    tokens = torch.randint(0, 2048, (40,))
    ours = load_model()
    with torch.no_grad():
        expected = ours(tokens, torch.arange(40), ContiguousAttention(ours.config))
        torch.testing.assert_close(load_llama()(tokens[None]).logits[0], expected)
        load_llama().save_pretrained(tmp_path)
        reread = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(reread(tokens[None]).logits[0], expected)
    text = "ROMEO:\nO, she doth teach the torches to burn bright!"
    assert load_tokenizer()(text)["input_ids"] == Tokenizer.load().encode(text)


def test_in_bfloat16_the_angles_stay_float32() -> None:
    model = load_llama(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_serves_every_family_with_preemption(family: str) -> None:
    """Five prompts through a pool that is too small for them: each answer is as when alone."""
    model = make_model(family)
    padded = make_prompts("left")
    rows = zip(padded["input_ids"], padded["attention_mask"], strict=True)
    prompts = [row[mask.bool()].tolist() for row, mask in rows]
    prompts.append([*prompts[0][:16], 7, 8, 9])
    model.set_attn_implementation(peer(family))
    expected = []
    for prompt in prompts:
        options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
        output = model.generate(torch.tensor([prompt]), **options)
        expected.append(output[0, len(prompt) :].tolist())
    engine = Engine(PackedModel(model), num_blocks=14, block_size=8, max_batch=5)
    requests = [engine.submit(prompt, 32) for prompt in prompts]
    for _ in engine.run():
        engine.manager.check()
    assert [request.generated for request in requests] == expected
    assert sum(request.preemptions for request in requests) > 0
    assert engine.manager.stats().hit_tokens >= 16


def test_prompts_compute_only_what_is_not_cached() -> None:
    """The second prompt finds two blocks; a request that was preempted finds what is left."""
    engine = Engine(load_model(), num_blocks=16, block_size=4, max_batch=2)
    first = engine.submit(list(range(10, 21)), 3)
    assert [report.num_computed for report in engine.run()] == [11, 1, 1]
    second = engine.submit([*list(range(10, 19)), 5, 6], 3)
    assert [report.num_computed for report in engine.run()] == [3, 1, 1]
    assert (first.num_cached, second.num_cached) == (0, 8)
    alone = Engine(load_model(), num_blocks=16, block_size=4, max_batch=1)
    expected = alone.submit(second.prompt, 3)
    list(alone.run())
    assert second.generated == expected.generated


def test_options_reach_the_op() -> None:
    """`PagedLayers` passes on what a model's attention asks for."""
    engine = Engine(load_model(), num_blocks=4, block_size=4, max_batch=1)
    engine.manager.allocate(0, 5)
    batch = build_batch(engine.manager, [0], [5])
    attend = PagedLayers(engine.cache, batch)
    query, key, value = torch.randn(5, 6, 32), torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    whole = attend(0, query, key, value)
    window = attend(0, query, key, value, sliding_window=1)
    torch.testing.assert_close(window, value.repeat_interleave(3, 1))
    assert not torch.equal(window, whole)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 200


def test_the_example_streams_greedy_answers_of_the_model(
    serve: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.main(["--temperature", "0", "--new-tokens", "40", "--interval", "0", "--repeat", "1"])
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    model, tokenizer = load_llama(), load_tokenizer()
    for number, prompt in enumerate(serve.PROMPTS):
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = model.generate(tokens, max_new_tokens=40, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True)
        mine = [line[6:] for line in lines if line.startswith(f"{number:>3} | ")]
        assert mine == list(filter(None, text.splitlines()))


def test_the_example_preempts_and_shares_and_says_so(
    serve: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.main(["--num-blocks", "16", "--interval", "0", "--new-tokens", "60"])
    summary = capsys.readouterr().out.split("\n\n")[-1]
    assert "8 requests, 480 tokens in " in summary
    assert "tokens/s" in summary
    assert "time to first token: median" in summary
    preemptions = int(summary.split(" preemptions")[0].split()[-1])
    assert preemptions > 0
    assert "16 of 16 blocks in use at most" in summary
    assert int(summary.split(" of ")[-2].split()[-1]) > 0


def test_the_example_serves_a_folder_and_waits_for_late_prompts(
    serve: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_llama().save_pretrained(tmp_path)
    load_tokenizer().save_pretrained(tmp_path)
    options = ["--new-tokens", "2", "--interval", "0.2", "--repeat", "1", "--dtype", "bfloat16"]
    serve.main(["--model", str(tmp_path), *options, "ROMEO:", "JULIET:"])
    assert "2 requests, 4 tokens" in capsys.readouterr().out


def test_the_example_refuses_a_prompt_that_does_not_fit(serve: ModuleType) -> None:
    with pytest.raises(SystemExit, match="need 3 blocks of 16, but the pool has 2"):
        serve.main(["--num-blocks", "2", "--new-tokens", "40", "ROMEO:"])


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    model, tokenizer = PackedModel(load_llama()), load_tokenizer()
    generated = []
    for max_batch in (1, 4):
        engine = Engine(
            model, num_blocks=64, block_size=8, max_batch=max_batch, sampler=Sampler(0.8, 5)
        )
        requests = [engine.submit(tokenizer.encode(f"{name}:"), 20) for name in ("A", "B", "CC")]
        list(engine.run())
        generated.append([request.generated for request in requests])
    assert generated[0] == generated[1]
