"""``python -m paged_ops.bench manager``: what the bookkeeping costs, in microseconds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from paged_ops.batch.batch import build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.blocks.digest import chain_digests
from paged_ops.blocks.manager import BlockManager

POOLS = (1_000, 10_000, 100_000, 1_000_000)
BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 100
RUNNING = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--samples", type=int, default=5, help="timed rounds; the least counts")


def run(options: argparse.Namespace) -> None:
    """Time blocks by the size of the pool, then the batches of decode steps."""
    print("Processor time of this thread, the least of all rounds.\n")
    print("allocate + append + free, microseconds per block")
    print(f"{'pool':>9} {'by count':>9} {'by ids, committed':>18} {'of it SHA-256':>14}")
    for num_blocks in POOLS:
        counted = _least(options.samples, partial(_churn, num_blocks, _counts))
        named = _least(options.samples, partial(_churn, num_blocks, _ids))
        hashed = _least(options.samples, partial(_hash_only, num_blocks))
        cells = (1e6 * seconds / num_blocks for seconds in (counted, named, hashed))
        print("{:9} {:9.2f} {:18.2f} {:14.2f}".format(num_blocks, *cells), flush=True)
    print(
        f"\nindex tensors of a decode step, {RUNNING} requests of about 1000 tokens, microseconds"
    )
    for name, seconds in _decode_steps(options.samples).items():
        print(f"{name:32} {1e6 * seconds:8.1f}")


def _least(samples: int, call: Callable[[], object]) -> float:
    """Return the least processor time of a call: others on the machine only ever add to it."""
    times = []
    for _ in range(samples):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def _counts() -> Iterator[tuple[Any, Any]]:
    """Yield the prompt and the answer of one request after the other, as counts."""
    while True:
        yield (BLOCKS_PER_REQUEST - 1) * BLOCK_SIZE, BLOCK_SIZE


def _ids() -> Iterator[tuple[Any, Any]]:
    """Yield prompts and answers as ids; no two prompts begin alike."""
    tail = list(range((BLOCKS_PER_REQUEST - 1) * BLOCK_SIZE - 1))
    answer = list(range(BLOCK_SIZE))
    for number in range(2**62):
        yield [number, *tail], answer


def _churn(num_blocks: int, tokens: Callable[[], Iterator[tuple[Any, Any]]]) -> None:
    """Fill a pool with requests, and take them all away again."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    requests = range(num_blocks // BLOCKS_PER_REQUEST)
    for request, (prompt, answer) in zip(requests, tokens(), strict=False):
        manager.allocate(request, prompt)
        manager.append(request, answer)
        if not isinstance(prompt, int):
            manager.commit(request)
    for request in requests:
        manager.free(request)


def _hash_only(num_blocks: int) -> None:
    """Compute the digests that `_churn` of ids needs, and nothing else."""
    requests = range(num_blocks // BLOCKS_PER_REQUEST)
    for _, (prompt, answer) in zip(requests, _ids(), strict=False):
        chain_digests(prompt + answer, BLOCK_SIZE)


def _decode_steps(samples: int) -> dict[str, float]:
    """Time the steps in which only lengths change, those with new blocks, and building afresh."""
    aligned = [1000] * RUNNING  # 7 of 8 steps take no block, then all requests take one
    in_turn = [1000 - number % BLOCK_SIZE for number in range(RUNNING)]
    return {
        "DecodeBatches, lengths only": min(_steps(aligned, samples, DecodeBatches.build)),
        f"DecodeBatches, {RUNNING // BLOCK_SIZE} new blocks": min(
            _steps(in_turn, samples, DecodeBatches.build)
        ),
        "build_batch": min(
            _steps(in_turn, samples, lambda b, requests: build_batch(b.manager, requests))
        ),
    }


def _steps(
    lengths: list[int], samples: int, build: Callable[[DecodeBatches, list[str]], object]
) -> list[float]:
    """Time the building of each of some decode steps."""
    manager = BlockManager(2 * RUNNING * BLOCKS_PER_REQUEST, BLOCK_SIZE)
    requests = [f"request {number}" for number in range(RUNNING)]
    for request, length in zip(requests, lengths, strict=True):
        manager.allocate(request, length)
    batches = DecodeBatches(manager)
    times = []
    for _ in range(20 * samples):
        for request in requests:
            manager.append(request, 1)
        times.append(_least(1, partial(build, batches, requests)))
    return times
