"""A saturated queue: requests wait, as many run as fit, and every slot of the pool is accounted.

First come, first served; a prompt is computed in the step that admits it, and each running request
gets one token a step. `live + reserved + internal + external` is the whole pool at each step: slots
that hold a token, that are kept for a token sure to come, that are held and never used, that nobody
holds while a request waits.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paged_ops.bench.memory.buddy import Buddies
from paged_ops.bench.memory.lengths import Request
from paged_ops.blocks.errors import OutOfBlocks
from paged_ops.blocks.manager import BlockManager


@dataclass
class Usage:
    """Sums over the steps at which a request waited, in slots."""

    num_slots: int
    num_requests: int
    steps: int = 0
    running: int = 0
    live: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    preemptions: int = 0

    def add(self, running: int, live: int, reserved: int, internal: int) -> None:
        """Count one step."""
        external = self.num_slots - live - reserved - internal
        assert min(live, reserved, internal, external) >= 0, (live, reserved, internal, external)
        self.steps += 1
        self.running += running
        self.live += live
        self.reserved += reserved
        self.internal += internal
        self.external += external

    def share(self, slots: int) -> float:
        """Return a sum as a share of the pool, in percent."""
        return 100 * slots / (self.steps * self.num_slots)

    @property
    def mean_running(self) -> float:
        """Requests that ran at once."""
        return self.running / self.steps

    @property
    def allocation_utilisation(self) -> float:
        """Share of the held slots that hold a token, in percent."""
        return 100 * self.live / (self.live + self.reserved + self.internal)

    @property
    def preemptions_per_request(self) -> float:
        """How often a request was preempted, on average."""
        return self.preemptions / self.num_requests


def power_of_two(output: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << (output - 1).bit_length()


def contiguous(
    requests: Sequence[Request], num_slots: int, reserve: Callable[[Request], int]
) -> Usage:
    """Run a queue where each request gets one range for its whole life.

    Parameters
    ----------
    requests : sequence of Request
        The queue. The study ends when nobody waits any more.
    num_slots : int
        Slots of the pool.
    reserve : callable
        How many slots a request asks for.
    """
    usage, buddies = Usage(num_slots, len(requests)), Buddies(num_slots)
    finishing: list[tuple[int, int, int, Request]] = []  # (step, start, reserved slots, request)
    queue, step, live = deque(requests), 0, 0
    held = final = 0  # slots handed out, and those of them that will hold a token
    while queue:
        while queue and (start := buddies.take(reserve(queue[0]))) is not None:
            request = queue.popleft()
            heapq.heappush(finishing, (step + request.output, start, buddies.size(start), request))
            live += request.prompt
            held += buddies.size(start)
            final += request.prompt + request.output
        if not finishing:
            raise ValueError(f"{queue[0]} needs more than the whole pool of {num_slots} slots")
        if queue:
            usage.add(len(finishing), live, final - live, held - final)
        step += 1
        live += len(finishing)
        while finishing and finishing[0][0] == step:
            _, start, slots, request = heapq.heappop(finishing)
            buddies.give_back(start)
            live -= request.prompt + request.output
            final -= request.prompt + request.output
            held -= slots
    return usage


@dataclass(eq=False)
class _Running:
    """A request in the queue or in the pool; a preempted one comes back with what it has."""

    number: int
    queued: int  # tokens it has when it is admitted
    final: int
    joined: int = 0  # the step that admitted it

    def length(self, step: int) -> int:
        return self.queued + step - self.joined


class _PagedQueue:
    """A queue before a real `BlockManager`.

    The manager is told of tokens when the first of them needs a block; between, it only would
    count. So a step costs what changes in it, not what runs.
    """

    def __init__(self, requests: Sequence[Request], manager: BlockManager) -> None:
        self.manager = manager
        self.usage = Usage(manager.num_blocks * manager.block_size, len(requests))
        self.queue = deque(
            _Running(number, request.prompt, request.prompt + request.output)
            for number, request in enumerate(requests)
        )
        self.running: dict[int, _Running] = {}  # the oldest first
        # By step: who needs a block or has ended then, and when it had joined. A request that was
        # preempted since then has joined anew, if at all.
        self.due: defaultdict[int, list[tuple[_Running, int]]] = defaultdict(list)
        self.step = self.live = 0

    def run(self) -> Usage:
        while self.queue:
            before = self.usage.preemptions
            self._grow()
            if self.usage.preemptions == before:
                self._admit()
            if self.queue:
                held = self.manager.num_used * self.manager.block_size
                self.usage.add(len(self.running), self.live, 0, held - self.live)
            self.step += 1
        return self.usage

    def _grow(self) -> None:
        """Give every running request its token of this step, or end it."""
        self.live += len(self.running)
        due = [r for r, joined in self.due.pop(self.step, ()) if self._runs(r, joined)]
        ended = [request for request in due if request.length(self.step) > request.final]
        for request in ended:
            self._leave(request)
        for request in sorted(set(due).difference(ended), key=lambda request: request.number):
            self._append(request)

    def _append(self, request: _Running) -> None:
        """Take the block of a request's newest token, from the youngest ones if need be."""
        joined = request.joined
        while self._runs(request, joined):
            known = self.manager.num_tokens(request.number)
            try:
                self.manager.append(request.number, request.length(self.step) - known)
            except OutOfBlocks:
                youngest = next(reversed(self.running.values()))
                self._leave(youngest)
                youngest.queued = youngest.length(self.step) - 1
                youngest.joined = -1
                self.queue.appendleft(youngest)
                self.usage.preemptions += 1
            else:
                self._schedule(request)
                return

    def _admit(self) -> None:
        """Let requests join in their order as long as they fit."""
        while self.queue:
            request = self.queue[0]
            try:
                self.manager.allocate(request.number, request.queued)
            except OutOfBlocks:
                if not self.running:
                    raise
                return
            self.queue.popleft()
            request.joined = self.step
            self.running[request.number] = request
            self.live += request.queued
            self._schedule(request)

    def _leave(self, request: _Running) -> None:
        self.manager.free(request.number)
        del self.running[request.number]
        self.live -= request.length(self.step)

    def _schedule(self, request: _Running) -> None:
        """Note the step at which a request needs its next block, or has ended."""
        length, size = request.length(self.step), self.manager.block_size
        room = -(-length // size) * size
        step = self.step + min(room, request.final) + 1 - length
        self.due[step].append((request, request.joined))

    def _runs(self, request: _Running, joined: int) -> bool:
        return request.joined == joined and request.number in self.running


def paged(
    requests: Sequence[Request], num_slots: int, block_size: int, watermark: float = 0.0
) -> Usage:
    """Run a queue where each request gets blocks as its tokens come, from a `BlockManager`.

    Parameters
    ----------
    requests : sequence of Request
        The queue. The study ends when nobody waits any more.
    num_slots : int
        Slots of the pool; a last partial block is left out.
    block_size : int
        Slots per block.
    watermark : float
        The share that new requests leave free.
    """
    manager = BlockManager(num_slots // block_size, block_size, False, watermark)
    return _PagedQueue(requests, manager).run()
