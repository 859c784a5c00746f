"""Interleaved timing: every candidate in turn, with the caches flushed before each call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

# More than the last-level cache of the machines in reach; where it isn't, only the ratios of
# memory-bound rows suffer.
_FLUSH_BYTES = 512 * 2**20

# OpenMP's threads spin for some milliseconds after their work. A peer with threads of its own would
# share the processor with them.
_SETTLE_SECONDS = 0.03


class Flusher:
    """Evicts the caches by streaming through memory of its own, then lets all threads sleep."""

    def __init__(self) -> None:
        self._memory = torch.zeros(_FLUSH_BYTES // 4)

    def __call__(self) -> None:
        """Read and write every byte."""
        self._memory.add_(1.0)
        time.sleep(_SETTLE_SECONDS)


def interleaved_medians(
    candidates: Mapping[str, Callable[[], object]],
    samples: int,
    flush: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Time each candidate `samples` times, in rotation.

    Parameters
    ----------
    candidates : mapping of str to callable
        What to time. Each is called once before, unmeasured.
    samples : int
        Timed calls of each candidate.
    flush : callable
        Called before each timed call, outside the time.
    clock : callable
        Returns seconds.

    Returns
    -------
    dict of str to float
        Median seconds per call.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(samples):
        for name, call in candidates.items():
            flush()
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}
