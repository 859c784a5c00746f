"""stories260K, a trained Llama of 260,000 parameters, as a model of this package.

Its files are not part of the project: ``stories260K.bin`` and ``tok512.bin``, in the formats of
llama2.c.
"""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import torch
from torch import Tensor

from paged_ops.demo.model import LanguageModel, ModelConfig

MODEL, TOKENIZER = "stories260K.bin", "tok512.bin"
BOS = 1

GREEDY_STORY = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. \
She said, "I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""
"""What the model itself says, taking the likeliest token each time."""

WRITTEN_STORIES = (
    """\
Tom had a small dog. The dog liked to run in the garden and to dig for bones. One day it rained a \
lot, and the dog could not go out. "What can we do?" asked Tom. His mom gave him a box and some \
paint. Tom made a red house for his dog. The dog went in and wagged its tail. "It is happy," said \
mom. Then the sun came out, and they all went to the garden to play. At night the dog went to \
sleep in the little red house, and Tom was very proud.""",
    """\
Once upon a time, there was a bird named Pip. Pip was small and could not fly yet. Every day she \
sat in her nest and looked at the big blue sky. "I want to fly," she said to her mom. "You have to \
wait," said her mom. One day, a strong wind came and the nest began to shake. Pip was scared. She \
opened her wings and jumped. She did not fall! She was flying over the trees and over the lake. \
Her mom was so happy. "Look at you!" she said. From that day on, Pip and her mom flew together \
every morning.""",
    """\
Sara and Ben went to the beach with their dad. They had a bucket and a shovel. They wanted to make \
a big castle in the sand. Sara made the walls and Ben made a tower. Then a wave came and the \
castle was gone. Ben was sad and he started to cry. "Don't cry," said Sara. "We can make a new \
one, far away from the water." They worked hard all day. Dad put a flag on the top. When the sun \
went down, the castle was still there. They learned that it is good to try again.""",
)
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
            return [BOS, *(ids[_as_token(piece, ids)] for piece in pieces)]
        pieces[best : best + 2] = [joined[best]]


def _as_token(piece: str, ids: dict[str, int]) -> str:
    """Return the name of a piece; what has no token of its own is a byte."""
    return piece if piece in ids else f"<0x{ord(piece):02X}>"


def _read_tokens(path: Path) -> dict[str, float]:
    """Return the score of each token, in the order of their ids."""
    data, offset = path.read_bytes(), 4
    scores: dict[str, float] = {}
    while offset < len(data):
        score, length = struct.unpack_from("fi", data, offset)
        scores[data[offset + 8 : offset + 8 + length].decode()] = score
        offset += 8 + length
    return scores
