"""Continuous batching over the paged cache.

Every step is one forward pass over whatever there is to compute: the prompts of requests that join,
as far as their beginnings are not in the cache already, and one token each of those that run. A
request that finishes leaves at once, its blocks go back to the pool and the next one joins in the
following step. When the pool runs out of blocks, the youngest request gives up its own and starts
over later from its prompt and what it had generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from paged_ops import Batch, BlockManager, OutOfBlocks, PagedKVCache, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.engine.model import Model, PagedLayers
from paged_ops.engine.report import Occupancy, StepReport
from paged_ops.engine.request import Request, State, StopRule, never
from paged_ops.engine.sampler import Sampler


class Engine:
    """Runs requests through a model, at most ``max_batch`` at a time, out of one pool of blocks.

    Parameters
    ----------
    model : Model
        The demo's own model, or one of transformers behind
        `paged_ops.integrations.transformers.PackedModel`; its dtype is the cache's.
    num_blocks, block_size : int
        The pool: blocks per layer, and tokens per block.
    max_batch : int
        Requests that run at the same time.
    sampler : Sampler
        How tokens are chosen.

    Examples
    --------
    >>> from paged_ops.demo.model import load_model
    >>> engine = Engine(load_model(), num_blocks=8, block_size=4, max_batch=2)
    >>> requests = [engine.submit([5, 6, 7], max_new_tokens=3) for _ in range(3)]
    >>> for report in engine.run():
    ...     print(report.step, report.joined, report.finished)
    1 [0, 1] []
    2 [] []
    3 [] [0, 1]
    4 [2] []
    5 [] []
    6 [] [2]
    >>> requests[0].generated == requests[2].generated, engine.manager.num_used
    (True, 0)
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_batch: int,
        sampler: Sampler | None = None,
    ) -> None:
        config = model.config
        self.model = model
        self.cache = PagedKVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            next(model.parameters()).dtype,
            head_dim_v=getattr(config, "head_dim_v", None),
        )
        self.manager = BlockManager(num_blocks, block_size)
        self._decode_batches = DecodeBatches(self.manager)
        self.max_batch = max_batch
        self.sampler = Sampler() if sampler is None else sampler
        self.requests: list[Request] = []
        self.step_count = 0
        self._waiting: deque[Request] = deque()
        # Every running request is older than every waiting one, and both run from old to young:
        # requests join from the front of the queue, and the youngest goes back to it.
        self._running: list[Request] = []

    def submit(self, prompt: list[int], max_new_tokens: int, stop: StopRule = never) -> Request:
        """Queue a prompt; it joins the batch in one of the next steps.

        Raises
        ------
        ValueError
            The prompt is empty, or the request could outgrow the model's positions or the whole
            pool. A request that fits the pool alone always finishes: it is preempted at most until
            the older ones are done.
        """
        # The last token generated is never fed back, so it takes no position and no slot.
        length = len(prompt) + max_new_tokens - 1
        blocks = -(-length // self.manager.block_size)
        limit = self.model.config.max_positions
        if not prompt or max_new_tokens < 1:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones, expected 1 or more"
            )
        if length > limit:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones are more than the "
                f"model's {limit} positions"
            )
        if blocks > self.manager.num_blocks:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {blocks} blocks "
                f"of {self.manager.block_size}, but the pool has {self.manager.num_blocks}"
            )
        request = Request(len(self.requests), list(prompt), max_new_tokens, stop)
        self.requests.append(request)
        self._waiting.append(request)
        return request

    def run(self) -> Iterator[StepReport]:
        """Step until every request has finished."""
        while self._waiting or self._running:
            yield self.step()

    def step(self) -> StepReport:
        """Grow, admit, compute one batch, choose a token for each request in it."""
        self.step_count += 1
        preempted = self._grow()
        # Blocks that a preemption has just freed belong to the requests it was made for.
        joined = [] if preempted else self._admit()
        new_tokens = [
            request.tokens[request.num_cached :] if request in joined else request.tokens[-1:]
            for request in self._running
        ]
        logits = self._forward(new_tokens)
        occupancy = self.occupancy()
        for request in self._running:
            self.manager.commit(request.index)
        finished = []
        for request, row in zip(list(self._running), logits, strict=True):
            scores = self.sampler.scores(row, request.index, len(request.tokens))
            request.generated.append(int(scores.argmax()))
            if len(request.generated) == request.max_new_tokens or request.stop(request.generated):
                finished.append(request)
                self._leave(request, State.FINISHED)
        return StepReport(
            step=self.step_count,
            tokens={r.index: r.generated[-1] for r in [*self._running, *finished]},
            joined=[request.index for request in joined],
            preempted=[request.index for request in preempted],
            finished=[request.index for request in finished],
            num_computed=sum(map(len, new_tokens)),
            occupancy=occupancy,
        )

    def occupancy(self) -> Occupancy:
        """Record who owns which block now."""
        size, num_blocks = self.manager.block_size, self.manager.num_blocks
        owners, filled = [-1] * num_blocks, [0] * num_blocks
        for request in self._running:
            length = self.manager.num_tokens(request.index)
            table = self.manager.block_table(request.index)
            for block in table:
                owners[block] = request.index
                filled[block] = size
            filled[table[-1]] = length - (len(table) - 1) * size
        return Occupancy(self.step_count, owners, filled, size)

    def _grow(self) -> list[Request]:
        """Give each running request the slot of its newest token, the oldest request first.

        Returns the requests that were preempted to make that possible.
        """
        preempted: list[Request] = []
        for request in list(self._running):
            while request.state is State.RUNNING:
                try:
                    copies = self.manager.append(request.index, request.tokens[-1:])
                except OutOfBlocks:
                    youngest = self._running[-1]
                    self._leave(youngest, State.PREEMPTED)
                    youngest.preemptions += 1
                    self._waiting.appendleft(youngest)
                    preempted.append(youngest)
                else:
                    self.cache.copy_blocks(copies)
                    break
        return preempted

    def _admit(self) -> list[Request]:
        """Let waiting requests join, in their order, while there is room for them."""
        joined: list[Request] = []
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting[0]
            try:
                request.num_cached = self.manager.allocate(request.index, request.tokens)
            except OutOfBlocks:
                break
            self._waiting.popleft()
            request.state = State.RUNNING
            self._running.append(request)
            joined.append(request)
        return joined

    def _leave(self, request: Request, state: State) -> None:
        self._running.remove(request)
        self.manager.free(request.index)
        request.state = state

    def _build_batch(self, lengths: list[int]) -> Batch:
        """Build a step's index tensors: so many new tokens of each running request."""
        running = [request.index for request in self._running]
        if max(lengths) == 1:
            return self._decode_batches.build(running)
        return build_batch(self.manager, running, lengths)

    @torch.inference_mode()
    def _forward(self, new_tokens: list[list[int]]) -> Tensor:
        """Compute the new tokens of all running requests; return each one's last row of logits."""
        lengths = [len(tokens) for tokens in new_tokens]
        batch = self._build_batch(lengths)
        positions = [
            position
            for length, total in zip(lengths, batch.seq_lens.tolist(), strict=True)
            for position in range(total - length, total)
        ]
        return self.model(
            torch.tensor([token for tokens in new_tokens for token in tokens]),
            torch.tensor(positions),
            PagedLayers(self.cache, batch),
            rows=batch.query_start_loc[1:].long() - 1,
        )
