"""Faults made on purpose: a guard is taken out of a source, and something must notice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

Unit = TypeVar("Unit")

WORDS = "mutants are taken whose fault, file or unit has one of these; none: all"


class Mutant(NamedTuple):
    """A fault, and the text in a file that keeps it out."""

    fault: str
    file: str
    guard: str
    without: str


def chosen(
    mutants: Mapping[Unit, tuple[Mutant, ...]], words: Sequence[str]
) -> dict[Unit, tuple[Mutant, ...]]:
    """Return the mutants whose fault, file or unit has one of the words; without words all."""

    def is_meant(unit: Unit, mutant: Mutant) -> bool:
        text = f"{unit} {mutant.fault} {mutant.file}"
        return not words or any(word in text for word in words)

    taken = {
        unit: tuple(mutant for mutant in group if is_meant(unit, mutant))
        for unit, group in mutants.items()
    }
    return {unit: group for unit, group in taken.items() if group}


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
