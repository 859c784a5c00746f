"""What the demo prints while it runs: lines in a log, or a live block per request on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from abc import ABC, abstractmethod

from paged_ops.demo.pool_picture import draw_pool, letter, paint
from paged_ops.demo.tokenizer import Tokenizer
from paged_ops.engine import Engine, Request, State, StepReport

FRAME_SECONDS = 1 / 25
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
# Without wrapping a line of the frame is one line of the screen, however wide its characters.
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
PROGRESS_EVERY = 25
"""Steps between two progress lines in a log."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Display(ABC):
    """Told of every step; shows it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, in_colour: bool) -> None:
        self._requests = engine.requests  # all there will be; the engine forgets who has ended
        self._tokenizer, self._in_colour = tokenizer, in_colour
        self._started = time.perf_counter()

    @abstractmethod
    def show(self, report: StepReport) -> None:
        """Show what a step did."""

    @abstractmethod
    def close(self) -> None:
        """Show what is still held back; the run is over."""

    def _progress(self, report: StepReport) -> str:
        """Say how many tokens there are, which state requests are in, how full the pool is."""
        generated = sum(len(request.generated) for request in self._requests)
        states = [request.state for request in self._requests]
        waiting = states.count(State.WAITING) + states.count(State.PREEMPTED)
        occupancy = report.occupancy
        return (
            f"step {report.step}: {generated} tokens, "
            f"{states.count(State.RUNNING)} running, {waiting} waiting, "
            f"{states.count(State.FINISHED)} finished, "
            f"{occupancy.used}/{len(occupancy.owners)} blocks, "
            f"{generated / (time.perf_counter() - self._started):.0f} tokens/s"
        )

    def _text(self, request: Request) -> str:
        """Return a request's text with every control character but the line feed replaced."""
        text = self._tokenizer.decode(request.tokens)
        printable = (c if c == "\n" or c.isprintable() else REPLACEMENT for c in text)
        return "".join(printable)

    def _paint(self, text: str, index: int) -> str:
        return paint(text, index, in_colour=self._in_colour)


class LineDisplay(Display):
    """Streams for logs and pipes: every finished line of text, behind its request's letter."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, in_colour: bool) -> None:
        super().__init__(engine, tokenizer, in_colour=in_colour)
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
            print(f"--- {self._progress(report)}", flush=True)

    def close(self) -> None:
        """Nothing is held back once every request has finished."""

    def _flush(self, request: Request, *, whole: bool) -> None:
        text = self._text(request)
        end = len(text) if whole else text.rfind("\n") + 1
        new = text[self._shown[request.index] : end]
        self._shown[request.index] = max(self._shown[request.index], end)
        for line in new.splitlines():
            if line:
                print(f"{self._name(request.index)} | {line}", flush=True)

    def _event(self, report: StepReport, index: int, what: str) -> None:
        print(f"--- step {report.step}: {self._name(index)} {what}", flush=True)

    def _name(self, index: int) -> str:
        return self._paint(letter(index), index)


class LiveDisplay(Display):
    """Redraws a block of lines per request, the pool and the progress line in place."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, in_colour: bool, width: int, text_lines: int
    ) -> None:
        super().__init__(engine, tokenizer, in_colour=in_colour)
        self._width, self._text_lines = width, text_lines
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
        lines.append(self._progress(report)[: self._width - 1])
        self._erase()
        sys.stdout.write(HIDE_CURSOR + NO_WRAP + "\n".join(lines) + "\n" + WRAP + SHOW_CURSOR)
        sys.stdout.flush()
        self._height = len(lines)

    def close(self) -> None:
        """Put every request's whole text in the place of the last frame."""
        self._erase()
        for request in self._requests:
            print(self._title(request))
            for line in self._text(request).strip().splitlines():
                print(f"  {line}")
        sys.stdout.flush()

    def _block(self, request: Request) -> list[str]:
        text = self._text(request).rstrip()
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
        return self._paint(title, request.index)

    def _erase(self) -> None:
        if self._height:
            sys.stdout.write(f"\x1b[{self._height}A\r\x1b[J")
            self._height = 0


def choose_display(engine: Engine, tokenizer: Tokenizer, *, live: bool, in_colour: bool) -> Display:
    """Return the live display where the terminal can hold it, else the streaming one."""
    size = shutil.get_terminal_size()
    requests = len(engine.requests)
    pool_lines = len(draw_pool(engine.occupancy(), width=size.columns, in_colour=in_colour))
    text_lines = min(4, (size.lines - 2 - pool_lines) // max(1, requests) - 1)
    if live and text_lines >= 1:
        return LiveDisplay(
            engine, tokenizer, in_colour=in_colour, width=size.columns, text_lines=text_lines
        )
    return LineDisplay(engine, tokenizer, in_colour=in_colour)
