"""stories260K, a trained Llama of 260,000 parameters, as a model of this package.

Its files are not part of the project: ``stories260K.bin`` and ``tok512.bin``, in the formats of
llama2.c.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import torch
from torch import Tensor

from paged_ops.demo.model import LanguageModel, ModelConfig

MODEL, TOKENIZER = "stories260K.bin", "tok512.bin"
BOS = 1

_STORIES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
GREEDY_STORY: str = _STORIES["greedy"]
"""What the model itself says, taking the likeliest token each time."""

WRITTEN_STORIES: list[str] = _STORIES["written"]
"""Stories of the same kind that it did not write."""


def load_stories260k(folder: Path) -> LanguageModel:
    """Read the weights of a folder.

    Parameters
    ----------
    folder : Path
        Where the files are.

    Returns
    -------
    LanguageModel
        The model, in float32.
    """
    data = (folder / MODEL).read_bytes()
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, max_positions = (
        struct.unpack_from("7i", data)
    )
    config = ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim // num_heads,
        hidden_dim=hidden_dim,
        max_positions=max_positions,
    )
    rest = torch.frombuffer(bytearray(data), dtype=torch.float32, offset=28)
    names = {  # in the order of the file, one kind at a time; of each layer its own
        "embedding.weight": (vocab_size, dim),
        "attention_norm.weight": (dim,),
        "q_proj.weight": (dim, dim),
        "k_proj.weight": (num_kv_heads * config.head_dim, dim),
        "v_proj.weight": (num_kv_heads * config.head_dim, dim),
        "o_proj.weight": (dim, dim),
        "ffn_norm.weight": (dim,),
        "gate_proj.weight": (hidden_dim, dim),
        "down_proj.weight": (dim, hidden_dim),
        "up_proj.weight": (hidden_dim, dim),
        "norm.weight": (dim,),
    }
    weights: dict[str, Tensor] = {}
    for name, shape in names.items():
        is_of_layer = name not in ("embedding.weight", "norm.weight")
        for layer in range(num_layers if is_of_layer else 1):
            size = torch.Size(shape).numel()
            weight, rest = rest[:size].view(shape), rest[size:]
            if name in ("q_proj.weight", "k_proj.weight"):
                weight = _halves_together(weight, config.head_dim)
            weights[f"blocks.{layer}.{name}" if is_of_layer else name] = weight
    model = LanguageModel(config)
    model.load_state_dict(weights, strict=True)
    return model.eval().requires_grad_(False)


def _halves_together(weight: Tensor, head_dim: int) -> Tensor:
    """Order rows so that those turned together are half a head apart, not neighbours."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).flatten(0, 2)


def encode(text: str, folder: Path) -> list[int]:
    """Return the token ids of a text, the one that begins it first.

    From single characters on, the two neighbours whose union has the best score are joined until
    no two make a token.

    Parameters
    ----------
    text : str
        Of characters that the tokenizer has.
    folder : Path
        Where the files are.

    Returns
    -------
    list of int
        The ids.
    """
    scores = _read_tokens(folder / TOKENIZER)
    ids = {piece: i for i, piece in enumerate(scores)}
    pieces = [*" " + text]
    while True:
        joined = [a + b for a, b in itertools.pairwise(pieces)]
        best = max(range(len(joined)), key=lambda i: scores.get(joined[i], -torch.inf))
        if joined[best] not in scores:
            # What has no token of its own is a byte.
            return [BOS, *(ids[p if p in ids else f"<0x{ord(p):02X}>"] for p in pieces)]
        pieces[best : best + 2] = [joined[best]]


def _read_tokens(path: Path) -> dict[str, float]:
    """Return the score of each token, in the order of their ids."""
    data, offset = path.read_bytes(), 4
    scores: dict[str, float] = {}
    while offset < len(data):
        score, length = struct.unpack_from("fi", data, offset)
        scores[data[offset + 8 : offset + 8 + length].decode()] = score
        offset += 8 + length
    return scores
