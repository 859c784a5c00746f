"""The two files of a snapshot, which are one: each is refused without the other.

``books.json`` holds the SHA-256 of the blocks' file, and one of itself, so nothing in either can
change unnoticed: a byte, an end that is missing, a file of another snapshot.

A new snapshot is written beside the old one, under names that nobody has: both files are on the
disk before the new ``books.json`` is renamed to its name, which is the one step by which the new
snapshot takes the place of the old. From then on it is complete: its blocks are found under the
name that the books say, or under ``blocks.safetensors``, which they are renamed to at last. What a
killed save has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paged_ops.pool.records import refusing_damage

FORMAT = "paged-ops snapshot v3"
BOOKS, BLOCKS = "books.json", "blocks.safetensors"


def write_files(folder: Path, books: Mapping[str, Any], blocks: Mapping[str, torch.Tensor]) -> None:
    """Replace the snapshot in a folder, if there is one, as a whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tag = secrets.token_hex(8)
    new_books, new_blocks = folder / f"books-{tag}.json", folder / f"blocks-{tag}.safetensors"
    try:
        save_file(dict(blocks), new_blocks)
        about = {"blocks": new_blocks.name, "blocks_sha256": _sha256(new_blocks)}
        new_books.write_text(sealed({"format": FORMAT, **books, **about}), encoding="ascii")
        _sync(new_blocks, new_books, folder)
        new_books.replace(folder / BOOKS)
        _sync(folder)
    finally:
        _tidy(folder)


def read_books(folder: Path) -> dict[str, Any]:
    """Return what ``books.json`` says, if it is as it was written.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It is damaged, or of another format.
    """
    content = (folder / BOOKS).read_bytes()
    with refusing_damage("snapshot"):
        books = json.loads(content.decode("ascii"))
        if not isinstance(books, dict):
            raise TypeError(f"{BOOKS} is no object")
    if books.get("format") != FORMAT:
        raise ValueError(f"snapshot has format {books.get('format')!r}, expected {FORMAT!r}")
    with refusing_damage("snapshot"):
        books.pop("sha256", None)
        if content.decode("ascii") != sealed(books):
            raise ValueError(f"{BOOKS} is not what its sha256 says")
    return books


def read_blocks(folder: Path, books: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the blocks that books are about.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It is damaged, or of another snapshot.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = _blocks_of(folder, books)
    if _sha256(file) != books.get("blocks_sha256"):
        raise ValueError(f"{file.name} is not what {BOOKS} is about")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _blocks_of(folder: Path, books: Mapping[str, Any]) -> Path:
    """Return the file of the blocks: as it was written, or under its last name."""
    name = books.get("blocks")
    if not isinstance(name, str) or not re.fullmatch(r"blocks-[0-9a-f]{16}\.safetensors", name):
        raise ValueError(f"blocks is {name!r}, expected the name of a file")
    return folder / name if (folder / name).exists() else folder / BLOCKS


def _tidy(folder: Path) -> None:
    """Give the blocks of the snapshot their last name, and remove what belongs to none.

    Nothing depends on it, so it gives up where it can't tell what the snapshot is.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (folder / BOOKS).exists():
            blocks = _blocks_of(folder, json.loads((folder / BOOKS).read_text(encoding="ascii")))
            blocks.replace(folder / BLOCKS)
        for leftover in (*folder.glob("books-*.json"), *folder.glob("blocks-*.safetensors")):
            leftover.unlink()


def sealed(books: Mapping[str, Any]) -> str:
    """Return the one text for books, with its own digest in it."""
    digest = hashlib.sha256(_text(books).encode("ascii")).hexdigest()
    return _text({**books, "sha256": digest})


def _text(books: Mapping[str, Any]) -> str:
    return json.dumps(books, sort_keys=True, separators=(",", ":"))


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _sync(*paths: Path) -> None:
    """Wait until files and folders are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
