"""What the demo prints while it runs: lines in a log, or a live block per request on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Protocol, TextIO

from paged_ops.demo.pool_picture import draw_pool, letter, paint
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import Engine, Request, State, StepReport

FRAME_SECONDS = 1 / 25
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
# Without wrapping a line of the frame is one line of the screen, however wide its characters.
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
PROGRESS_EVERY = 25
"""Steps between two progress lines in a log."""


def printable(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the tokens' text with every control character but the line feed replaced."""
    text = tokenizer.decode(tokens)
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class Display(Protocol):
    """Told of every step; shows it."""

    def show(self, report: StepReport) -> None:
        """Show what a step did."""

    def close(self) -> None:
        """Show what is still held back; the run is over."""


class Progress:
    """The progress line: tokens so far, requests by state, the pool, tokens per second."""

    def __init__(self, engine: Engine) -> None:
        self._requests = engine.requests  # all there will be; the engine forgets who has ended
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the run began."""
        return time.perf_counter() - self._started

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, all requests together."""
        return sum(len(request.generated) for request in self._requests)

    def line(self, report: StepReport) -> str:
        """Return the line."""
        states = [request.state for request in self._requests]
        waiting = states.count(State.WAITING) + states.count(State.PREEMPTED)
        occupancy = report.occupancy
        return (
            f"step {report.step}: {self.num_generated} tokens, "
            f"{states.count(State.RUNNING)} running, {waiting} waiting, "
            f"{states.count(State.FINISHED)} finished, "
            f"{occupancy.used}/{len(occupancy.owners)} blocks, "
            f"{self.num_generated / self.seconds:.0f} tokens/s"
        )


class LineDisplay:
    """Streams for logs and pipes: every finished line of text, behind its request's letter."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, stream: TextIO, *, in_colour: bool
    ) -> None:
        self._requests, self._tokenizer, self._stream = engine.requests, tokenizer, stream
        self._in_colour = in_colour
        self._progress = Progress(engine)
        self._shown = [0] * len(engine.requests)  # characters of each request's text

    def show(self, report: StepReport) -> None:
        """Print who joined or was preempted, the lines that are complete, who finished."""
        for index in report.preempted:
            self._event(report, index, "loses its blocks to an older request and waits")
        for index in report.joined:
            request = self._requests[index]
            # The token that this step chose is not among those it computed.
            computed = len(request.tokens) - 1
            again = " again, recomputing" if request.preemptions else " with"
            self._event(report, index, f"joins{again} {computed} tokens")
        for index in report.tokens:
            self._flush(self._requests[index], whole=index in report.finished)
        for index in report.finished:
            count = len(self._requests[index].generated)
            self._event(report, index, f"finishes after {count} new tokens")
        if report.step % PROGRESS_EVERY == 0:
            self._print(f"--- {self._progress.line(report)}")

    def close(self) -> None:
        """Nothing is held back once every request has finished."""

    def _flush(self, request: Request, *, whole: bool) -> None:
        text = printable(self._tokenizer, request.tokens)
        end = len(text) if whole else text.rfind("\n") + 1
        new = text[self._shown[request.index] : end]
        self._shown[request.index] = max(self._shown[request.index], end)
        for line in new.splitlines():
            if line:
                self._print(f"{self._name(request.index)} | {line}")

    def _event(self, report: StepReport, index: int, what: str) -> None:
        self._print(f"--- step {report.step}: {self._name(index)} {what}")

    def _name(self, index: int) -> str:
        return paint(letter(index), index, in_colour=self._in_colour)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveDisplay:
    """Redraws a block of lines per request, the pool and the progress line in place."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        stream: TextIO,
        *,
        in_colour: bool,
        width: int,
        text_lines: int,
    ) -> None:
        self._requests, self._tokenizer, self._stream = engine.requests, tokenizer, stream
        self._in_colour, self._width, self._text_lines = in_colour, width, text_lines
        self._progress = Progress(engine)
        self._height = 0  # lines of the frame on the screen
        self._drawn_at = 0.0

    def show(self, report: StepReport) -> None:
        """Draw a frame, unless the last one is too recent to have been seen."""
        now = time.perf_counter()
        if now - self._drawn_at < FRAME_SECONDS:
            return
        self._drawn_at = now
        lines = [line for request in self._requests for line in self._block(request)]
        lines += draw_pool(report.occupancy, width=self._width, in_colour=self._in_colour)
        lines.append(self._progress.line(report)[: self._width - 1])
        self._erase()
        self._stream.write(HIDE_CURSOR + NO_WRAP + "\n".join(lines) + "\n" + WRAP + SHOW_CURSOR)
        self._stream.flush()
        self._height = len(lines)

    def close(self) -> None:
        """Put every request's whole text in the place of the last frame."""
        self._erase()
        for request in self._requests:
            print(self._title(request), file=self._stream)
            for line in printable(self._tokenizer, request.tokens).strip().splitlines():
                print(f"  {line}", file=self._stream)
        self._stream.flush()

    def _block(self, request: Request) -> list[str]:
        text = printable(self._tokenizer, request.tokens).rstrip()
        lines = [
            wrapped
            for line in text.splitlines()
            for wrapped in textwrap.wrap(line, self._width - 4)
        ]
        tail = lines[-self._text_lines :]
        padding = [""] * (self._text_lines - len(tail))
        return [self._title(request), *(f"  {line}" for line in tail), *padding]

    def _title(self, request: Request) -> str:
        count = len(request.generated)
        title = f"{letter(request.index)}  {request.state.value}, {count} new tokens"
        return paint(title, request.index, in_colour=self._in_colour)

    def _erase(self) -> None:
        if self._height:
            self._stream.write(f"\x1b[{self._height}A\r\x1b[J")
            self._height = 0


def choose_display(engine: Engine, tokenizer: Tokenizer, *, live: bool, in_colour: bool) -> Display:
    """Return the live display where the terminal can hold it, else the streaming one."""
    size = shutil.get_terminal_size()
    requests = len(engine.requests)
    pool_lines = len(draw_pool(engine.occupancy(), width=size.columns, in_colour=in_colour))
    text_lines = min(4, (size.lines - 2 - pool_lines) // max(1, requests) - 1)
    if live and text_lines >= 1:
        return LiveDisplay(
            engine,
            tokenizer,
            sys.stdout,
            in_colour=in_colour,
            width=size.columns,
            text_lines=text_lines,
        )
    return LineDisplay(engine, tokenizer, sys.stdout, in_colour=in_colour)
