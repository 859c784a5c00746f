"""The wheel, built and run in an environment of its own; and a build where torch is missing."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import paged_ops

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    find_spec("ninja") is None or find_spec("setuptools") is None,
    reason="the build needs ninja and setuptools, which are not here",
)


def run(
    *command: str | Path, check: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command away from the tree, so that what it imports is what is installed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def new_environment(folder: Path) -> Path:
    """Make an empty virtual environment, without pip, and return its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-I", "-c", code).stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for old in (ROOT / "build").glob("lib.*"):  # setuptools never takes a file out of it
        shutil.rmtree(old)
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel beside the torch of this environment; return the new interpreter.

    Torch comes by a path behind the new environment's own: a second copy of it would be hundreds
    of megabytes. Path files (.pth) there are not read, so an editable install is not found.
    """
    python = new_environment(tmp_path_factory.mktemp("environment"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-index", "--no-deps", wheel)
    torch_here = Path(torch.__file__).parents[1]
    (site_packages(python) / "torch_of_the_tests.pth").write_text(f"{torch_here}\n")
    return python


def test_the_wheel_is_for_any_python_3_and_has_types_but_no_sources(wheel: Path) -> None:
    name = wheel.name.split("-")
    assert name[:4] == ["paged_ops", paged_ops.__version__, "py3", "none"]
    assert "linux" in name[4]
    files = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "_C.abi3.so",
        "_build.json",
        "py.typed",
        "demo/model.safetensors",
        "bench/stories260k.json",
        "bench/attention/limits.c",
    ):
        assert f"paged_ops/{wanted}" in files
    assert not [file for file in files if file.endswith((".cpp", ".h", ".o"))]


def test_the_wheel_has_the_benchmarks_and_no_tests(wheel: Path) -> None:
    """Figures are of a machine: whoever installs the wheel can take them on theirs, for 50 kB."""
    files = zipfile.ZipFile(wheel).infolist()
    parts = {
        file.filename.split("/")[1] for file in files if file.filename.startswith("paged_ops/")
    }
    assert {"bench", "demo", "engine"} <= parts
    assert sum(file.compress_size for file in files if "/bench/" in file.filename) < 100_000
    assert not [file.filename for file in files if "test" in file.filename.replace("self_test", "")]


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_the_wheel_names_a_plugin_to_vllm_that_is_there(group: str, wheel: Path) -> None:
    points = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        points.read_string(archive.read(name).decode())
    module, _, function = points[group]["paged_ops"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_installed_wheel_passes_its_self_test(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-m", "paged_ops", cwd=tmp_path)
    assert f"paged_ops {paged_ops.__version__}, {site_packages(installed)}" in done.stdout
    assert f"torch     {torch.__version__}" in done.stdout
    assert "27 of 27 checks passed" in done.stdout


def test_without_torch_pip_says_what_to_do(tmp_path: Path) -> None:
    """The build's needs are linked into an environment that has no torch."""
    python = new_environment(tmp_path / "environment")
    setuptools = find_spec("setuptools")
    assert setuptools is not None
    assert setuptools.origin is not None
    here = Path(setuptools.origin).parents[1]
    for pattern in ("setuptools*", "_distutils_hack", "ninja*"):
        for path in here.glob(pattern):
            (site_packages(python) / path.name).symlink_to(path)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    done = run(*pip, "install", "--no-build-isolation", "--no-deps", ROOT, check=False)
    assert done.returncode != 0
    assert "metadata-generation-failed" in done.stderr  # before pip collects what is required
    assert "install torch first" in done.stdout + done.stderr
    assert "pip install --no-build-isolation ." in done.stdout + done.stderr
