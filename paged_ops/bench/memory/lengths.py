"""The requests of a study: drawn from a distribution, or read from a recorded trace."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Request(NamedTuple):
    """One request: the tokens of its prompt, those of its answer, and its prompt's prefix blocks.

    ``prefix_blocks`` are ids of the prompt's blocks as the trace numbers them; equal ids mean equal
    text up to the end of the block. Empty where the trace has none.
    """

    prompt: int
    output: int
    prefix_blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Distribution:
    """Exponential lengths with given means; a prompt and an answer fit half the positions each."""

    mean_prompt: float
    mean_output: float
    max_length: int = 2048

    def draw(self, count: int, seed: int = 0) -> list[Request]:
        """Draw requests, the same ones for the same seed. What would be too long is cut."""
        choose, most = random.Random(seed), self.max_length // 2

        def length(mean: float) -> int:
            # Rounding down and adding 1 makes half a token more than the exponential has.
            return min(most, 1 + int(choose.expovariate(1 / (mean - 0.5))))

        return [Request(length(self.mean_prompt), length(self.mean_output)) for _ in range(count)]


# The means of the vLLM paper (arXiv 2309.06180, section 6.1).
DISTRIBUTIONS = {
    "sharegpt-means": Distribution(161.31, 337.99),
    "alpaca-means": Distribution(19.31, 58.45),
}

# The columns, or keys, that give a request's two lengths in each kind of trace.
_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),  # Azure
    ("input_length", "output_length"),  # Mooncake
    ("num_prefill_tokens", "num_decode_tokens"),  # lengths of ShareGPT or arXiv texts
)


def read_trace(path: Path) -> list[Request]:
    """Read the requests of a trace, in its order.

    Parameters
    ----------
    path : Path
        A CSV file with a header, or a file with one JSON object per line.

    Raises
    ------
    ValueError
        The file has no pair of columns that is known.
    """
    with path.open(newline="", encoding="utf-8") as lines:
        if path.suffix == ".jsonl":
            return list(_requests(path, map(json.loads, lines)))
        return list(_requests(path, csv.DictReader(lines)))


def _requests(path: Path, rows: Iterable[dict[str, object]]) -> Iterator[Request]:
    """Turn rows into requests; one without an answer or without a prompt is left out."""
    names = None
    for row in rows:
        if names is None:
            names = next((pair for pair in _COLUMNS if set(pair) <= row.keys()), None)
        if names is None:
            known = ", ".join(" and ".join(pair) for pair in _COLUMNS)
            raise ValueError(f"{path} has the columns {list(row)}, expected {known}")
        prompt, output = (int(str(row[name])) for name in names)
        blocks = row.get("hash_ids", ())
        assert isinstance(blocks, (list, tuple))
        if prompt > 0 and output > 0:
            yield Request(prompt, output, tuple(blocks))


def at_most(requests: Iterable[Request], max_length: int, count: int) -> list[Request]:
    """Return the first `count` requests that are no longer than `max_length` in all."""
    fitting = (r for r in requests if r.prompt + r.output <= max_length)
    return [request for _, request in zip(range(count), fitting, strict=False)]
