"""SmolLM2-135M-Instruct through the paged cache: `make test-chat` brings it, else this skips.

It is looked for in ``build/smollm2``, or in the folder that ``$PAGED_SMOLLM2`` names.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_ops.bench.accuracy import FORMS, Form, Subject, folder_subject, loss
from paged_ops.bench.prefix import conversation, shared_beginning
from paged_ops.chat.__main__ import ends_of
from paged_ops.chat.conversations import Chat
from paged_ops.chat.smollm2 import PACKAGE, gguf_file, read_gguf
from paged_ops.engine import Engine
from paged_ops.integrations.transformers import PackedModel

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PAGED_SMOLLM2", ROOT / "build" / "smollm2"))
TURNS = [
    ["What is the capital of France?", "And of Italy?"],
    ["Name three colours of the rainbow.", "Which of them is the warmest?"],
    ["Write one sentence about the sea.", "Now one about the sky."],
    ["What is 2 + 2?", "And 3 + 3?"],
]

pytestmark = pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(), reason=f"no model in {FOLDER}; see make test-chat"
)


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return folder_subject(FOLDER)


def test_tokens_of_conversations_at_once_are_those_of_transformers_alone() -> None:
    """Two turns each: the second finds the first in the pool; transformers reads all of it anew."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model, theirs = load(), load()
    ends = ends_of(model, tokenizer.eos_token_id)
    engine = Engine(PackedModel(model), num_blocks=128, block_size=8, max_batch=3)
    chat = Chat(engine, tokenizer, max_new_tokens=24, ends=ends)
    chat.warm_up()
    for _ in TURNS:
        chat.open()
    for turn in range(2):
        for each, questions in zip(chat.conversations, TURNS, strict=True):
            chat.ask(each, questions[turn])
        while chat.is_answering:
            chat.step()
        for each in chat.conversations:
            assert each.request is not None
            assert each.request.num_cached > 0
            prompt = torch.tensor([each.request.prompt])
            output = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=24,
            )
            assert each.request.generated == output[0, prompt.shape[1] :].tolist()
    assert "Paris" in chat.conversations[0].dialogue.messages[1]["content"]
    assert "Rome" in chat.conversations[0].text


def test_the_folder_has_the_weights_of_the_package() -> None:
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed")
    theirs = read_gguf(gguf_file()).state_dict()
    for name, weight in load().state_dict().items():
        assert torch.equal(weight, theirs[name]), name


def test_int8_per_token_costs_at_most_a_hundredth(subject: Subject) -> None:
    plain, int8 = loss(subject, Form(torch.float32)), loss(subject, Form(torch.int8, "token"))
    assert plain < 4
    assert 0 < abs(int8 - plain) <= 0.01


@pytest.mark.parametrize("form", FORMS[1:], ids=lambda form: form.name)
def test_every_form_of_cache_shows_and_costs_little(subject: Subject, form: Form) -> None:
    short = Subject("short", subject.model, tuple(text[:129] for text in subject.texts[:2]))
    plain, got = loss(short, Form(torch.float32)), loss(short, form)
    assert got != plain
    assert got == pytest.approx(plain, abs=0.3)


def test_the_prefix_cache_changes_no_token() -> None:
    model = PackedModel(load())
    for workload in (shared_beginning, conversation):
        without, found = (workload(model, caching, num_turns=3) for caching in (False, True))
        assert found.answers == without.answers
        assert without.num_found == 0
        assert found.num_found > found.num_prompt_tokens / 3


def test_the_program_speaks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paged_ops.chat", "--model", FOLDER, "--max-new-tokens", "24"],
        input="What is the capital of France?\n@B What is 2 + 2?\n@A And of Italy?\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "A | The capital of France is Paris." in done.stdout
    assert "A | The capital of Italy is Rome." in done.stdout
    assert done.stdout.count(" found, ") == 4  # one is in the help
