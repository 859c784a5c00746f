"""What is in the pages is the model's keys and values, for whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.models import VOCABULARY, make_model
from tests.integrations.vllm.checkpoints import HEAD_SIZE, save
from tests.integrations.vllm.engines import Answers, answers, engine, make_prompts

PROMPTS = make_prompts(VOCABULARY, (96, 64))


def served(model: Path, store: Path, cache_dtype: str) -> Answers:
    """Generate in an engine that stores blocks, and loads those that are there."""
    connector: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    options = {"block_size": 32, "kv_cache_dtype": cache_dtype, "kv_transfer_config": connector}
    with engine(model, **options) as llm:
        return answers(llm, PROMPTS, 16)


@pytest.mark.parametrize("cache_dtype", ["auto", "int8_per_token_head"])
def test_blocks_that_one_engine_stores_another_loads(cache_dtype: str, tmp_path: Path) -> None:
    llama = make_model("llama", head_dim=HEAD_SIZE)
    model, store = save(llama, tmp_path / "model"), tmp_path / "store"
    first = served(model, store, cache_dtype)
    stored = sorted(store.rglob("*.safetensors"))
    second = served(model, store, cache_dtype)
    assert second.tokens == first.tokens
    name = "external_prefix_cache_hits"
    assert second.metrics[name] > first.metrics[name]
    if cache_dtype == "auto":
        check_is_transformers(llama, stored)


def check_is_transformers(model: Any, stored: list[Path]) -> None:
    """Look for each prompt's keys and values, layer by layer, in what was stored."""
    layers = model.config.num_hidden_layers
    assert len(stored) == len(PROMPTS) * layers
    for prompt in PROMPTS:
        with torch.no_grad():
            cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        for layer in range(layers):
            both = cache.layers[layer].keys, cache.layers[layer].values
            expected = torch.cat([half[0].transpose(0, 1) for half in both], -1)
            found = [
                load_file(path)["kv_cache"] for path in stored if f"layers.{layer}." in path.name
            ]
            errors = [
                float((rows - expected[: len(rows)]).abs().max())
                for rows in found
                if len(rows) <= len(prompt)
            ]
            assert min(errors) < 1e-4
