"""Count a kernel's own scalar instructions: those between the ones that it issues to the pipes.

A kernel is compiled once more for each kind of core, against headers in which an instruction for
another pipe does nothing but take its operands (`counted.h`), to assembler. There every stretch of
instructions without a jump gets a counter of its own, by instructions that change no flag, so it
does what it did; what is counted is what the compiler wrote. It needs no tool but the compiler, no
counters of the machine and no rights, and costs a few times the kernel's own scalar time.

Cores run one after the other and wait for nobody. Scalar reads of GM are real: a count needs the
tensors of the call, and zeros where the kernel would find what another core wrote.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from tests.sim import build

# What the compiler would do for a host but not for a scalar unit stays out: vectors, and calls of
# the C library to copy a struct.
_FLAGS = (
    *("-std=c++17", "-O2", "-g1", "-gdwarf-4", "-fPIC", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-fno-exceptions", "-fno-stack-protector"),
    *("-fno-asynchronous-unwind-tables", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"),
    *("-fcf-protection=none", "-mstringop-strategy=unrolled_loop"),
)
# Of KernelMetaType: those with a cube core, with that alone, and with two vector cores beside it.
_WITH_CUBE, _CUBE_ALONE, _TWO_VECTORS = (1, 3, 4, 5), (1, 3), (5,)
_MOST_EVENTS = 2**26

_LABEL = re.compile(r"^[\w.$]+:")
_LOCATION = re.compile(r"^\s+\.loc (\d+) (\d+)")
_FILE = re.compile(r'^\s+\.file (\d+) "([^"]+)"(?: "([^"]+)")?')
_EVENT = re.compile(r"^\s+# sim-event (\d+) (\d+)")
_ISSUE = re.compile(r"^\s+# sim-issue")
# A label, or another name for one.
_DEFINITION = re.compile(r"^(?:([\w.$]+):|\s+\.set\s+([\w.$]+),)")
_CALL = re.compile(r"^\s+call\s+([^\s@]+)")
_JUMP = re.compile(r"^\s+(?:j\w+|call|ret|rep ret)\b")
# 16 bytes to or from memory are two loads or stores of the device.
_WIDE = re.compile(r"^\s+(?:mov[ua]p[sd]|movdq[ua])\s.*\(")
_INSTRUCTION = re.compile(r"^\s+[a-z]")


class Instrumenter:
    """Puts counters into the compiler's output."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._files: dict[str, str] = {}
        self._line = "?"
        self._segment: list[str] = []
        self._lines: Counter[str] = Counter()
        self._output: list[str] = []
        self.segments: list[dict[str, int]] = []

    def _locate(self, file: str, line: str) -> None:
        """Take the line if it is the kernel's: what the headers add belongs to their caller."""
        path = Path(self._files[file])
        for folder in self._folders:
            if path.is_relative_to(folder):
                self._line = f"{path.relative_to(folder)}:{line}"

    def _close(self) -> None:
        """End a stretch: what it counts comes before it."""
        count = sum(self._lines.values())
        if count:
            index = 8 * len(self.segments)
            self.segments.append(dict(self._lines))
            self._output += [
                "\tleaq -128(%rsp), %rsp",
                "\tpushq %rax",
                "\tmovq .Lsim_total(%rip), %rax",
                f"\tleaq {count}(%rax), %rax",
                "\tmovq %rax, .Lsim_total(%rip)",
                f"\tmovq .Lsim_segments+{index}(%rip), %rax",
                "\tleaq 1(%rax), %rax",
                f"\tmovq %rax, .Lsim_segments+{index}(%rip)",
                "\tpopq %rax",
                "\tleaq 128(%rsp), %rsp",
            ]
        self._output += self._segment
        self._segment, self._lines = [], Counter()

    def _note(self, kind: str) -> None:
        """Note an event: its kind and the instructions so far."""
        self._output += [
            "\tleaq -128(%rsp), %rsp",
            "\tpushq %rax",
            "\tpushq %rcx",
            "\tmovq .Lsim_events(%rip), %rcx",
            "\tmovq .Lsim_total(%rip), %rax",
            "\tmovl %eax, (%rcx)",
            f"\tmovl ${kind}, 4(%rcx)",
            "\tleaq 8(%rcx), %rcx",
            "\tmovq %rcx, .Lsim_events(%rip)",
            "\tpopq %rcx",
            "\tpopq %rax",
            "\tleaq 128(%rsp), %rsp",
        ]

    def run(self, text: str) -> str:
        lines = text.splitlines()
        called = {found[1] for line in lines if (found := _CALL.match(line))}
        defined = {found[1] or found[2] for line in lines if (found := _DEFINITION.match(line))}
        foreign = called - defined
        if foreign:
            raise ValueError(f"nobody counts the instructions of {', '.join(sorted(foreign))}")
        for line in lines:
            if named := _FILE.match(line):
                number, folder, name = named.groups()
                self._files[number] = str(Path(folder, name)) if name else folder
            if _LABEL.match(line):
                self._close()
                self._output.append(line)
                continue
            self._segment.append(line)
            if found := _LOCATION.match(line):
                self._locate(*found.groups())
            elif found := _EVENT.match(line):
                self._lines[self._line] += int(found[2])
                self._close()
                self._note(found[1])
            elif _ISSUE.match(line):
                self._lines[self._line] += 1
            elif _INSTRUCTION.match(line):
                self._lines[self._line] += 2 if _WIDE.match(line) else 1
                if _JUMP.match(line):
                    self._close()
        self._close()
        self._output.append("\t.bss\n\t.balign 8")
        sizes = {"total": 8, "events": 8, "segments": 8 * len(self.segments)}
        for name, size in sizes.items():
            self._output += [f".Lsim_{name}:\n\t.zero {size}", f"\t.globl sim_counted_{name}"]
            self._output.append(f"\t.set sim_counted_{name}, .Lsim_{name}")
        return "\n".join(self._output) + "\n"


