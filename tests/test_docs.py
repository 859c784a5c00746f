"""The Python in the documents runs as it stands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
