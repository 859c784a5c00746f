"""What the scalar units do: python -m tests.sim.scalar [call ...] [--kernel vector] [--lines 30].

Prints, for some standard calls of attention, the scalar instructions of a core of each kind, where
they are in the kernel's sources and how many there are for each instruction that is issued to a
pipe. counting.py says how they are counted; nothing is launched.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.sim import kernel_calls
from tests.sim.cases import Case, make_case
from tests.sim.counting import CoreCount
from tests.sim.harness import count

# 32 query heads on 8 KV heads of 128, float16, blocks of 128 in the layout of PagedKVCache.
_SHAPE: dict[str, Any] = {
    "num_kv_heads": 8,
    "group": 4,
    "head_dim": 128,
    "block_size": 128,
    "layout": "HND",
}
CALLS: dict[str, dict[str, Any]] = {
    "prefill-2048": {"seq_lens": [2048], "query_lens": [2048]},
    "prefill-8192": {"seq_lens": [8192], "query_lens": [8192]},
    "decode-16x2048": {"seq_lens": [2048] * 16},
    "decode-4x8192": {"seq_lens": [8192] * 4},
}


def standard_case(name: str) -> Case:
    return make_case(torch.float16, **_SHAPE, **CALLS[name])


def count_case(
    case: Case, wanted: str = "mixed", folder: Path = kernel_calls.OP_KERNEL
) -> dict[str, list[CoreCount]]:
    """Count a call's scalar instructions, by kind of core."""
    how = {"wanted": wanted, "how": count, "folder": folder}
    cores = kernel_calls.attention(*case.tensors, **case.options, **how).result
    cubes = len(cores) // 3 if wanted == "mixed" else 0
    kinds = {"cube": list(cores[:cubes]), "vector": list(cores[cubes:])}
    return {kind: counts for kind, counts in kinds.items() if counts}


def by_line(cores: Sequence[CoreCount]) -> Counter[str]:
    total: Counter[str] = Counter()
    for core in cores:
        total.update(core.by_line())
    return total


def _print_shares(counts: Counter[str], cores: int, most: int) -> None:
    total = sum(counts.values())
    for place, number in counts.most_common(most):
        print(f"    {number / cores:12,.0f}  {number / total:6.1%}  {place}")


def _print_call(name: str, wanted: str, lines: int) -> None:
    for kind, cores in count_case(standard_case(name), wanted).items():
        counts = [core.instructions for core in cores]
        mean = sum(counts) / len(counts)
        issued = sum(len(core.trace) for core in cores) / len(cores)
        print(
            f"{name}, {wanted} kernel, {len(cores)} {kind} cores: {mean:,.0f} scalar instructions "
            f"each, at most {max(counts):,}; {mean / issued:.0f} for each of {issued:,.0f} issued"
        )
        where = by_line(cores)
        files: Counter[str] = Counter()
        for place, number in where.items():
            files[place.rsplit(":", 1)[0]] += number
        _print_shares(files, len(cores), 12)
        print("    by line")
        _print_shares(where, len(cores), lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scalar", description=__doc__)
    parser.add_argument("calls", nargs="*", default=["prefill-2048", "decode-16x2048"])
    parser.add_argument("--kernel", default="mixed", choices=["mixed", "vector"])
    parser.add_argument("--lines", type=int, default=25)
    arguments = parser.parse_args()
    for name in arguments.calls:
        if name not in CALLS:
            parser.error(f"{name} is none of {', '.join(CALLS)}")
        _print_call(name, arguments.kernel, arguments.lines)


if __name__ == "__main__":
    main()
