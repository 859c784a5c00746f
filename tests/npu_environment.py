"""Run Python so that npu tensors work, on a machine without an NPU.

``python -m tests.npu_environment -m pytest -k npu`` builds the simulated device (``tests/sim``) and
then runs ``python -m pytest -k npu`` in an environment where torch_npu loads it. It needs a virtual
environment with torch_npu and the torch that belongs to it::

    python3 -m venv .venv-npu
    .venv-npu/bin/pip install torch==2.13.0 torch_npu==2.13.0 'setuptools>=77' ninja
    .venv-npu/bin/pip install --no-build-isolation --editable '.[test]'
    .venv-npu/bin/python -m tests.npu_environment -m pytest tests/sim/test_acl.py
    .venv-npu/bin/python -m tests.npu_environment -m pytest -p tests.npu_plugin tests

On a machine with CANN nothing is simulated: run ``python -m pytest`` there.

The environment is chosen so that faults show:

``ASCEND_LAUNCH_BLOCKING=1``
    torch_npu calls its operators at once instead of from a thread of its own, so an error is raised
    by the call that caused it. Otherwise only the first error of a process is raised, later.
``PYTORCH_NO_NPU_MEMORY_CACHING=1``
    Every tensor is an allocation of its own, so the simulated core knows where it ends and that it
    holds garbage.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``
    ``import torch`` doesn't import torch_npu: only the tests that want it do.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "build" / "sim" / "npu_objects"
RUNTIME = "libascendcl.so"


def build_kernels() -> Path:
    """Build op_kernel for the simulated core; return the folder for ``PAGED_KERNELS``."""
    from tests.sim.harness import build_kernel

    sources = ROOT / "op_kernel"
    KERNELS.mkdir(parents=True, exist_ok=True)
    for source in sorted(sources.glob("*.cpp")):
        built = build_kernel(source, includes=(sources,))
        kept = KERNELS / f"{source.stem}.o"
        if not kept.exists() or kept.stat().st_mtime_ns < built.stat().st_mtime_ns:
            mark(built, kept, on_groups="PAGED_GROUPS" in source.read_text())
    return KERNELS


def mark(built: Path, kept: Path, *, on_groups: bool) -> None:
    """Copy a kernel's library, with what the device's compiler would leave in an object.

    That is a section for each function and kind of core, and on groups a name for each half.
    """
    listed = subprocess.check_output(["nm", "-D", "--defined-only", str(built)], text=True)
    entries = re.findall(r" T (paged_\w+)", listed)
    options = [f"--add-section=.ascend.meta.{name}={os.devnull}" for name in entries]
    if on_groups:
        halves = [f"{name}{half}" for name in entries for half in ("_mix_aic", "_mix_aiv")]
        options += [f"--add-symbol={half}=.text:0,global,function" for half in halves]
    # Others may have the old one loaded.
    new = kept.with_suffix(f".{os.getpid()}")
    subprocess.run(["objcopy", *options, str(built), str(new)], check=True)
    new.replace(kept)


def environment() -> dict[str, str]:
    """Build everything that is out of date; return the environment variables that use it."""
    from tests.sim.acl.build import build
    from tests.sim.harness import build_runtime

    folders = [str(build()), str(build_runtime().parent)]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": ":".join([*folders, inherited] if inherited else folders),
        "PAGED_KERNELS": str(build_kernels()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "ASCEND_LAUNCH_BLOCKING": "1",
        "PYTORCH_NO_NPU_MEMORY_CACHING": "1",
    }


def is_simulated() -> bool:
    """Whether this process was started in the environment of the simulated device."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return str(ROOT / "build" / "sim" / "acl" / "lib") in folders


def why_not() -> str | None:
    """Say why npu tensors can't be used in this process; None if they can."""
    if find_spec("torch_npu") is None:
        return "npu tensors need torch_npu, which isn't installed here"
    if not is_simulated() and "ASCEND_HOME_PATH" not in os.environ:
        return "there is no CANN; python -m tests.npu_environment starts the simulated device"
    return None


def load() -> None:
    """Import torch_npu and start its first device, without the warnings that it gives then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import torch_npu  # noqa: F401

        torch.empty(1, device="npu")


def to_npu(tensor: Tensor, device: str = "npu:0") -> Tensor:
    """Return a tensor with the same elements, strides and offset, in a copy of its storage.

    ``tensor.to("npu")`` makes a contiguous tensor of a view. Here the whole storage goes along,
    and so does what lies between the elements.
    """
    import torch

    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def report() -> dict[str, Any]:
    """Say what the simulated runtime saw: calls that it doesn't implement, and launches."""
    runtime = ctypes.CDLL(RUNTIME)
    runtime.sim_acl_report.restype = ctypes.c_char_p
    answer: dict[str, Any] = json.loads(runtime.sim_acl_report())
    return answer


def main() -> None:
    """Replace this process by a Python of the same arguments in the environment."""
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **environment()})


if __name__ == "__main__":
    main()
