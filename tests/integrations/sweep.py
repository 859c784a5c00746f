"""Every causal model type of transformers over blocks: which are served, and why others aren't.

``python -m tests.integrations.sweep`` prints the table of docs/integrations.md.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from paged_ops.engine import Engine
from paged_ops.integrations.transformers import PackedModel, PagedCache, register
from tests.integrations.causal_models import TYPES, make_causal_model

PROMPTS = [[11, 7, 45, 23, 9, 61, 33, 5, 71, 18], [52, 9, 14]]
NEW_TOKENS = 12

SERVED = "served"
ENGINE = "served by `PagedCache`; `PackedModel` in `Engine`: "

# What refusals say, and the words of the table for it.
_OTHER_CODE = "its code needs a cache of its own"
_REASONS = {
    "a layer keeps a state of its own": "a layer has a state beside keys and values (convolution, "
    "linear attention, Mamba, indexer)",
    "attends by code of its own": "attention that doesn't go through transformers' interface",
    "neither causal nor a sliding window": "attention in chunks",
    "with a mask of 4 dimensions": "a layer makes a mask of its own",
    "lays a mask of its own": "a mask laid over the causal one, as for images",
    "attends twice": "layers attend twice, to different halves of their values",
    "in transformers' own cache": "keys leave transformers' cache that the mask still shows",
    "is_causal is False": "an encoder's attention in the decoder",
    "its code raised": _OTHER_CODE,
    "is not compatible with": _OTHER_CODE,
    "one pool for all layers": "layers of different sizes",
    "it counts positions itself": "it counts positions itself",
    "differs from that by its own attention": "another result: it keeps a state elsewhere",
}


@functools.cache
def outcome(kind: str) -> str | None:
    """Say what came of a type; None where transformers can't make or run so small a model.

    Raises
    ------
    AssertionError
        Tokens are wrong, or a refusal has no words here.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # where one of them prints warnings
        try:
            model = make_causal_model(kind)
            model.set_attn_implementation("eager")
            together = own_tokens(model, PROMPTS)
            alone = [own_tokens(model, [prompt])[0] for prompt in PROMPTS]
        except Exception:  # it isn't about us
            return None
        by_cache, by_engine = from_cache(model, together), from_engine(model, alone)
    return by_cache if by_cache in (by_engine, *_REASONS.values()) else ENGINE + by_engine


def own_tokens(model: PreTrainedModel, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Return the tokens that the model chooses after each prompt, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = (ids != 0).long()
    options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens: list[Any] = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    return tokens


def from_cache(model: PreTrainedModel, expected: list[Any]) -> str:
    """Say what came of `PagedCache`."""
    try:
        cache = PagedCache(model, num_blocks=32, block_size=4)
    except ValueError as refusal:
        return reason(refusal)
    register()
    model.set_attn_implementation("paged_ops")
    tokens = own_tokens(model, PROMPTS, cache=cache)
    assert tokens == expected, f"{tokens} from PagedCache, expected {expected}"
    return SERVED


def from_engine(model: PreTrainedModel, expected: list[Any]) -> str:
    """Say what came of `PackedModel` in the engine."""
    try:
        engine = Engine(PackedModel(model), num_blocks=32, block_size=4, max_batch=4)
    except ValueError as refusal:
        return reason(refusal)
    requests = [engine.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]
    list(engine.run())
    tokens = [request.generated for request in requests]
    assert tokens == expected, f"{tokens} from the engine, expected {expected}"
    return SERVED


def reason(refusal: ValueError) -> str:
    """Return the table's words for a refusal."""
    words = [words for said, words in _REASONS.items() if said in str(refusal)]
    assert words, f"a refusal without words in the table: {refusal}"
    return words[0]


def table() -> str:
    """Return the table of docs/integrations.md."""
    kinds: dict[str, list[str]] = {SERVED: []}
    for kind in TYPES:
        if (what := outcome(kind)) is not None:
            kinds.setdefault(what, []).append(kind)
    ordered = sorted(kinds, key=lambda what: (what != SERVED, not what.startswith(ENGINE)))
    rows = [f"| {what} | {len(kinds[what])} | {', '.join(kinds[what])} |" for what in ordered]
    return "\n".join(["| outcome | | model types |", "|---|---|---|", *rows])


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(table())
