"""Continuous batching over the paged cache.

Every step is one forward pass over whatever there is to compute: the prompts of requests that join,
as far as their beginnings are not in the cache already, and one token each of those that run. A
request that finishes leaves at once, its blocks go back to the pool and the next one joins in the
following step. When the pool runs out of blocks, the youngest request gives up its own and starts
over later from its prompt and what it had generated.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import paged_ops
from paged_ops import Batch, BlockManager, OutOfBlocks, PagedKVCache, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.demo.model import AttentionFunction, ContiguousAttention, LanguageModel

if TYPE_CHECKING:
    from paged_ops.integrations.transformers import PackedModel

StopRule = Callable[[Sequence[int]], bool]
"""Told the tokens generated so far, the newest included, says whether the request is finished."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""How far apart rounding alone may put two scores; about ten times what it does on this model."""


def never(generated: Sequence[int]) -> bool:
    """Stop rule of requests that run until ``max_new_tokens``."""
    return False


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and what has come of it.

    Attributes
    ----------
    index : int
        0 for the first request submitted; older requests keep their blocks when the pool is full.
    prompt : list of int
        The prompt's token ids, at least one.
    max_new_tokens : int
        Tokens to generate at most.
    stop : callable
        See :data:`StopRule`.
    generated : list of int
        Token ids generated so far. A preempted request keeps them: only their keys and values are
        computed anew.
    preemptions : int
        How often the request lost its blocks.
    num_cached : int
        How many of its tokens were in the cache when it joined, for the last time.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    stop: StopRule = never
    generated: list[int] = field(default_factory=list)
    state: State = State.WAITING
    preemptions: int = 0
    num_cached: int = 0

    @property
    def tokens(self) -> list[int]:
        """The prompt and everything generated."""
        return self.prompt + self.generated


@dataclass(frozen=True)
class Sampler:
    """Chooses the next token from its logits.

    With a temperature of 0 that is the largest logit. Otherwise Gumbel noise, drawn from a
    generator that is seeded with (seed, request, position), is added to ``logits / temperature``:
    the choice is a sample of the softmax, and it depends neither on the rest of the batch nor on
    whether the request was preempted.
    """

    temperature: float = 0.0
    seed: int = 0

    def scores(self, logits: Tensor, request: int, position: int) -> Tensor:
        """Return float32 ``[vocab_size]`` whose largest entry is the token to choose."""
        if self.temperature == 0.0:
            return logits
        # torch's generator uses 32 bits of its seed, so the three numbers are hashed into those.
        digest = hashlib.blake2b(f"{self.seed} {request} {position}".encode(), digest_size=4)
        generator = torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little"))
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        return logits / self.temperature - noise


class PagedLayers:
    """Attention over the paged cache for one step's batch; what the model calls in each layer."""

    def __init__(self, cache: PagedKVCache, batch: Batch) -> None:
        self._cache, self._batch = cache, batch

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Write the new keys and values into their slots, then attend through the block tables.

        Options are those of `paged_ops.attention`.
        """
        key_cache, value_cache = self._cache.layer(layer)
        batch, scales = self._batch, self._cache.scales(layer)
        paged_ops.write_kv(key, value, key_cache, value_cache, batch.slot_mapping, **scales)
        return paged_ops.attention(
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            **scales,
            **options,
        )


@dataclass(frozen=True)
class Snapshot:
    """Who owns which block at one moment.

    Attributes
    ----------
    step : int
        The step it was taken in; 0 before the first.
    owners : list of int
        For each block the index of the request that holds it, or -1.
    filled : list of int
        For each block how many of its slots hold a token.
    block_size : int
        Slots per block.
    """

    step: int
    owners: list[int]
    filled: list[int]
    block_size: int

    @property
    def used(self) -> int:
        """Blocks that a request holds."""
        return sum(owner >= 0 for owner in self.owners)

    @property
    def live_tokens(self) -> int:
        """Slots that hold a token."""
        return sum(self.filled)

    @property
    def waste(self) -> int:
        """Slots of owned blocks that hold no token: the ends of the requests' last blocks."""
        return self.used * self.block_size - self.live_tokens

    @property
    def utilisation(self) -> float:
        """Share of all slots that hold a token, 0 to 1."""
        return self.live_tokens / (len(self.owners) * self.block_size)


