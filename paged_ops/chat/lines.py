"""Chatting without a terminal: messages come as lines, and answers go out as lines."""

from __future__ import annotations

import os
import select
import textwrap
from collections import deque

from paged_ops.chat.console import Console
from paged_ops.chat.conversations import Conversation
from paged_ops.chat.pool_map import LEGEND

WIDTH = 78
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Replace what could command a terminal."""
    return "".join(c if c == "\n" or c.isprintable() else REPLACEMENT for c in text)


def wrap(text: str, width: int) -> list[str]:
    """Cut a text into lines of at most so many characters, between words where it can be."""
    paragraphs = (textwrap.wrap(each, width) or [""] for each in printable(text).split("\n"))
    return [line for lines in paragraphs for line in lines]


class Input:
    """Lines of a file descriptor, without waiting for them unless asked to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.has_ended = False

    def read(self, seconds: float | None) -> list[str]:
        """Return the lines that are there after at most so long; None waits for the next."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready or self.has_ended:
            return []
        data = os.read(self._descriptor, 65536)
        self.has_ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.has_ended and self._rest:
            lines.append(self._rest)
        return [line.decode(errors="replace") for line in lines]


class Printer:
    """Prints every line of an answer when it is complete, behind the conversation's letter."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[int, int] = {}  # lines of the answer that each conversation is at
        self._fullest: tuple[int, list[str]] = (0, [])

    def asked(self, conversation: Conversation, message: str) -> None:
        """Print a message that was asked."""
        self._printed[conversation.index] = 0
        self._print(conversation, ">", message)

    def forked(self, conversation: Conversation) -> None:
        """Begin to print a conversation that may be answering already."""
        self._printed[conversation.index] = 0

    def show(self, changed: list[Conversation]) -> None:
        """Print what a step has completed."""
        for conversation in changed:
            lines = wrap(conversation.text, WIDTH - 4)
            complete = len(lines) - conversation.is_answering
            for line in lines[self._printed[conversation.index] : complete]:
                self._print(conversation, "|", line)
            self._printed[conversation.index] = max(complete, self._printed[conversation.index])
            if not conversation.is_answering:
                assert conversation.request is not None
                if conversation.request.error is not None:
                    self._print(conversation, "!", f"failed: {conversation.request.error}")
                self._print(conversation, "=", conversation.account)
        pool = self._console.chat.pool
        if pool.num_held > self._fullest[0]:
            self._fullest = pool.num_held, pool.draw()

    def draw_pool(self, title: str, rows: list[str]) -> None:
        """Print a picture of the pool, and what is in it now."""
        print(f"\n{title} ({LEGEND})")
        print(textwrap.indent("\n".join(rows), "  "), flush=True)

    def close(self) -> None:
        """Print the pool when it was fullest, and as it is left."""
        pool = self._console.chat.pool
        if self._fullest[1]:
            self.draw_pool("the pool at its fullest", self._fullest[1])
        self.draw_pool("the pool now", pool.draw())
        print("  " + " ".join(pool.account()), flush=True)

    def _print(self, conversation: Conversation, sign: str, text: str) -> None:
        print(f"{conversation.name} {sign} {printable(text)}", flush=True)


def run(console: Console, descriptor: int) -> None:
    """Answer the lines of a file descriptor until it ends.

    A message waits for the answer to the one before it in the same conversation, and what comes
    behind it waits with it. All other answers are computed together.
    """
    chat, source, printer = console.chat, Input(descriptor), Printer(console)
    lines: deque[str] = deque()
    while not console.wants_end:
        if not source.has_ended:
            idle = not lines and not chat.is_answering
            lines += source.read(None if idle else 0)
        while lines and not console.wants_end and not console.waits(lines[0]):
            _obey(console, printer, lines.popleft())
        if chat.is_answering:
            answering = [each for each in chat.conversations if each.is_answering]
            chat.step()
            printer.show(answering)
        elif source.has_ended and not lines:
            break
    printer.close()


def _obey(console: Console, printer: Printer, line: str) -> None:
    known = len(console.chat.conversations)
    try:
        said = console.obey(line)
    except ValueError as error:
        print(f"! {error}", flush=True)
        return
    conversation = console.current
    if said:
        print(f"- {said}", flush=True)
    if conversation.is_answering and not line.startswith("/"):
        message = conversation.dialogue.messages[-1]["content"]
        printer.asked(conversation, message)
    elif len(console.chat.conversations) > known:
        printer.forked(conversation)
    if console.wants_pool:
        printer.draw_pool("the pool", console.chat.pool.draw())
        console.wants_pool = False
