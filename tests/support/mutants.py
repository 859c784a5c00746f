"""Faults made on purpose: a guard is taken out of a source, and something must notice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault, and the text in a file that keeps it out."""

    fault: str
    file: str
    guard: str
    without: str


def problems(mutants: Iterable[Mutant], folder: Path) -> list[str]:
    """Name the mutants that can't be made of the sources in `folder`, and those named twice."""
    found = []
    seen: set[str] = set()
    for mutant in mutants:
        path = folder / mutant.file
        times = path.read_text(encoding="utf-8").count(mutant.guard) if path.is_file() else 0
        if times != 1:
            found.append(f"{mutant.fault}: the guard stands {times} times in {mutant.file}")
        if mutant.guard == mutant.without:
            found.append(f"{mutant.fault}: nothing is changed")
        if mutant.fault in seen:
            found.append(f"{mutant.fault}: named twice")
        seen.add(mutant.fault)
    return found


def apply(mutant: Mutant, folder: Path) -> None:
    """Take the guard out of its file in `folder`, a copy of the sources."""
    if found := problems([mutant], folder):
        raise ValueError(found[0])
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.guard, mutant.without), encoding="utf-8")