@dataclass(frozen=True)
class StepReport:
    """What one step did; requests are named by their index.

    ``snapshot`` shows the pool as the step's forward pass saw it, before ``finished`` left.
    """

    step: int
    tokens: dict[int, int]
    joined: list[int]
    preempted: list[int]
    finished: list[int]
    num_computed: int
    snapshot: Snapshot


class Engine:
    """Runs requests through a model, at most ``max_batch`` at a time, out of one pool of blocks.

    Parameters
    ----------
    model : LanguageModel or PackedModel
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
        model: LanguageModel | PackedModel,
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
        snapshot = self.snapshot()
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
            snapshot=snapshot,
        )

    def snapshot(self) -> Snapshot:
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
        return Snapshot(self.step_count, owners, filled, size)

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
        logits: Tensor = self.model(
            torch.tensor([token for tokens in new_tokens for token in tokens]),
            torch.tensor(positions),
            PagedLayers(self.cache, batch),
            rows=batch.query_start_loc[1:].long() - 1,
        )
        return logits


@dataclass(frozen=True)
class Comparison:
    """How an engine's tokens compare with those of contiguous attention.

    Attributes
    ----------
    equal : int
        Tokens that are the same.
    tied : int
        Tokens that differ, but whose scores differ by no more than rounding can explain.
    worst_gap : float
        The largest such difference of scores.
    mismatch : str
        The first token that differs by more, described; empty if none does.
    """

    equal: int = 0
    tied: int = 0
    worst_gap: float = 0.0
    mismatch: str = ""


@torch.inference_mode()
def contiguous_scores(
    model: LanguageModel, request: Request, sampler: Sampler
) -> Iterator[tuple[int, Tensor]]:
    """Replay a finished request with an ordinary KV cache, one prompt pass, then token by token.

    Yields each token that the engine generated and the scores that it is chosen from here. As long
    as the tokens are equal, this is the request's own free run.
    """
    attend: AttentionFunction = ContiguousAttention(model.config)
    new, position = request.prompt, 0
    for token in request.generated:
        positions = torch.arange(position, position + len(new))
        last = torch.tensor([len(new) - 1])
        logits = model(torch.tensor(new), positions, attend, rows=last)
        position += len(new)
        yield token, sampler.scores(logits[0], request.index, position)
        new = [token]


def compare_with_contiguous(
    model: LanguageModel, requests: Sequence[Request], sampler: Sampler
) -> Comparison:
    """Check every generated token against ``scaled_dot_product_attention``.

    Both ways add the same numbers in another order, so their logits differ in the last bits. A
    token that differs passes only if its score is within that rounding of the best one
    (:data:`TOLERANCE`); in float32 this practically never happens, in bfloat16 now and then.
    """
    tolerance = TOLERANCE[model.embedding.weight.dtype]
    result = Comparison()
    for request in requests:
        for number, (token, scores) in enumerate(contiguous_scores(model, request, sampler)):
            gap = float(scores.max() - scores[token])
            if int(scores.argmax()) == token:
                result = dataclasses.replace(result, equal=result.equal + 1)
            elif gap <= tolerance:
                worst = max(gap, result.worst_gap)
                result = dataclasses.replace(result, tied=result.tied + 1, worst_gap=worst)
            else:
                return dataclasses.replace(
                    result,
                    mismatch=f"request {request.index}, new token {number}: the engine chose token "
                    f"{token}, contiguous attention chooses {int(scores.argmax())}, whose score is "
                    f"higher by {gap:.3g} (rounding explains {tolerance:.3g})",
                )
    return result
