"""``python -m paged_ops.bench``: choose a benchmark."""

from __future__ import annotations

import argparse
import json

from paged_ops.bench import accuracy, compile, manager, overhead, prefix, quantised, vllm_engines
from paged_ops.bench.attention import command as attention
from paged_ops.bench.memory import command as memory
from paged_ops.bench.serving import command as serving

BENCHMARKS = {
    "accuracy": accuracy,
    "attention": attention,
    "compile": compile,
    "manager": manager,
    "memory": memory,
    "overhead": overhead,
    "prefix": prefix,
    "quantised": quantised,
    "serving": serving,
    "vllm": vllm_engines,
}
"""Each has `add_arguments(parser)` and `run(options)`, which returns what ``--json`` writes."""


def main() -> None:
    """Parse the command line and run the benchmark it names."""
    parser = argparse.ArgumentParser(prog="python -m paged_ops.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        about = str(benchmark.__doc__).partition(": ")[2]
        benchmark.add_arguments(commands.add_parser(name, help=about))
    options = parser.parse_args()
    results = BENCHMARKS[options.benchmark].run(options)
    if getattr(options, "json", None) is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
