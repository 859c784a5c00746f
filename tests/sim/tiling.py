"""The tiling functions of op_host and their structs, through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SOURCES = ("tests/sim/op_host_api.cpp", "op_host/soc.cpp", "op_host/attention_tiling.cpp")


class CacheLayout(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("head_dim", "block_stride", "token_stride", "head_stride")
    ]


class RowLayout(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("token_stride", "head_stride")]


class AttentionTilingData(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "num_tokens",
                "batch",
                "num_heads",
                "num_kv_heads",
                "num_blocks",
                "block_size",
                "max_blocks_per_seq",
                "table_row_stride",
                "table_column_stride",
            )
        ],
        ("query", RowLayout),
        ("output", RowLayout),
        ("key", CacheLayout),
        ("value", CacheLayout),
        *[
            (name, ctypes.c_int64)
            for name in (
                "sliding_window",
                "causal",
                "has_query_start_loc",
                "has_alibi_slopes",
                "has_sinks",
                "has_lse",
                "tile",
                "max_rows",
                "piece",
                "split",
                "max_pieces",
                "key_columns",
                "value_columns",
                "chunk_buffers",
                "part_elements",
                "exchange_keys",
                "exchange_bytes",
            )
        ],
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class WriteKvTilingData(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in ("num_tokens", "num_kv_heads", "num_blocks", "block_size")
        ],
        ("key_rows", RowLayout),
        ("value_rows", RowLayout),
        ("key", CacheLayout),
        ("value", CacheLayout),
        ("has_int64_slots", ctypes.c_int64),
        ("heads_per_copy", ctypes.c_int64),
    ]


class CopyBlocksTilingData(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in ("num_copies", "num_kv_heads", "num_blocks", "block_size")
        ],
        ("key", CacheLayout),
        ("value", CacheLayout),
        *[
            (name, ctypes.c_int64)
            for name in ("has_int64_ids", "id_row_stride", "id_column_stride", "tokens_per_copy")
        ],
    ]


class MergeStatesTilingData(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "head_dim")],
        *[(name, RowLayout) for name in ("out_a", "out_b", "out", "lse_a", "lse_b")],
    ]


class Answer(ctypes.Structure):
    _fields_ = [
        ("num_cores", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("stem", ctypes.c_char * 64),
        ("kernel", ctypes.c_char * 64),
        ("refusal", ctypes.c_char * 256),
    ]


@cache
def library() -> Any:
    """Compile op_host with its C interface, once per content, and load it."""
    headers = sorted([*(ROOT / "op_host").glob("*"), *(ROOT / "op_kernel").glob("*_data.h")])
    sources = [ROOT / source for source in _SOURCES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*headers, *sources]))
    built = ROOT / "build" / "sim" / f"libop_host-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", f"-I{ROOT}"]
        flags.append(f"-I{ROOT / 'op_kernel'}")
        subprocess.run(["g++", *flags, *map(str, sources), "-o", str(built)], check=True)
    loaded = ctypes.CDLL(str(built))
    counts = {
        "usable_ub": 0,
        "usable_l1": 0,
        "attention_ub_bytes": 5,
        "attention_l1_bytes": 4,
        "softmax_ub_bytes": 6,
    }
    for name, arguments in counts.items():
        getattr(loaded, name).restype = ctypes.c_int64
        getattr(loaded, name).argtypes = [ctypes.c_int64] * arguments
    for name in ("soc_cube_cores", "soc_vector_cores"):
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def plan(op: str, shape: ctypes.Structure, element: str | int, cores: int = 48) -> Answer:
    """Fill the fields of `shape` that the tiling decides; the answer says how to launch.

    `element` is the name of the dtype, or for write_kv and copy_blocks the size of an element.
    `cores` is the number of vector cores.
    """
    answer = Answer()
    argument = element.encode() if isinstance(element, str) else ctypes.c_int64(element)
    getattr(library(), f"plan_{op}")(
        ctypes.byref(shape), argument, ctypes.c_int64(cores), ctypes.byref(answer)
    )
    return answer


def plan_attention(
    shape: AttentionTilingData, dtype: str, cores: int = 48, wanted: str = ""
) -> Answer:
    """Plan attention on the kernel that `wanted` names, "vector" or "mixed", or the usual one."""
    answer = Answer()
    library().plan_attention(
        ctypes.byref(shape),
        dtype.encode(),
        ctypes.c_int64(cores),
        wanted.encode(),
        ctypes.byref(answer),
    )
    return answer
