"""The plan of a call of attention on the CPU, through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import accumulate
from typing import Any

from tests.driver.build import HERE, ROOT

CPU = ROOT / "paged_ops" / "csrc" / "cpu"
MOST_TASKS = 10_000


class Stretch(IntEnum):
    """What becomes of the states of a span."""

    ALL = 0
    PART = 1
    LAST = 2


@dataclass(frozen=True)
class Call:
    """What the plan depends on."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = True
    sliding_window: int = 0
    most_rows: int = 1024
    piece_keys: int = 512
    block_size: int = 512
    tables: tuple[tuple[int, ...], ...] | None = None
    """By default no two sequences have a block in common."""

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    def visible(self, sequence: int, row: int) -> range:
        """Return the keys that a row of a sequence and KV head sees."""
        seq_len = self.seq_lens[sequence]
        position = seq_len - self.query_lens[sequence] + row // self.group_size
        last = min(seq_len, position + 1) if self.causal else seq_len
        first = max(0, position + 1 - self.sliding_window) if self.sliding_window else 0
        return range(first, max(last, first))


class Task(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "sequence",
            "kv_head",
            "row_begin",
            "num_rows",
            "piece_begin",
            "piece_end",
            "split",
            "states",
            "tasks_left",
            "first_shared",
            "num_shared",
            "stretch",
        )
    ]

    @property
    def rows(self) -> range:
        return range(self.row_begin, self.row_begin + self.num_rows)

    @property
    def pieces(self) -> range:
        return range(self.piece_begin, self.piece_end)


@dataclass(frozen=True)
class Plan:
    """The tasks of a call, in the order in which threads take them."""

    num_threads: int
    most_rows: int
    state_floats: int
    tasks: list[Task]
    shared_tokens: list[int]

    def shared_by(self, task: Task) -> list[int]:
        """Return the query tokens whose rows share the keys of a task; none if it has no such."""
        return self.shared_tokens[task.first_shared : task.first_shared + task.num_shared]


class _Call(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "head_dim_v",
                "causal",
                "sliding_window",
                "most_rows",
                "piece_keys",
                "batch",
                "block_size",
                "max_blocks_per_seq",
            )
        ],
        ("block_tables", ctypes.POINTER(ctypes.c_int32)),
        ("seq_lens", ctypes.POINTER(ctypes.c_int32)),
        ("query_start_loc", ctypes.POINTER(ctypes.c_int32)),
    ]


class _Summary(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("num_threads", "most_rows", "state_floats", "num_tasks")
    ]


def plan(call: Call, max_threads: int) -> Plan:
    """Plan a call for at most that many threads."""
    tables = call.tables
    if tables is None:
        width = max((-(-n // call.block_size) for n in call.seq_lens), default=0)
        tables = tuple(tuple(range(i * width, (i + 1) * width)) for i in range(len(call.seq_lens)))
    given = _Call(
        call.num_heads,
        call.num_kv_heads,
        call.head_dim,
        call.head_dim_v,
        call.causal,
        call.sliding_window,
        call.most_rows,
        call.piece_keys,
        len(call.seq_lens),
        call.block_size,
        len(tables[0]) if tables else 0,
        _int32([block for table in tables for block in table]),
        _int32(call.seq_lens),
        _int32([0, *accumulate(call.query_lens)]),
    )
    tasks = (Task * MOST_TASKS)()
    tokens = (ctypes.c_int64 * MOST_TASKS)()
    made = _library().plan_attention(ctypes.byref(given), max_threads, tasks, tokens, MOST_TASKS)
    assert made.num_tasks <= MOST_TASKS
    listed = tasks[: made.num_tasks]
    used = max((task.first_shared + task.num_shared for task in listed), default=0)
    return Plan(made.num_threads, made.most_rows, made.state_floats, listed, tokens[:used])


def _int32(values: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(values))(*values)


@cache
def _library() -> Any:
    """Compile the plan with its C interface, once per content, and load it."""
    parts = [CPU / "attention" / name for name in ("plan.cpp", "shared_keys.cpp")]
    sources = [HERE / "plan_api.cpp", *parts]
    content = [*sources, *CPU.rglob("*.h"), CPU.parent / "params.h"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(content)))
    built = ROOT / "build" / "driver-plan" / f"libplan-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra"]
        command = ["g++", *flags, f"-I{CPU.parent}", *map(str, sources), "-o", str(built)]
        subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.plan_attention.restype = _Summary
    loaded.plan_attention.argtypes = [
        ctypes.POINTER(_Call),
        ctypes.c_int64,
        ctypes.POINTER(Task),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int64,
    ]
    return loaded
