"""What is named between backticks exists: in the documents, and in the sources' own comments."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paged_ops.blocks
import paged_ops.pool

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)

FOREIGN = {
    "OpCommand": "a class of torch_npu's C++ headers",
    "PIP_EXTRA_INDEX_URL": "pip reads it",
    "ensure_decode_fast_path_is_available": "a function of transformers",
    "fixpipe_perf": "a program of CANN's samples",
    "load_data_perf": "a program of CANN's samples",
    "max_len": "the length of a contiguous cache in docs/layout.md's table",
    "mmad_perf": "a program of CANN's samples",
    "t2h1": "a cell of a picture in docs/layout.md",
}
"""Names in the documents that are not of this project, and whose they are."""


def spans_of(text: str) -> list[str]:
    """Return what stands between single backticks, outside of blocks of code."""
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    return re.findall(r"`([^`]+)`", prose)


def words_of_python(text: str) -> set[str]:
    """Return the names and the words of strings, without comments and docstrings."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docstrings
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return names | set(re.findall(r"[A-Za-z_]\w*", " ".join(strings)))


def words_of_file(path: Path) -> set[str]:
    """Return the words of a source that aren't in its comments."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return words_of_python(text)
    comments = r"/\*.*?\*/|//[^\n]*" if path.suffix in (".h", ".cpp") else r"#[^\n]*"
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(comments, "", text, flags=re.S)))


@cache
def words_of_code() -> set[str]:
    folders = ("paged_ops", "op_host", "op_kernel", "tests", "docs/examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".h", ".cpp")]
    others = [ROOT / name for name in ("setup.py", "Makefile", ".ci/run", "pyproject.toml")]
    # This file names what isn't there.
    words = [words_of_file(path) for path in [*sources, *others] if path != Path(__file__)]
    return set().union({path.stem for path in sources}, *words)


def unknown_names(text: str) -> Iterator[str]:
    """Find identifiers between backticks that no code has.

    Names of one or two characters are variables of the page's own formulas, as ``x_k`` is; letters
    after a digit are a product, such as 2BHD.
    """
    for span in spans_of(text):
        for name in re.findall(r"(?<![\w/])(?<!\w-)[A-Za-z_]\w\w+", span):
            capitals_of_a_shape = re.fullmatch(r"[NBHDX]+|x_\w", name)
            if not capitals_of_a_shape and name not in words_of_code() | set(FOREIGN):
                yield f"{name} in `{span}`"


@each_document
def test_each_name_between_backticks_exists_in_the_code(path: Path) -> None:
    assert list(unknown_names(path.read_text("utf-8"))) == []


@pytest.mark.parametrize("text", ["`softmax_tile` and `fold`", "a `BlockManager.no_such_call()`"])
def test_a_name_that_no_code_has_is_found(text: str) -> None:
    assert list(unknown_names(text))


def test_the_list_of_foreign_names_has_no_name_that_no_document_has() -> None:
    spans = [span for path in DOCUMENTS for span in spans_of(path.read_text("utf-8"))]
    words = set(re.findall(r"\w+", " ".join(spans)))
    assert set(FOREIGN) <= words - words_of_code()


SOURCES = [
    path
    for folder in ("paged_ops", "op_host", "op_kernel")
    for path in sorted((ROOT / folder).rglob("*.*"))
    if path.suffix in (".py", ".h", ".cpp")
]


def test_each_name_between_backticks_in_a_source_exists_in_the_code() -> None:
    texts = {path: path.read_text("utf-8") for path in SOURCES}
    literals = {path: re.findall(r"(?<!`)`[^`\n]+`(?!`)", text) for path, text in texts.items()}
    unknown = {path.name: list(unknown_names(" ".join(spans))) for path, spans in literals.items()}
    assert {name: found for name, found in unknown.items() if found} == {}


def test_each_file_that_a_source_names_exists() -> None:
    everything = ["setup.py", *(str(path.relative_to(ROOT)) for path in SOURCES)]
    for folder in ("docs", "tests"):
        everything += [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.*")]
    named = re.compile(r"(?<![\w./<*-])\w[\w./-]*\.(?:py|h|cpp|md)\b")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in named.findall(path.read_text("utf-8"))
        if name != "Python.h" and not any(f"/{file}".endswith(f"/{name}") for file in everything)
    }
    assert missing == set()


def resolves(dotted: str) -> bool:
    """Tell whether a name in full is a module, or an attribute below one."""
    module, _, attributes = dotted, "", []
    while module:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and not module.startswith(error.name):
                return True  # an extra that isn't installed
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        for attribute in attributes:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@each_document
def test_each_name_in_full_is_found_where_it_says(path: Path) -> None:
    text = path.read_text("utf-8")
    dotted = re.findall(r"\b((?:paged_ops|torch)(?:\.[A-Za-z_]\w*)+)", " ".join(spans_of(text)))
    names = {name for name in dotted if not name.endswith((".py", ".h", ".cpp"))}
    classes = vars(paged_ops) | vars(paged_ops.blocks) | vars(paged_ops.pool)
    members = re.findall(r"(?<![\w.])([A-Z]\w+)\.([a-z]\w+)", " ".join(spans_of(text)))
    wrong = [name for name in sorted(names) if not resolves(name)]
    wrong += [f"{c}.{m}" for c, m in members if c in classes and not hasattr(classes[c], m)]
    assert wrong == []


# ------------------------------------------------------------------ files and commands

FILE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*(?:/|\.(?:py|h|cpp|md|toml|json|in))(?![\w/*])")


def find_file(name: str, document: Path) -> Path | None:
    """Find a file or folder where a reader of the page would look for it."""
    roots = [document.parent, ROOT, ROOT / "paged_ops", ROOT / "paged_ops" / "csrc"]
    found = (path for root in roots for path in root.glob(name.strip("/")))
    by_itself = ("paged_ops", "op_host", "op_kernel", "tests") if "/" not in name else ()
    anywhere = (path for top in by_itself for path in (ROOT / top).rglob(name))
    return next(found, None) or next(anywhere, None)


@each_document
def test_each_file_that_is_named_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    listed = re.findall(r"^((?:paged_ops|op_host|op_kernel|tests)/\S*)  ", text, re.M)
    named = [span for span in spans_of(text) if FILE.fullmatch(span)]
    made = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    missing = [name for name in [*named, *listed] if not find_file(name, path)]
    assert [name for name in missing if name not in made] == []


@each_document
def test_what_is_said_to_be_in_a_file_is_in_it(path: Path) -> None:
    text = path.read_text("utf-8")
    pairs = re.findall(
        r"`([A-Za-z_]\w*)`(?: and `([A-Za-z_]\w*)`)?\s+in\s+`([\w./]+\.(?:py|h|cpp|md))`", text
    )
    for *names, file in pairs:
        place = find_file(file, path)
        words = words_of_file(place) if place else set()
        assert [f"{name} in {file}" for name in names if name and name not in words] == []
