"""``python -m paged_ops.bench``: choose a benchmark."""

from __future__ import annotations

import argparse

from paged_ops.bench import (
    accuracy,
    attention,
    compile,
    manager,
    memory,
    overhead,
    quantised,
    serving,
)


def main() -> None:
    """Parse the command line and run the benchmark it names."""
    parser = argparse.ArgumentParser(prog="python -m paged_ops.bench", description=__doc__)
    benchmarks = parser.add_subparsers(required=True)
    accuracy.add_parser(benchmarks)
    attention.add_parser(benchmarks)
    compile.add_parser(benchmarks)
    manager.add_parser(benchmarks)
    memory.add_parser(benchmarks)
    overhead.add_parser(benchmarks)
    quantised.add_parser(benchmarks)
    serving.add_parser(benchmarks)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
