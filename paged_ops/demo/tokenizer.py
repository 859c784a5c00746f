"""The demo's byte-level BPE tokenizer, and text that streams out of it token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paged_ops.demo.corpus import END_OF_TEXT
from paged_ops.demo.model import FOLDER

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"


class Tokenizer:
    """Text to token ids and back; every byte has a token, so any text can be encoded.

    Examples
    --------
    >>> tokenizer = Tokenizer.load()
    >>> tokenizer.decode(tokenizer.encode("ROMEO: ça va?"))
    'ROMEO: ça va?'
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.end_of_text: int = inner.encode(END_OF_TEXT).ids[0]

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Tokenizer:
        """Read ``tokenizer.json`` of ``folder``."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_file(str(folder / FILE)))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` into ``folder``."""
        self._inner.save(str(folder / FILE))

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids; the end-of-text marker is never made from text."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens; bytes that end inside a character become U+FFFD."""
        return self._inner.decode(list(tokens), skip_special_tokens=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn ``vocab_size`` tokens: the end-of-text marker, 256 bytes, then the merges."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)
