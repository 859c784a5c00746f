"""What calls of attention cost, by the model: python -m tests.sim.cost [call ...].

The calls are those of scalar.py: 32 heads on 8 KV heads of 128, float16, blocks of 128. Launches
each and prints the time, which pipe takes it, and what crosses between GM and the cores, as the
tables of docs/ascend.md have it. The time is made of the scalar instructions too; where they can't
be counted it says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from tests.sim import counting, kernel_calls
from tests.sim.harness import PIPES, CoreCounters, Counters, configured, launch
from tests.sim.scalar import CALLS, standard_case

MEGAHERTZ = 1800  # of a 910B2 and B3; a B1 has 1850, a B4 1500
HBM = 1.6e12  # bytes a second
CUBES = 24
STEP = 2 * 16**3  # operations of a cube core in a cycle


def roofline(name: str, clock: int = MEGAHERTZ) -> float:
    """Return the cycles of a call's bytes from HBM, or of its products, whichever is more."""
    lengths = CALLS[name]["seq_lens"]
    new = CALLS[name].get("query_lens", [1] * len(lengths))
    pairs = sum(q * (k - q) + q * (q + 1) // 2 for q, k in zip(new, lengths, strict=True))
    operations = 4 * 32 * 128 * pairs
    cache_bytes = 2 * sum(lengths) * 8 * 128 * 2
    return max(cache_bytes / HBM * clock * 1e6, operations / (CUBES * STEP))


def measure(name: str, wanted: str = "mixed") -> Counters:
    case = standard_case(name)
    how = partial(launch, counted=counting.is_possible())
    run = kernel_calls.attention(*case.tensors, **case.options, wanted=wanted, how=how)
    if run.result.violations:
        raise AssertionError(run.result.violations[0])
    counters: Counters = run.result.counters
    return counters


def _print_cores(kind: str, cores: Sequence[CoreCounters]) -> None:
    busy = {pipe: sum(core.busy_cycles[pipe] for core in cores) / len(cores) for pipe in PIPES}
    pipes = ", ".join(f"{pipe} {cycles:,.0f}" for pipe, cycles in busy.items() if cycles)
    scalar = sum(core.scalar_instructions for core in cores) / len(cores)
    print(f"  {kind} core, cycles: {pipes}; {scalar:,.0f} scalar instructions of its own")
    conflicts = sum(core.bank_conflicts for core in cores)
    repeats = sum(core.vector_repeats for core in cores)
    if repeats:
        print(f"  repeats whose sources share a group of banks: {conflicts / repeats:.0%}")


def _print_call(name: str, wanted: str, clock: int) -> None:
    with configured(clock_mhz=clock):
        counters = measure(name, wanted)
    least = roofline(name, clock)
    cycles = counters.total_cycles
    print(
        f"{name}, {wanted} kernel: {cycles:,} cycles, {cycles / clock:,.0f} us, "
        f"{cycles / least:.2f} times the roofline's {least:,.0f}"
    )
    cubes = counters.of_kind(cube=True)
    if cubes:
        _print_cores("cube", cubes)
        busy = sum(core.busy_cycles["M"] for core in cubes) / len(cubes)
        print(f"  matrix unit busy {busy / counters.total_cycles:.0%}")
    _print_cores("vector", counters.of_kind(cube=False))
    for tensor, traffic in counters.traffic.items():
        read, written = traffic.read_bytes / 1e6, traffic.written_bytes / 1e6
        if read + written >= 0.1:
            hbm = traffic.hbm_bytes / 1e6
            print(f"  {tensor}: {read:,.1f} MB read ({hbm:,.1f} from HBM), {written:,.1f} written")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cost", description=__doc__)
    parser.add_argument("calls", nargs="*", default=["decode-16x2048", "prefill-2048"])
    parser.add_argument("--kernel", default="mixed", choices=["mixed", "vector"])
    parser.add_argument("--clock", type=int, default=MEGAHERTZ, help="megahertz of the cores")
    arguments = parser.parse_args()
    if not counting.is_possible():
        print("scalar instructions are not counted on this host: 2 cycles for each issued")
    for name in arguments.calls:
        if name not in CALLS:
            parser.error(f"{name} is none of {', '.join(CALLS)}")
        _print_call(name, arguments.kernel, arguments.clock)


if __name__ == "__main__":
    main()
