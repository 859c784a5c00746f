"""The runtime of CANN under torch_npu: waiting with a limit, and what its errors mean."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from paged_ops._load import library_path

LIBRARY = "libascendcl.so"
TIMED_OUT = 507046
"""What the runtime returns when a wait with a limit has reached it."""

_LATE = "A {} core ran for longer than the runtime allows: it waits for what never comes."
_STOPPED = (
    "A {} core stopped with an exception: an address outside of memory, an operand that isn't "
    "aligned, or code of another mode. The runtime's log (~/ascend/log) has the place."
)

MEANINGS = {
    "107000": "An argument of a call of the runtime is not what it takes.",
    "107009": "The runtime can't open the kernel's object.",
    "207001": "The device has no memory left: another process may hold it (npu-smi info).",
    "507014": _LATE.format("cube"),
    "507015": _STOPPED.format("cube"),
    "507027": "The object has no function of that name: in cce mode they get other names.",
    "507034": _LATE.format("vector"),
    "507035": _STOPPED.format("vector"),
    "No module named 'torch_npu'": "torch_npu isn't installed: pip install 'paged-ops[npu]'.",
    "there is no NPU kernel at": "The library was built without kernels for this chip: see the "
    "step that looks at the build.",
    "there are no kernels for the chip": "Neither the project nor the device says that its "
    "architecture is the one that the kernels are for.",
    "CANN can't be used": "CANN's libraries aren't found: its set_env.sh sets LD_LIBRARY_PATH.",
    "has no aclrt": "This CANN is too old for the launches.",
}
"""What an error's text may hold, a number of the runtime's or words, and what is meant."""


class Hung(Exception):
    """The device had not finished when the time was over."""


def load() -> None:
    """Import torch_npu and start its first device, without the warnings that it gives then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("torch_npu")
        torch.empty(1, device="npu")


def npu() -> Any:
    """Return torch's module of the device, which exists once torch_npu is imported."""
    return vars(torch)["npu"]


def kernels_folder() -> Path:
    """Return where the library looks for the objects of this device's kernels."""
    named = os.environ.get("PAGED_KERNELS")
    chip: str = npu().get_device_name()
    return Path(named) if named else library_path().parent / "kernels" / chip


def wait(seconds: float) -> None:
    """Wait until the device has done all that it was asked for.

    Raises
    ------
    Hung
        It hadn't in so many seconds.
    RuntimeError
        Something failed on it; with the runtime's last error.
    """
    runtime = ctypes.CDLL(LIBRARY)
    if not hasattr(runtime, "aclrtSynchronizeDeviceWithTimeout"):
        npu().synchronize()
        return
    code = runtime.aclrtSynchronizeDeviceWithTimeout(ctypes.c_int32(int(1000 * seconds)))
    if code == TIMED_OUT:
        raise Hung(f"not done in {seconds:.0f} s; {last_error() or 'the runtime says no more'}")
    if code != 0:
        raise RuntimeError(f"the device returned {code}: {last_error()}")


def last_error() -> str:
    """Return the runtime's text of its last error in this thread; asking clears it."""
    runtime = ctypes.CDLL(LIBRARY)
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    text = runtime.aclGetRecentErrMsg()
    return text.decode(errors="replace").strip() if text else ""


def meaning(error: str) -> str:
    """Say what an error means whose text is `error`; empty if nobody knows."""
    known = (
        explanation
        for key, explanation in MEANINGS.items()
        if re.search(rf"(?<!\d){re.escape(key)}(?!\d)", error)
    )
    return next(known, "")
