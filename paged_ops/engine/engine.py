"""Continuous batching over the paged cache.

Every step is one forward pass over whatever there is to compute: the prompts of requests that join,
as far as their beginnings are not in the cache already, and one token each of those that run. A
request that finishes leaves at once, its blocks go back to the pool and the next one joins in the
following step. When the pool runs out of blocks, the youngest request gives up its own and starts
over later from its prompt and what it had generated.

A step may be broken off anywhere, by a KeyboardInterrupt too, and the next one goes on: what it has
to do follows from what the books and the requests say. Until the tokens of all requests are chosen
nothing has happened but that requests have joined, grown or lost their blocks. From the assignment
that makes the choice known it has happened, and carrying it out can be repeated.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_ops import Batch, BlockManager, OutOfBlocks, PagedKVCache, build_batch
from paged_ops.arguments import checked_int
from paged_ops.batch.decode import DecodeBatches
from paged_ops.engine.model import Model, PagedLayers
from paged_ops.engine.report import Occupancy, StepReport
from paged_ops.engine.request import Request, State, StopRule, never
from paged_ops.engine.sampler import Sampler


@dataclass(frozen=True)
class _Choice:
    """What becomes of a request in a step, which it begins with so many tokens generated."""

    request: Request
    num_generated: int
    token: int | None = None
    ends: State | None = None
    error: Exception | None = None


class Engine:
    """Runs requests through a model, at most ``max_batch`` at a time, out of one pool of blocks.

    A request ends by itself: when it has all its tokens, when its stop rule says so, when it is
    cancelled, or when it fails, because its stop rule raises or the model does even for it alone.
    The others go on, with the tokens that each would have by itself. Who has ended is forgotten
    here. One thread may use an engine at a time.

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
    prefix_caching : bool
        Whether prompts find what others have left in the pool.

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
        prefix_caching: bool = True,
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
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self._decode_batches = DecodeBatches(self.manager)
        self.max_batch = checked_int("max_batch", max_batch, 1)
        self.sampler = Sampler() if sampler is None else sampler
        self.step_count = 0
        self._indices = itertools.count()
        # Every running request is older than every waiting one, and both run from old to young:
        # requests join from the front of the queue, and the youngest goes back to it. Who moves is
        # put into the one before it is taken out of the other.
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        # What the present step has done so far; kept if it is broken off, for its repetition.
        self._joined: list[int] = []
        self._preempted: list[int] = []
        self._outcome: tuple[list[_Choice], StepReport] | None = None
        self._is_settled = True  # whether the last call that moves requests came to its end

    @property
    def requests(self) -> list[Request]:
        """The requests that have not ended, from old to young."""
        everyone = {request.index: request for request in (*self._running, *self._waiting)}
        return [everyone[i] for i in sorted(everyone) if not everyone[i].has_ended]

    def submit(self, prompt: Sequence[int], max_new_tokens: int, stop: StopRule = never) -> Request:
        """Queue a prompt; it joins the batch in one of the next steps.

        Raises
        ------
        ValueError
            The prompt is empty or has a token that the model doesn't know, or the request could
            outgrow the model's positions or the whole pool. A request that fits the pool alone
            always finishes: it is preempted at most until the older ones are done.
        TypeError
            A token or `max_new_tokens` is no integer, or `stop` can't be called.
        """
        last = self.model.config.vocab_size - 1
        tokens = [checked_int(f"prompt[{i}]", id, 0, last) for i, id in enumerate(prompt)]
        max_new_tokens = checked_int("max_new_tokens", max_new_tokens, 0)
        if not callable(stop):
            raise TypeError(f"stop is {stop!r}, expected a function of the tokens generated")
        # The last token generated is never fed back, so it takes no position and no slot.
        length = len(tokens) + max_new_tokens - 1
        blocks = -(-length // self.manager.block_size)
        limit = self.model.config.max_positions
        asked = f"{len(tokens)} prompt tokens and {max_new_tokens} new ones"
        if not tokens or not max_new_tokens:
            raise ValueError(f"{asked}, expected 1 or more")
        if length > limit:
            raise ValueError(f"{asked} are more than the model's {limit} positions")
        if blocks > self.manager.num_blocks:
            raise ValueError(
                f"{asked} need {blocks} blocks of {self.manager.block_size}, but the pool has "
                f"{self.manager.num_blocks}"
            )
        request = Request(next(self._indices), tokens, max_new_tokens, stop)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request and give back its blocks; if it has ended, do nothing.

        It keeps what it has generated. A stop rule may cancel any request.

        Raises
        ------
        ValueError
            The request is another engine's.
        """
        if request.has_ended:
            return
        if request not in self._running and request not in self._waiting:
            raise ValueError(f"request {request.index} is not one of this engine's")
        settled, self._is_settled = self._is_settled, False
        self._end(request, State.CANCELLED)
        self._is_settled = settled

    def run(self) -> Iterator[StepReport]:
        """Step until every request has ended."""
        while self._waiting or self._running or self._outcome:
            yield self.step()

    def step(self) -> StepReport:
        """Grow, admit, compute one batch, choose a token for each request in it.

        A step that raises can be repeated, and gives the tokens that it would have given.
        """
        if not self._is_settled:
            self._settle()
        self._is_settled = False
        if self._outcome is None:
            self._grow()
            # Blocks that a preemption has just freed belong to the requests it was made for.
            if not self._preempted:
                self._admit()
            self._outcome = self._choose()
        report = self._carry_out(*self._outcome)
        self._is_settled, self._outcome = True, None
        return report

    def occupancy(self) -> Occupancy:
        """Record who owns which block now."""
        size, num_blocks = self.manager.block_size, self.manager.num_blocks
        owners, filled = [-1] * num_blocks, [0] * num_blocks
        with self.manager.lock, self.manager.ledger as ledger:
            running = [r.index for r in self._running if r.index in ledger.requests]
            for index in running:
                held = ledger.requests[index]
                for block in held.table:
                    owners[block] = index
                    filled[block] = size
                filled[held.table[-1]] = held.num_tokens - (len(held.table) - 1) * size
        return Occupancy(self.step_count, owners, filled, size)

    # ---------------------------------------------------------------- who runs

    def _settle(self) -> None:
        """Sort the requests anew, after a call that was broken off between two of its moves."""
        running = {request.index for request in self._running}
        everyone = {request.index: request for request in (*self._running, *self._waiting)}
        sorted_anew: tuple[list[Request], list[Request]] = [], []
        for index in sorted(everyone):
            request = everyone[index]
            runs = index in running and self._holds_blocks(request) and not request.has_ended
            if not runs:
                self._free(request)
            if not request.has_ended:
                waits = State.PREEMPTED if request.preemptions else State.WAITING
                request.state = State.RUNNING if runs else waits
                sorted_anew[not runs].append(request)
        self._running, self._waiting = sorted_anew[0], deque(sorted_anew[1])

    def _holds_blocks(self, request: Request) -> bool:
        with self.manager.lock, self.manager.ledger as ledger:
            return request.index in ledger.requests

    def _free(self, request: Request) -> None:
        if self._holds_blocks(request):
            self.manager.free(request.index)

    def _grow(self) -> None:
        """Give each running request the slot of its newest token, the oldest request first."""
        for request in list(self._running):
            while request.state is State.RUNNING:
                try:
                    self._make_room(request)
                except OutOfBlocks:
                    self._preempt(self._running[-1])
                else:
                    break

    def _make_room(self, request: Request) -> None:
        """Let a request hold blocks for all its tokens."""
        with self.manager.lock, self.manager.ledger as ledger:
            held = ledger.find(request.index)
            new = array("q", request.tokens[held.num_tokens :])
            ledger.refuse_growth([(held, len(new), new)])
            self.cache.copy_blocks(ledger.grow([(held, len(new), new)]))

    def _preempt(self, request: Request) -> None:
        """Let the youngest running request wait, before all that wait already."""
        self._preempted.append(request.index)
        self._waiting.appendleft(request)
        self.manager.preempt(request.index)
        request.preemptions += 1
        request.state = State.PREEMPTED
        self._running.remove(request)

    def _admit(self) -> None:
        """Let waiting requests join, in their order, while there is room for them."""
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting[0]
            try:
                request.num_cached = self.manager.allocate(request.index, request.tokens)
            except OutOfBlocks:
                break
            request.num_computed = request.num_cached
            request.state = State.RUNNING
            self._joined.append(request.index)
            self._running.append(request)
            self._waiting.popleft()

    def _end(self, request: Request, state: State, error: Exception | None = None) -> None:
        request.error = error
        request.state = state
        self._free(request)
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)

    # ---------------------------------------------------------------- what comes of them

    def _choose(self) -> tuple[list[_Choice], StepReport]:
        """Compute the running requests, and choose what becomes of each; nothing happens yet."""
        running = list(self._running)
        occupancy = self.occupancy()
        logits = self._compute(running)
        rows = zip(running, logits, strict=True)
        choices = [self._choice(request, row) for request, row in rows if not request.has_ended]
        return choices, StepReport(
            step=self.step_count + 1,
            tokens={each.request.index: each.token for each in choices if each.token is not None},
            joined=list(dict.fromkeys(self._joined)),
            preempted=list(dict.fromkeys(self._preempted)),
            finished=[each.request.index for each in choices if each.ends is State.FINISHED],
            failed=[each.request.index for each in choices if each.ends is State.FAILED],
            num_computed=sum(len(request.tokens) - request.num_computed for request in running),
            occupancy=occupancy,
        )

    def _choice(self, request: Request, logits: Tensor | Exception) -> _Choice:
        """Choose a request's next token, and say whether it ends with that."""
        count = len(request.generated)
        if isinstance(logits, Exception):
            return _Choice(request, count, None, State.FAILED, logits)
        scores = self.sampler.scores(logits, request.index, len(request.tokens))
        token = int(scores.argmax())
        try:
            ends = count + 1 == request.max_new_tokens or request.stop([*request.generated, token])
        except Exception as error:
            return _Choice(request, count, token, State.FAILED, error)
        return _Choice(request, count, token, State.FINISHED if ends else None)

    def _carry_out(self, choices: list[_Choice], report: StepReport) -> StepReport:
        """Let happen what was chosen, as far as it has not."""
        for choice in choices:
            request = choice.request
            if request.has_ended:
                continue
            if choice.token is not None:
                if len(request.generated) == choice.num_generated:
                    request.generated.append(choice.token)
                request.num_computed = len(request.prompt) + choice.num_generated
                self.manager.commit(request.index, request.num_computed)
            if choice.ends is not None:
                self._end(request, choice.ends, choice.error)
        self.step_count = report.step
        self._joined, self._preempted = [], []
        return report

    def _compute(self, running: list[Request]) -> Sequence[Tensor | Exception]:
        """Return each request's logits; where the model raises for all, those of each by itself."""
        if not running:
            return []
        try:
            return list(self._forward(running))
        except Exception:
            return [self._compute_alone(request) for request in running]

    def _compute_alone(self, request: Request) -> Tensor | Exception:
        try:
            return self._forward([request])[0]
        except Exception as error:
            return error

    @torch.inference_mode()
    def _forward(self, requests: list[Request]) -> Tensor:
        """Compute all tokens that are to compute; return each request's last row of logits."""
        new = [request.tokens[request.num_computed :] for request in requests]
        lengths = [len(tokens) for tokens in new]
        batch = self._build_batch([request.index for request in requests], lengths)
        positions = [
            position
            for length, total in zip(lengths, batch.seq_lens.tolist(), strict=True)
            for position in range(total - length, total)
        ]
        return self.model(
            torch.tensor([token for tokens in new for token in tokens]),
            torch.tensor(positions),
            PagedLayers(self.cache, batch),
            rows=batch.query_start_loc[1:].long() - 1,
        )

    def _build_batch(self, indices: list[int], lengths: list[int]) -> Batch:
        """Build a step's index tensors: so many new tokens of each request."""
        if max(lengths) == 1:
            return self._decode_batches.build(indices)
        return build_batch(self.manager, indices, lengths)
