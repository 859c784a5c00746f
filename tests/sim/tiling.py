"""The tiling functions of op_host and their structs, through ctypes.

The structs are attributes of this module by the names that they have in C++ (`AttentionShape`,
`AttentionTilingData`, ...). They are made from what the compiler says of each field.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SOURCES = ("tests/sim/op_host_api.cpp", "op_host/soc.cpp", "op_host/attention_tiling.cpp")
_INCLUDES = (ROOT, ROOT / "op_kernel", ROOT / "paged_ops/csrc")
_TYPES = {
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
    "pointer": ctypes.c_void_p,
}
# Of each op: what is planned, and what the kernel reads.
STRUCTS = {
    "attention": ("AttentionShape", "AttentionTilingData"),
    "write_kv": ("WriteKvShape", "WriteKvTilingData"),
    "copy_blocks": ("CopyBlocksShape", "CopyBlocksTilingData"),
    "gather_kv": ("GatherKvShape", "GatherKvTilingData"),
    "merge_states": ("MergeStatesParams", "MergeStatesTilingData"),
}
# In the order of the enum Dtype.
DTYPES = ("float32", "float16", "bfloat16", "int8")


@cache
def library() -> Any:
    """Compile op_host with its C interface, once per content, and load it."""
    headers = [*(ROOT / "op_host").glob("*"), *(ROOT / "op_kernel").glob("*.h")]
    headers.append(ROOT / "paged_ops/csrc/params.h")
    sources = [ROOT / source for source in _SOURCES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sorted(headers), *sources]))
    built = ROOT / "build" / "sim" / f"libop_host-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra"]
        flags += [f"-I{folder}" for folder in _INCLUDES]
        subprocess.run(["g++", *flags, *map(str, sources), "-o", str(built)], check=True)
    loaded = ctypes.CDLL(str(built))
    counts = {
        "usable_ub": 0,
        "usable_l1": 0,
        "attention_ub_bytes": 5,
        "attention_l1_bytes": 5,
        "softmax_ub_bytes": 7,
    }
    for name, arguments in counts.items():
        getattr(loaded, name).restype = ctypes.c_int64
        getattr(loaded, name).argtypes = [ctypes.c_int64] * arguments
    loaded.soc_cube_cores.restype = ctypes.c_int64
    loaded.soc_cube_cores.argtypes = [ctypes.c_char_p] + [ctypes.c_int64] * 3
    loaded.structs.restype = ctypes.c_char_p
    return loaded


def described_structs() -> dict[str, Any]:
    """Return what the compiler says: of each struct its size and [name, type, offset, size]s."""
    described: dict[str, Any] = json.loads(library().structs())
    return described


def make_structs(described: dict[str, Any]) -> dict[str, type[ctypes.Structure]]:
    """Make the structs, and refuse those that don't lie in memory as the compiler's do."""
    made: dict[str, type[ctypes.Structure]] = {}
    for name, struct in described.items():
        kinds = {
            field: ctypes.c_char * size if kind == "text" else {**_TYPES, **made}[kind]
            for field, kind, _, size in struct["fields"]
        }
        made[name] = type(name, (ctypes.Structure,), {"_fields_": list(kinds.items())})
        if ctypes.sizeof(made[name]) != struct["size"]:
            raise AssertionError(f"{name} has {struct['size']} bytes: a field isn't listed")
        for field, _, offset, size in struct["fields"]:
            mirrored = getattr(made[name], field)
            if (mirrored.offset, mirrored.size) != (offset, size):
                raise AssertionError(f"{name}.{field} is at {offset} with {size} bytes")
    return made


@cache
def _structs() -> dict[str, type[ctypes.Structure]]:
    return make_structs(described_structs())


def __getattr__(name: str) -> Any:
    if not name[0].isupper() or name not in _structs():
        raise AttributeError(name)
    return _structs()[name]


@dataclass(frozen=True)
class Plan:
    """How to launch, or why not."""

    refusal: str  # empty: planned
    stem: str
    kernel: str
    num_cores: int
    workspace_bytes: int
    tiling: Any


def plan(op: str, shape: ctypes.Structure, cores: int = 48, wanted: str = "") -> Plan:
    """Plan a call of an op on a chip with so many vector cores.

    `wanted` asks for a kernel of attention, "vector" or "mixed"; empty: the usual one.
    """
    takes, gives = (_structs()[name] for name in STRUCTS[op])
    assert isinstance(shape, takes)
    tiling, answer = gives(), _structs()["Answer"]()
    arguments = (ctypes.byref(shape), ctypes.c_int64(cores), ctypes.byref(tiling))
    choice = (wanted.encode(),) if op == "attention" else ()
    getattr(library(), f"plan_{op}")(*arguments, ctypes.byref(answer), *choice)
    return Plan(
        answer.refusal.decode(),
        answer.stem.decode(),
        answer.kernel.decode(),
        answer.num_cores,
        answer.workspace_bytes,
        tiling,
    )
