"""Interleaved timing: every candidate in turn, after the caches were flushed, and warm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

# More than the last-level cache of the machines in reach; where it isn't, only the ratios of
# memory-bound rows suffer.
_FLUSH_BYTES = 512 * 2**20

# OpenMP's threads spin for some milliseconds after their work. A peer with threads of its own would
# share the processor with them.
_SETTLE_SECONDS = 0.03

WARM_SECONDS = 0.005
"""Of a sample of warm calls: threads have woken up and caches are full long before."""

_MOST_CALLS = 1000


class Flusher:
    """Evicts the caches by streaming through memory of its own, then lets all threads sleep."""

    def __init__(self) -> None:
        self._memory = torch.zeros(_FLUSH_BYTES // 4)

    def __call__(self) -> None:
        """Read and write every byte."""
        self._memory.add_(1.0)
        time.sleep(_SETTLE_SECONDS)


@dataclass(frozen=True)
class Samples:
    """Seconds of one candidate's calls.

    Attributes
    ----------
    cold : tuple of float
        After a flush.
    warm : tuple of float
        Calls that follow others of the same candidate: the mean of as many as fill `WARM_SECONDS`.
    """

    cold: tuple[float, ...]
    warm: tuple[float, ...]


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of the quotients of two candidates' times within a round.

    On a machine that others share, the calls of one round have more in common than those of the
    whole run.
    """
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def interleaved_samples(
    candidates: Mapping[str, Callable[[], object]],
    samples: int,
    flush: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """Time each candidate `samples` times, in rotation: a cold call, and then warm ones.

    Parameters
    ----------
    candidates : mapping of str to callable
        What to time. Each is called once before, unmeasured.
    samples : int
        Samples of each candidate.
    flush : callable
        Called before each cold call, outside the time.
    clock : callable
        Returns seconds.

    Returns
    -------
    dict of str to Samples
        What every call took.
    """
    cold: dict[str, list[float]] = {name: [] for name in candidates}
    warm: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(samples):
        for name, call in candidates.items():
            flush()
            cold[name].append(_seconds(call, 1, clock))
            # The cold time is longer than a warm one, so this is fewer calls than would do.
            calls = max(1, min(_MOST_CALLS, int(WARM_SECONDS / max(cold[name][-1], 1e-9))))
            warm[name].append(_seconds(call, calls, clock))
    return {name: Samples(tuple(cold[name]), tuple(warm[name])) for name in candidates}


def _seconds(call: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def interleaved_medians(
    candidates: Mapping[str, Callable[[], object]],
    samples: int,
    flush: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Time one call of each candidate `samples` times, in rotation.

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
            times[name].append(_seconds(call, 1, clock))
    return {name: statistics.median(values) for name, values in times.items()}
