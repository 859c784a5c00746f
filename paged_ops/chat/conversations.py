"""Several conversations with one model: a turn of each is a request of the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_ops.chat.dialogue import Dialogue
from paged_ops.chat.pool_map import PoolMap
from paged_ops.demo.pool_picture import LETTERS, letter
from paged_ops.engine import Engine, Request, State, StepReport


@dataclass(eq=False)
class Conversation:
    """One of them.

    Attributes
    ----------
    index : int
        0 for the first; it is called by a letter.
    dialogue : Dialogue
        What was said, but for an answer that is on its way.
    request : Request, optional
        The turn that is being answered, or the last one.
    asked, first_token, ended : float
        When the turn was asked, when its first token came, when it ended; 0 before that.
    """

    index: int
    dialogue: Dialogue
    request: Request | None = None
    asked: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    ends: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def name(self) -> str:
        """Its letter."""
        return letter(self.index)

    @property
    def is_answering(self) -> bool:
        """Whether an answer is on its way."""
        return self.request is not None and not self.ended

    @property
    def said(self) -> list[int]:
        """The ids of the answer's words so far."""
        tokens = [] if self.request is None else self.request.generated
        return tokens[:-1] if tokens and tokens[-1] in self.ends else tokens

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.dialogue.words(self.said)

    @property
    def account(self) -> str:
        """Of the last turn: prompt tokens found, seconds to the first token, the rate after."""
        if self.request is None:
            return "nothing asked yet"
        if not self.first_token:
            return "waits"
        count = len(self.request.generated)
        account = f"{self.request.num_cached}/{len(self.request.prompt)} found, "
        account += f"{self.first_token - self.asked:.2f} s"
        if self.ended > self.first_token:
            account += f", {(count - 1) / (self.ended - self.first_token):.1f} tokens/s"
        return account


class Chat:
    """The conversations over one engine.

    Parameters
    ----------
    engine : Engine
        Computes the turns of all conversations together.
    tokenizer
        Of transformers, with a chat template.
    system : str
        What each conversation begins with.
    max_new_tokens : int
        Of an answer.
    ends : iterable of int
        Tokens that end an answer.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        system: str = "",
        max_new_tokens: int = 256,
        ends: Sequence[int] = (),
    ) -> None:
        self.engine = engine
        self._tokenizer, self._system = tokenizer, system
        self._max_new_tokens, self._ends = max_new_tokens, frozenset(ends)
        self.conversations: list[Conversation] = []
        self.pool = PoolMap(engine.manager)

    @property
    def is_answering(self) -> bool:
        """Whether any answer is on its way."""
        return any(each.is_answering for each in self.conversations)

    def warm_up(self) -> None:
        """Compute what all conversations begin with, so that their first turns find it."""
        one, other = (Dialogue(self._tokenizer, self._system).ask(word) for word in "ab")
        differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        if common := one[: next(differing, 0)]:
            self.engine.submit(common, 1)
            for _ in self.engine.run():
                pass

    def open(self) -> Conversation:
        """Begin another conversation."""
        return self._add(Dialogue(self._tokenizer, self._system))

    def ask(self, conversation: Conversation, question: str) -> None:
        """Ask something in a conversation that isn't being answered.

        Raises
        ------
        ValueError
            The question can't be asked; the conversation is as before.
        """
        if conversation.is_answering:
            raise ValueError(f"{conversation.name} is still answering")
        conversation.dialogue.ask(question)
        try:
            self._submit(conversation)
        except ValueError:
            conversation.dialogue.take_back()
            raise

    def fork(self, conversation: Conversation) -> Conversation:
        """Begin a conversation that has gone like another one so far.

        If that one is being answered, the new one is asked the same: its prompt is found in the
        pool, and both hold the same blocks.
        """
        twin = self._add(conversation.dialogue.copy())
        if conversation.is_answering:
            self._submit(twin)
        return twin

    def stop(self, conversation: Conversation) -> None:
        """End an answer where it is."""
        if conversation.is_answering:
            assert conversation.request is not None
            self.engine.cancel(conversation.request)
            self._close(conversation, time.perf_counter())

    def step(self) -> StepReport:
        """Let the engine make a step, and close the turns that it ended."""
        report = self.engine.step()
        now = time.perf_counter()
        running = {each.request.index: each for each in self.conversations if each.request}
        for index in report.tokens:
            running[index].first_token = running[index].first_token or now
        whose = {request: each.index for request, each in running.items()}
        self.pool.update(report.occupancy.owners, whose)
        for index in [*report.finished, *report.failed]:
            self._close(running[index], now)
        return report

    def _add(self, dialogue: Dialogue) -> Conversation:
        if len(self.conversations) == len(LETTERS):
            raise ValueError(f"there are {len(LETTERS)} conversations, one for each letter")
        added = Conversation(len(self.conversations), dialogue, ends=self._ends)
        self.conversations.append(added)
        return added

    def _submit(self, conversation: Conversation) -> None:
        prompt, manager = conversation.dialogue.prompt, self.engine.manager
        slots = manager.num_blocks * manager.block_size
        room = min(slots, self.engine.model.config.max_positions) + 1 - len(prompt)
        if room < 1:
            raise ValueError(
                f"{conversation.name} is full: with this it has {len(prompt)} tokens, and there is "
                f"room for {len(prompt) + room - 1}; begin another with /new"
            )
        new_tokens = min(self._max_new_tokens, room)
        request = self.engine.submit(prompt, new_tokens, lambda said: said[-1] in self._ends)
        conversation.request = request
        conversation.asked, conversation.first_token, conversation.ended = time.perf_counter(), 0, 0

    def _close(self, conversation: Conversation, now: float) -> None:
        request = conversation.request
        assert request is not None
        conversation.ended = now
        if request.state is State.FAILED or not request.generated:
            conversation.dialogue.take_back()
        else:
            conversation.dialogue.answer(conversation.said)
