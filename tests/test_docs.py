"""The documents: their Python runs, their links and commands exist, no public name is missing."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import FunctionType

import pytest

from paged_ops.bench.__main__ import BENCHMARKS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)

# docs/ascend.md asks for an NPU.
SNIPPETS = [
    pytest.param(match.group(1), id=f"{path.stem}-{i}")
    for path in DOCUMENTS
    for i, match in enumerate(re.finditer(r"^```python\n(.*?)^```", path.read_text(), re.S | re.M))
    if "torch_npu" not in match.group(1)
]
LINKS = [
    pytest.param(path, target, id=f"{path.stem}-{target}")
    for path in DOCUMENTS
    for target in sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())))
]


# The compiler warns about deprecated parts of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_each_python_snippet_runs(snippet: str) -> None:
    if "transformers" in snippet and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers, an extra, is not installed")
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize(("path", "target"), LINKS)
def test_each_link_inside_the_project_leads_somewhere(path: Path, target: str) -> None:
    assert (path.parent / target).exists()


# ------------------------------------------------------------------ commands


@each_document
def test_each_command_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)", makefile, re.M)).split())
    asked = re.findall(r"(?:^|`)make ((?:[a-z-]+ ?)+)", text, re.M)
    assert {name for names in asked for name in names.split()} <= targets
    modules = set(re.findall(r"python -m ((?:paged_ops|tests)[\w.]*)", text))
    assert {name for name in modules if importlib.util.find_spec(name) is None} == set()
    benchmarks = set(re.findall(r"python -m paged_ops\.bench ([a-z]+)", text))
    assert benchmarks <= set(BENCHMARKS)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = project.split("[project.optional-dependencies]")[1].split("[tool.")[0]
    wanted = set(re.findall(r"paged-ops\[(\w+)\]", text))
    assert wanted <= set(re.findall(r"^(\w+) = \[", extras, re.M))


# ------------------------------------------------------------------ the public names


def listed_names() -> dict[str, set[str]]:
    """Read docs/api.md: a section for each module, a row for each of its names."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    sections = re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return {module: set(re.findall(r"^\| `(\w+)` \|", rows, re.M)) for module, rows in sections}


def public_names(module: str) -> set[str]:
    """Return what a module says is public; where it doesn't say, what it defines."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return set(found.__all__)
    return {
        name
        for name, value in vars(found).items()
        if isinstance(value, type | FunctionType) and value.__module__ == module
        if not name.startswith("_")
    }


EXTRAS = {
    "paged_ops.blocks.metrics": "prometheus_client",
    "paged_ops.integrations.transformers": "transformers",
}


@pytest.mark.parametrize("module", listed_names())
def test_the_page_of_names_has_just_the_public_names_of_each_module(module: str) -> None:
    if module in EXTRAS:
        pytest.importorskip(EXTRAS[module])
    assert listed_names()[module] == public_names(module)


def test_the_page_of_names_has_each_module_that_says_what_is_public() -> None:
    package = ROOT / "paged_ops"
    programs = [package / "bench", package / "demo"]
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in package.rglob("*.py")
        if not any(path.is_relative_to(folder) for folder in programs)
        if re.search(r"^__all__ = ", path.read_text("utf-8"), re.M)
    }
    assert modules <= set(listed_names())
