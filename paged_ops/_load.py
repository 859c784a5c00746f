"""Load the compiled library, or say exactly why it can't be loaded.

There is no slow path to fall back to: without the library, importing paged_ops fails.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parent
_OLDEST_TORCH = (2, 10)


def library_path() -> Path:
    """Return the library to load; ``PAGED_LIBRARY`` may name another, say a sanitized one."""
    named = os.environ.get("PAGED_LIBRARY")
    return Path(named) if named else _PACKAGE / "_C.abi3.so"


def build_record(library: Path) -> dict[str, object]:
    """Return what setup.py noted beside the library; empty if there is nothing to read."""
    try:
        record: dict[str, object] = json.loads(library.with_name("_build.json").read_text())
    except (OSError, ValueError):
        return {}
    return record


def _running_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def load_library() -> None:
    """Load the compiled library into torch, once.

    Raises
    ------
    ImportError
        The library is missing, doesn't fit this torch, or ``PAGED_CPU_ISA`` names no variant of it.
        The message names the torch that the library was built with and the one that runs.
    """
    library = library_path()
    if not library.exists():
        raise ImportError(
            f"paged_ops has no compiled library at {library}: build it in the environment of this "
            f"torch ({torch.__version__}) with `pip install --no-build-isolation .`"
        )
    built_with = build_record(library).get("torch_built_with", "unknown")
    versions = f"it was built with torch {built_with}, this is torch {torch.__version__}"
    if _running_version() < _OLDEST_TORCH:
        raise ImportError(
            f"paged_ops needs torch {'.'.join(map(str, _OLDEST_TORCH))} or later: {versions}"
        )
    try:
        torch.ops.load_library(library)
        torch.ops.paged._cpu_isa()  # chooses the CPU variant: PAGED_CPU_ISA is refused here
    except (OSError, RuntimeError, AttributeError) as error:
        raise ImportError(f"paged_ops can't use {library}: {versions}. {error}") from error
