"""``python -m paged_ops.ascend``: the first runs on an Ascend NPU, step by step, and a report.

Each step asks one thing more of the device than those before: that a launch reaches all cores with
its arguments in their places, that blocks are copied, that cores meet, and so on to attention on
all cores; then come the op tests, where they are, and the time of attention beside torch_npu's own.
A step runs in a process of its own with a limit to its time. What it found, and what that means,
goes into one file, which is what a report to the project should have attached.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paged_ops.ascend import report
from paged_ops.ascend.ladder import OP_TESTS, climb


def main() -> None:
    """Climb, tell what happens, write the report; exit with 1 unless all steps passed."""
    parser = argparse.ArgumentParser(
        prog="python -m paged_ops.ascend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--report", type=Path, default=Path("paged-ops-ascend.txt"), metavar="FILE")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="for each step on the device"
    )
    parser.add_argument("--op-tests", nargs="*", default=OP_TESTS, metavar="FILE")
    parser.add_argument("--no-benchmark", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    rows: list[report.Row] = []
    for row in climb(options.limit, tuple(options.op_tests), not options.no_benchmark):
        rows.append(row)
        report.write(options.report, about, rows)
        print(f"{row.name:<36}{row.finding.outcome:<10}{row.seconds:>8.1f} s", flush=True)
        for line in (row.finding.said, row.finding.explanation):
            if line and not row.finding.passed:
                print(f"    {line}", flush=True)
    print(f"the report is in {options.report}")
    sys.exit(not all(row.finding.passed for row in rows))


if __name__ == "__main__":
    main()