def _build(source: Path, kind: int, includes: Sequence[Path], defines: Sequence[str]) -> Path:
    """Compile a source for one kind of core (1: vector, 2: cube) and return the library's path."""
    options = [f"-I{path}" for path in (build.INCLUDE, *includes)]
    options += [f"-D{name}" for name in (*defines, f"ASCENDC_SIM_COUNT={kind}")]
    name = sha256(" ".join([str(source), *options]).encode()).hexdigest()[:12]
    assembler = build.BUILD / f"{source.stem}-{name}.s"
    library = assembler.with_suffix(".counted.so")
    with build.locked(assembler):
        fresh = build.compile_source(assembler, source, (*_FLAGS, "-S", *options))
        if fresh or not library.exists():
            instrumenter = Instrumenter([source.parent, *includes])
            counted = assembler.with_suffix(".counted.s")
            counted.write_text(instrumenter.run(assembler.read_text()))
            build.run((build.CXX, "-shared", counted, "-o", library))
            library.with_suffix(".json").write_text(json.dumps(instrumenter.segments))
    return library


class _Counted:
    """A kernel for one kind of core, ready to be counted."""

    def __init__(self, library: Path, entry: str) -> None:
        self._library = ctypes.CDLL(str(library))
        self._entry = getattr(self._library, entry)
        self.segments: list[dict[str, int]] = json.loads(library.with_suffix(".json").read_text())
        self._total = ctypes.c_uint64.in_dll(self._library, "sim_counted_total")
        self._events = ctypes.c_uint64.in_dll(self._library, "sim_counted_events")
        counts = (ctypes.c_uint64 * len(self.segments)).in_dll(
            self._library, "sim_counted_segments"
        )
        self._counts = np.frombuffer(counts, dtype=np.uint64)

    def run(self, place: Sequence[int], words: Sequence[int]) -> CoreCount:
        self._library.sim_counted_start(*(ctypes.c_int64(value) for value in place))
        trace = np.empty(_MOST_EVENTS, dtype=np.uint64)
        self._total.value = 0
        self._counts[:] = 0
        self._events.value = trace.ctypes.data
        self._entry(*(ctypes.c_uint64(word) for word in words))
        events = (self._events.value - trace.ctypes.data) // 8
        return CoreCount(self._total.value, trace[:events].copy(), self._counts.copy(), self)

    def type(self) -> int:
        """Return the type that the kernel stated when it ran last."""
        return int(self._library.sim_counted_type())


@dataclass(frozen=True, eq=False)
class CoreCount:
    """Scalar instructions of one core. `trace` holds, of each instruction issued, its kind (high
    half) and the number of scalar instructions up to it (low half).
    """

    instructions: int
    trace: np.ndarray
    _counts: np.ndarray
    _kernel: _Counted

    def by_line(self) -> Counter[str]:
        """Return the instructions of each line of the kernel's sources."""
        lines: Counter[str] = Counter()
        for segment, times in zip(self._kernel.segments, self._counts.tolist(), strict=True):
            if times:
                for line, count in segment.items():
                    lines[line] += count * times
        return lines


def is_possible() -> bool:
    """Whether this host is one for which the counters are written."""
    return platform.machine() == "x86_64"


@cache
def _kernel(
    source: Path, name: str, kind: int, includes: tuple[Path, ...], defines: tuple[str, ...]
) -> _Counted:
    return _Counted(_build(source, kind, includes, defines), name)


def count(
    source: Path,
    name: str,
    block_dim: int,
    words: Sequence[int],
    *,
    includes: Sequence[Path] = (),
    defines: Sequence[str] = (),
) -> list[CoreCount]:
    """Count the scalar instructions of every core of a launch, in the order of its counters."""
    where = (source, name)
    options = (tuple(includes), tuple(defines))
    vector = _kernel(*where, 1, *options)
    vector.run((0, block_dim, 0, 1), words)
    kernel_type = vector.type()
    cores = []
    if kernel_type in _WITH_CUBE:
        cube = _kernel(*where, 2, *options)
        cores += [cube.run((group, block_dim, 0, 1), words) for group in range(block_dim)]
    if kernel_type in _CUBE_ALONE:
        return cores
    ratio = 2 if kernel_type in _TWO_VECTORS else 1
    for block in range(ratio * block_dim):
        cores.append(vector.run((block, block_dim, block % ratio, ratio), words))
    return cores
