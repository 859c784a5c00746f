"""The shape of the package: who may import whom, whose names are whose, and how long a file is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paged_ops"
FILES = sorted(PACKAGE.rglob("*.py"))

LONGEST = 500
"""Lines of a file that can be read at one go."""

KERNELS = (PACKAGE / "csrc" / "cpu", ROOT / "op_kernel")
"""One loop nest is hard to cut: no limit there."""

FOREIGN = {
    "_C": "torch._C, torch's own core; torch.ops._C, where vLLM and SGLang register their ops",
    "_PagedAttentionExtension": "OpenVINO's paged attention, which has no public name",
    "_asdict": "a NamedTuple's method, which has no other name",
    "_attn_implementation": "where a transformers model keeps which attention it has",
    "_buffers": "where torch.nn.Module keeps its buffers",
    "_check": "torch's check of an argument that a traced call keeps",
    "_cpu_isa": "an op of this library that tells a fact about the build",
    "_dynamo": "torch.compile's switches and counters",
    "_inductor": "torch.compile's compiler",
    "_exit": "os._exit, the end of a process without the work that comes before it",
    "_init_amx": "of torch.cpu, without a public name",
    "_is_amx_tile_supported": "of torch.cpu, without a public name",
    "_k_scale": "what a layer of vLLM scales its keys by, as a tensor",
    "_k_scale_float": "what a layer of vLLM scales its keys by",
    "_npu_attention_kernel": "an op of this library that tells a fact about the build",
    "_npu_echo_arguments": "an op of this library that tries a launch",
    "_schema": "of a torch.ops overload",
    "_supports_logits_to_keep": "what a transformers model says of its forward",
    "_v_scale": "what a layer of vLLM scales its values by, as a tensor",
    "_v_scale_float": "what a layer of vLLM scales its values by",
    "_varlen_attn": "torch's op under varlen_attn, which asks a kernel to be registered for it",
    "_varlen_attn_out": "the same, for a given output",
}
"""Underscore names of other projects, or of torch.ops.paged, that the package may use: and why."""


def name_of(path: Path) -> str:
    """Return a module's full name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}
each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(node: ast.AST) -> Iterator[str]:
    """Name the modules of the package that an import statement, wherever it stands, asks for."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports name their module in full"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name:
            yield name


def for_checkers_only(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes that stand under ``if TYPE_CHECKING:``."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    guarded = [node for node in guards if ast.unparse(node.test) == "TYPE_CHECKING"]
    return {below for node in guarded for child in node.body for below in ast.walk(child)}


# ------------------------------------------------------------------ whose names


def is_foreign(node: ast.AST) -> bool:
    """Tell whether this is a private attribute of another object, or of a module."""
    if not (isinstance(node, ast.Attribute) and is_private(node.attr)):
        return False
    return ast.unparse(node.value) not in ("self", "cls", "super()")


def own_names(tree: ast.Module) -> set[str]:
    """Return the underscore names that the classes of a module give their objects."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find names with an underscore that belong to another module."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name) and f"{node.module}.{alias.name}" not in MODULES:
                    yield node.lineno, alias.name
        # What is below a private name is found with that name.
        elif isinstance(node, ast.Attribute) and is_foreign(node) and not is_foreign(node.value):
            if node.attr in own:
                continue
            yield node.lineno, node.attr


@each_file
def test_no_module_uses_an_underscore_name_of_another(path: Path) -> None:
    found = [f"{line}: {name}" for line, name in private_uses(tree_of(path)) if name not in FOREIGN]
    assert not found


def test_the_list_of_foreign_names_has_no_name_that_nobody_uses() -> None:
    used = {name for path in FILES for _, name in private_uses(tree_of(path))}
    assert set(FOREIGN) <= used


@pytest.mark.parametrize(
    "source",
    [
        "from paged_ops.blocks.manager import _Request",
        "manager._lock.acquire()",
        "self.manager._lock.acquire()",
        "manager_module._count(3)",
        "def f(self, other): return other._rows",
    ],
)
def test_a_private_use_is_found(source: str) -> None:
    assert list(private_uses(ast.parse(source)))


# ------------------------------------------------------------------ who imports whom


@cache
def floors() -> list[str]:
    """Read the order of the parts from CONTRIBUTING.md, the lowest first."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (listing,) = re.findall(r"^```\n(paged_ops/bench/ .*?)^```", text, re.M | re.S)
    paths = re.findall(r"^(paged_ops/\S+)", listing, re.M)
    return [path.removeprefix("paged_ops/").removesuffix(".py").strip("/") for path in paths][::-1]


def floor_of(module: str) -> int:
    """Return how high the part is that a module belongs to: a folder, or a file beside them."""
    part = module.removeprefix("paged_ops").strip(".").split(".")[0] or "__init__"
    assert part in floors(), f"{part} is missing in CONTRIBUTING.md's order"
    return floors().index(part)


@each_file
def test_no_import_points_upwards(path: Path) -> None:
    own = floor_of(name_of(path))
    targets = [(node, name) for node in ast.walk(tree_of(path)) for name in imported(node)]
    upwards = [f"{node.lineno}: {name}" for node, name in targets if floor_of(name) > own]
    assert not upwards


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {
            name
            for node in set(ast.walk(tree_of(path))) - for_checkers_only(tree_of(path))
            for name in imported(node)
            if name != module
        }
        for module, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# ------------------------------------------------------------------ who includes whom

MAY_INCLUDE = {
    "op_kernel": ("op_kernel",),
    "op_host": ("op_host", "op_kernel", "paged_ops/csrc/params.h"),
    "paged_ops/csrc/cpu": ("paged_ops/csrc/cpu", "paged_ops/csrc/params.h"),
    "paged_ops/csrc/npu": ("paged_ops/csrc/npu", "op_host"),
}
"""Files of the project that the C++ of each folder may include. None of it knows torch."""

KNOWS_TORCH = "backend.cpp"
"""But for the one file of each device that the ops are bound to."""


def included(path: Path) -> Iterator[str]:
    """Name what a C++ file includes: paths from the root, where they are files of the project."""
    roots = [path.parent, ROOT / "paged_ops" / "csrc", ROOT, ROOT / "op_kernel"]
    for name in re.findall(r'^#include ["<]([^">]+)', path.read_text("utf-8"), re.M):
        found = [root / name for root in roots if (root / name).is_file()]
        yield str(found[0].resolve().relative_to(ROOT)) if found else name


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_no_include_points_upwards(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".h", ".cpp")]
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in included(path)
        if path.name != KNOWS_TORCH
        if name.startswith("torch/")
        or ((ROOT / name).is_file() and not name.startswith(MAY_INCLUDE[folder]))
    ]
    assert files
    assert wrong == []


# ------------------------------------------------------------------ how long


def test_no_file_is_longer_than_can_be_read_at_one_go() -> None:
    folders = [PACKAGE, ROOT / "op_host", ROOT / "docs" / "examples"]
    files = [path for folder in folders for path in folder.rglob("*.*")] + [ROOT / "setup.py"]
    sources = [path for path in files if path.suffix in (".py", ".h", ".cpp")]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in sources
        if not any(path.is_relative_to(folder) for folder in KERNELS)
    }
    assert len(lengths) > 100
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}
