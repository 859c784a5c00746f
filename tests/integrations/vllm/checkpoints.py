"""Small checkpoints in folders, as vLLM loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_ops.demo.llama import load_llama
from tests.integrations.models import make_model

HEAD_SIZE = 32  # the smallest that vLLM's own attention has


def save_random(family: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of a family whose next tokens depend on what it attends to."""
    return _save(make_model(family, **{"head_dim": HEAD_SIZE, **changes}), folder)


def save_demo(folder: Path) -> Path:
    """Save the demo's trained model, whose choices are those of a language model."""
    return _save(load_llama(), folder)


def _save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    # vLLM would pad, begin and end with these.
    config = json.loads((folder / "config.json").read_text())
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
