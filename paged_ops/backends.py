"""What was built into the library, and which kernel runs where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

import torch

from paged_ops._load import build_record, library_path
from paged_ops.dtypes import FLOAT_DTYPES


@dataclass(frozen=True)
class BackendInfo:
    """What was built and what was chosen on this machine; see `backend_info`.

    Attributes
    ----------
    torch : str
        Version of the running torch.
    torch_built_with : str
        Version of the torch whose headers the library was compiled against.
    torch_target : str
        Oldest torch that the library can be loaded by.
    library : str
        Path of the compiled library.
    compiler : str
        What compiled it, in its own words.
    glibc : str
        Oldest version of the C library that it loads beside; "of the build" where it was linked for
        the machine that built it.
    wheel : str
        The tags of the wheel that this was installed from; "editable" for a tree that is developed.
    cpu_isas : tuple of str
        CPU variants in the library, least capable first.
    cpu_isa : str
        The variant that runs: the best that this machine has and ``PAGED_CPU_ISA`` allows.
    npu : str
        Whether the Ascend part was built, and if not, why.
    npu_attention : str
        The Ascend kernel that attention takes: "mixed", on cube and vector cores, wherever that can
        run, or "vector" if ``PAGED_NPU_KERNEL`` asks for it; `npu_attention_kernel` answers for a
        shape.
    """

    torch: str
    torch_built_with: str
    torch_target: str
    library: str
    compiler: str
    glibc: str
    wheel: str
    cpu_isas: tuple[str, ...]
    cpu_isa: str
    npu: str
    npu_attention: str


def _installed_as() -> str:
    """Return the tags of the installed wheel, from what pip keeps of it."""
    try:
        installed = distribution("paged-ops")
    except PackageNotFoundError:
        return "none: not installed"
    if '"editable": true' in (installed.read_text("direct_url.json") or ""):
        return "editable"
    tags = re.findall(r"^Tag: (\S+)", installed.read_text("WHEEL") or "", re.M)
    return ", ".join(tags) or "unknown"


def backend_info() -> BackendInfo:
    """Say what was built into the library and which variant runs on this machine.

    Returns
    -------
    BackendInfo
        A frozen record; printing it answers most questions of a bug report.

    Examples
    --------
    >>> import paged_ops
    >>> info = paged_ops.backend_info()
    >>> info.cpu_isa in info.cpu_isas
    True
    """
    library = library_path()
    record = build_record(library)
    isas = record.get("cpu_isas", [])
    return BackendInfo(
        torch=str(torch.__version__),
        torch_built_with=str(record.get("torch_built_with", "unknown")),
        torch_target=str(record.get("torch_target", "unknown")),
        library=str(library),
        compiler=str(record.get("compiler", "unknown")),
        glibc=str(record.get("glibc") or "of the build"),
        wheel=_installed_as(),
        cpu_isas=tuple(isas) if isinstance(isas, list) else (),
        cpu_isa=torch.ops.paged._cpu_isa(),
        npu=str(record.get("npu", "unknown")),
        npu_attention=os.environ.get("PAGED_NPU_KERNEL") or "mixed",
    )


def npu_attention_kernel(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
    tree_mask: bool = False,
) -> str:
    """Say which Ascend kernel attention takes for caches of this dtype and shape.

    Nothing else decides: not the batch, the phase, the other options or the block size.

    Parameters
    ----------
    dtype
        Of the query: float16, bfloat16 or float32.
    head_dim, head_dim_v
        Elements of a key and of a value; None: as many as of a key.
    cache_dtype
        None, or int8: the caches are quantised.
    tree_mask
        Whether the calls have one.

    Returns
    -------
    str
        "mixed": cube and vector cores; or "vector": vector cores alone.

    Raises
    ------
    RuntimeError
        No Ascend kernel serves them; the message names the limit. Or ``PAGED_NPU_KERNEL`` is
        neither "mixed" nor "vector".

    Examples
    --------
    >>> import torch, paged_ops
    >>> paged_ops.npu_attention_kernel(torch.float16, 128)
    'mixed'
    >>> paged_ops.npu_attention_kernel(torch.float16, 128, cache_dtype=torch.int8)
    'vector'
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in FLOAT_DTYPES:
        raise RuntimeError(
            f"npu_attention_kernel: dtype is {name}, expected float16, bfloat16 or float32"
        )
    if cache_dtype not in (None, dtype, torch.int8):
        raise RuntimeError(
            f"npu_attention_kernel: cache_dtype is {cache_dtype}, expected torch.int8 or None"
        )
    kernel: str = torch.ops.paged._npu_attention_kernel(
        name,
        name if cache_dtype is None else str(cache_dtype).removeprefix("torch."),
        head_dim,
        head_dim if head_dim_v is None else head_dim_v,
        tree_mask,
    )
    return kernel
