"""The manual: ``make docs`` builds it from these pages, the docstrings and the ops' schemas.

The reference is written anew by each build, into ``docs/reference/``: a page for each section of
``api.md``, whose tables say what is public.
"""

from __future__ import annotations

import importlib
import re
from enum import EnumMeta
from inspect import isclass, isroutine
from pathlib import Path

import torch
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import paged_ops

HERE = Path(__file__).parent
REFERENCE = HERE / "reference"

project = "paged-ops"
author = "the paged-ops authors"
version = release = paged_ops.__version__
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
]
exclude_patterns = ["examples/*.md"]

html_theme = "furo"
html_title = f"paged-ops {version}"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# A reference that leads nowhere is an error. Python's own pages would have to be fetched.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"collections\.abc\..*")]
# One backtick in a docstring: a name that can be imported becomes a reference, an argument doesn't.
default_role = "autolink"


FOREIGN_BASES = "BaseException, Collector, Module, Protocol, object, tuple"
"""Classes whose members aren't repeated in what is derived from them."""


def public_names() -> dict[str, list[str]]:
    """Read from api.md each module's public names."""
    text = (HERE / "api.md").read_text("utf-8")
    sections = re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return {module: re.findall(r"^\| `(\w+)` \|", rows, re.M) for module, rows in sections}


def directive(module: str, name: str) -> str:
    """Return the lines of reStructuredText that document one name."""
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, EnumMeta):
        return f".. autoclass:: {name}\n   :members:\n   :undoc-members:\n"
    if isclass(found):
        return f".. autoclass:: {name}\n   :members:\n   :inherited-members: {FOREIGN_BASES}\n"
    return f".. {'autofunction' if isroutine(found) else 'autodata'}:: {name}\n"


def module_page(module: str, names: list[str], elsewhere: dict[str, str]) -> str:
    """Return the page of a module; what is at home in another one is a link to there."""
    summary = "".join(f"   {name}\n" for name in names if name not in elsewhere)
    links = "".join(f"- {{py:obj}}`{home}.{name}`\n" for name, home in elsewhere.items())
    here = "\n".join(directive(module, name) for name in names if name not in elsewhere)
    return (
        f"# `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n\n"
        f".. currentmodule:: {module}\n\n.. autosummary::\n\n{summary}\n{here}```\n\n{links}"
    )


def ops_page() -> str:
    """Return the page of the ops' schemas, as torch prints them."""
    parts = ["# `torch.ops.paged`\n\nThe schemas. What they mean: [](../semantics.md).\n"]
    for name in ("attention", "attention_with_lse", "write_kv", "merge_states", "copy_blocks"):
        parts.append(op_section(name))
    return "\n".join([*parts, op_section("gather_kv")])


def op_section(name: str) -> str:
    """Return the section of one op: a schema for each overload, an argument a line."""
    packet = getattr(torch.ops.paged, name)
    lines = []
    for overload in packet.overloads():
        op, arguments, results = re.fullmatch(
            r"(.*?)\((.*)\) -> (.*)", str(getattr(packet, overload)._schema)
        ).groups()
        inner = "".join(f"    {argument},\n" for argument in arguments.split(", "))
        lines.append(f"{op}(\n{inner}) -> {results}\n")
    block = "\n".join(lines)
    return f"## `{name}`\n\n```text\n{block}```\n\nAs a function: {{py:obj}}`paged_ops.{name}`.\n"


def write_reference(app: Sphinx) -> None:
    """Write ``docs/reference/``, touching no file that stays as it is."""
    REFERENCE.mkdir(exist_ok=True)
    names = public_names()
    below = [module for module in names if module != "paged_ops"]
    homes = {name: module for module in below for name in names[module]}
    homes = {name: homes[name] for name in homes if homes[name] != "paged_ops.reference"}
    pages = {"ops": ops_page()}
    for module, listed in names.items():
        away = {name: homes[name] for name in listed if module == "paged_ops" and name in homes}
        pages[module] = module_page(module, listed, away)
    entries = "\n".join(["ops", *names])
    pages["index"] = f"# API reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    for name, text in pages.items():
        path = REFERENCE / f"{name}.md"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def find_at_home(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element
) -> Element | None:
    """Resolve a name of the API that a docstring uses without its module, or with another one."""
    target = node["reftarget"].removeprefix("paged_ops.")
    for module, listed in public_names().items():
        if target.partition(".")[0] in listed:
            found = env.domains.python_domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", f"{module}.{target}", node, content
            )
            if found is not None:
                return found
    return None


def setup(app: Sphinx) -> None:
    """Have the reference written before the pages are read, and its names found from anywhere."""
    app.connect("builder-inited", write_reference)
    app.connect("missing-reference", find_at_home)
