"""Count the instructions of attention by what they are for, as docs/performance.md shows them.

``python -m tests.driver.profile`` builds the driver for this machine with debug information, runs
one call of each shape under callgrind, which collects only inside the kernels' ``attend``, and
prints a table. callgrind knows functions, and nearly everything here is inlined into a few of them;
so it counts by address, and addr2line tells the functions that each address was inlined from.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import torch

from tests.driver import calls
from tests.driver.build import program
from tests.driver.memcheck import ISAS
from tests.support.sequences import Placement, Sequences, make_sequences, place

# What an instruction is for, by the function that it stands in or was inlined into.
PARTS = {
    "scores": "prepare_queries|multiply_keys",
    "softmax": "weigh_rows",
    "sums of values": "sum_values",
    "block table to row pointers": "look_up",
}
REST = "the rest"

NUM_KEYS = 2048
SHAPES = {"D1: 1 row": (1, 1), "D2: 4 rows": (4, 1), "P1: 2048 rows, causal": (1, NUM_KEYS)}
"""Query heads of the one KV head, and query tokens."""


def profile(sequences: Sequences, isa: str) -> Counter[str]:
    """Return the instructions that one call executes in ``attend``, by part."""
    binary = program(platform.machine())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            *("valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}"),
            *("--dump-instr=yes", "--compress-pos=no", "--compress-strings=no"),
            f"--toggle-collect=paged::cpu::{isa}::(anonymous namespace)::attend(*",
            str(binary),
        ]
        call = calls.attention(place(sequences, Placement(block_size=32, cache_layout="HND")))
        with mock.patch.dict(os.environ, LD_BIND_NOW="1"):  # the loader's work is not the kernels'
            chosen, _ = calls.run(command, [call], isa)
        assert chosen == isa
        counts, total = by_address(out.read_text().splitlines(), binary)
    assert 0 < counts.total() == total
    parts: Counter[str] = Counter()
    for address, part in parts_of(counts, binary).items():
        parts[part] += counts[address]
    missing = [part for part in PARTS if part not in parts]
    assert not missing, f"no instruction of {missing}: no debug information, or a new name?"
    return parts


def by_address(lines: Iterable[str], binary: Path) -> tuple[Counter[str], int]:
    """Return the instructions by address, and their total, from the lines of callgrind's output.

    What a function of another library executes counts at the address that called it.
    """
    counts: Counter[str] = Counter()
    library_calls: Counter[str] = Counter()
    total, within, callee, is_call = 0, "", "", False
    for line in lines:
        name, _, value = line.partition("=")
        if name == "ob":
            within = callee = value
        elif name == "cob":
            callee = value
        elif name == "calls":
            is_call = True
        elif line.startswith("totals:"):
            total = int(line.split()[1])
        elif line.startswith("0x"):
            address, _, cost = line.split()
            if within == str(binary) and not is_call:
                counts[address] += int(cost)
            elif within == str(binary) and callee != within:
                library_calls[address] += int(cost)
            callee, is_call = within, False
    # The calls that lead to `attend`, from the begin of the program on, are none of its own.
    for address in library_calls.keys() & counts.keys():
        counts[address] += library_calls[address]
    return counts, total


def parts_of(addresses: Iterable[str], binary: Path) -> dict[str, str]:
    """Return what the instruction at each address is for."""
    command = ["addr2line", "--addresses", "--functions", "--inlines", "--demangle", "-e", binary]
    text = subprocess.run(
        command, input="\n".join(addresses), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    parts = {}
    for address, functions in re.findall(r"^(0x\w+)\n((?:(?!0x).*\n)+)", text, re.MULTILINE):
        found = (part for part, name in PARTS.items() if re.search(rf"\b(?:{name})\b", functions))
        parts[hex(int(address, 16))] = next(found, REST)
    return parts


def num_pairs(query_tokens: int) -> int:
    """Return how many pairs of a key and a query token that sees it there are."""
    return sum(range(NUM_KEYS - query_tokens + 1, NUM_KEYS + 1))


def main() -> None:
    build = ["-m", "tests.driver.build", platform.machine(), os.environ.get("CXX", "g++")]
    flags = os.environ.get("CXXFLAGS", "") + " -g"
    subprocess.run([sys.executable, *build], env=os.environ | {"CXXFLAGS": flags}, check=True)
    counts, per_pair = {}, []
    for name, (num_heads, query_tokens) in SHAPES.items():
        sequences = make_sequences(
            [NUM_KEYS], [query_tokens], num_heads=num_heads, head_dim=128, dtype=torch.bfloat16
        )
        counts[name] = profile(sequences, ISAS[-1])
        per_pair.append(counts[name].total() / (num_heads * num_pairs(query_tokens)))
    print(f"{ISAS[-1]}, bfloat16, {NUM_KEYS} keys, head_dim 128, one KV head\n")
    print(f"| | {' | '.join(SHAPES)} |\n|{'---|' * (1 + len(SHAPES))}")
    for part in (*PARTS, REST):
        shares = (f"{100 * each[part] / each.total():.1f} %" for each in counts.values())
        print(f"| {part} | {' | '.join(shares)} |")
    print(f"| instructions per key and row | {' | '.join(f'{each:.0f}' for each in per_pair)} |")


if __name__ == "__main__":
    main()
