"""Run the driver under valgrind: no result may depend on memory that nobody wrote.

The scratch memory, whatever the pool holds outside the sequences, and the spare entries of block
tables count as uninitialised. ``python -m tests.driver.memcheck`` builds the driver for this
machine; it fails where valgrind reports anything or a result is wrong.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys

import torch

from tests.driver import calls
from tests.driver.build import program
from tests.driver.calls import Call, Results
from tests.driver.cases import (
    attention_cases,
    long_sequences,
    states,
    with_last_value,
)
from tests.driver.suite import (
    new_rows_become_the_nearest_elements_of_a_quantised_pool,
    rows_of_a_quantised_pool_come_out_times_their_scales,
)
from tests.support.checks import assert_accurate, assert_merged
from tests.support.sequences import DTYPES, Placement, place

# valgrind knows no AVX-512, and tells the library so.
ISAS = ("generic", "avx2") if platform.machine() == "x86_64" else ("generic", "neon")
VALGRIND = ("valgrind", "--quiet", "--error-exitcode=1", "--track-origins=yes")


def check(isa: str, dtype: torch.dtype) -> None:
    """Make every call under valgrind, and hold the results against the reference."""

    def run(made: list[Call]) -> list[Results]:
        chosen, results = calls.run([*VALGRIND, str(program(platform.machine()))], made, isa)
        assert chosen == isa
        return results

    long = long_sequences(dtype)
    cases = [*attention_cases(dtype), (long, Placement())]
    a, b = states(dtype)
    made = [calls.attention(place(*case), num_threads=3) for case in cases]
    made.append(calls.merge_states(a, b, num_threads=2))
    made.append(calls.attention(place(with_last_value(long, math.inf), Placement())))
    *attended, merged, _ = run(made)  # infinities are no matter for the reference
    for (sequences, _), (output, lse) in zip(cases, attended, strict=True):
        assert_accurate(sequences, output, lse)
    assert_merged(a, b, *merged)
    new_rows_become_the_nearest_elements_of_a_quantised_pool(run, dtype)
    rows_of_a_quantised_pool_come_out_times_their_scales(run, dtype)
    print(f"{isa}, {dtype}: nothing uninitialised reaches a result")


def main() -> None:
    build = ["-m", "tests.driver.build", platform.machine(), os.environ.get("CXX", "g++")]
    subprocess.run([sys.executable, *build], check=True)
    for isa in ISAS:
        for dtype in DTYPES:
            check(isa, dtype)


if __name__ == "__main__":
    main()
