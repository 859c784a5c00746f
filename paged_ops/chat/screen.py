"""Chatting on a terminal: the conversations, beside them the pool, below them what is typed."""

from __future__ import annotations

import codecs
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from paged_ops.chat.console import Console
from paged_ops.chat.conversations import Conversation
from paged_ops.chat.lines import printable, wrap
from paged_ops.chat.pool_map import LEGEND
from paged_ops.demo.pool_picture import DIM, RESET, paint

FRAME_SECONDS = 1 / 15
BLOCKS_PER_ROW = 16
POOL_WIDTH = 2 * BLOCKS_PER_ROW + 2
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?7l", "\x1b[?7h\x1b[?1049l"
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
NEWEST = "Type a message; /help says what else"


class Editor:
    r"""One line that is being typed; keys come as bytes.

    Examples
    --------
    >>> editor = Editor()
    >>> editor.type(b"Helo\x7flo\rAnd")
    ['Hello']
    >>> editor.text
    'And'
    """

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._escape = ""

    def type(self, keys: bytes) -> list[str]:
        """Take keys; return the lines that they finish."""
        lines = []
        for key in self._decoder.decode(keys):
            if self._escape or key == "\x1b":
                self._skip(key)
            elif key in "\r\n":
                lines.append(self.text)
                self.text = ""
            elif key in "\x7f\b":
                self.text = self.text[:-1]
            elif key == "\x15":  # Ctrl-U
                self.text = ""
            elif key == "\x04":  # Ctrl-D
                self.has_ended = self.has_ended or not self.text
            elif key.isprintable():
                self.text += key
        return lines

    def _skip(self, key: str) -> None:
        """Leave out the sequence of an arrow or the like: Escape, a bracket, up to a letter."""
        self._escape += key
        if len(self._escape) > 1 and (key.isalpha() or key == "~"):
            self._escape = ""


def draw(
    console: Console, typed: str, notes: list[str], *, width: int, height: int, in_colour: bool
) -> list[str]:
    """Draw the whole screen.

    Parameters
    ----------
    console : Console
        Whose conversations and pool they are.
    typed : str
        The line that isn't finished.
    notes : list of str
        What there is to say about the last command.
    width, height : int
        Of the terminal.
    in_colour : bool
        With ANSI colours.

    Returns
    -------
    list of str
        At most `height` lines.
    """
    notes = notes[-max(1, height // 2) :]
    room, left = height - len(notes) - 1, max(20, width - POOL_WIDTH - 3)
    panes = draw_conversations(console, room, left, in_colour)
    pool = console.chat.pool
    beside = pool.draw(per_row=BLOCKS_PER_ROW, in_colour=in_colour)
    beside = ["the pool", *beside, *pool.account(), *LEGEND.split(", ")][:room]
    lines = []
    for row in range(room):
        pane = panes[row] if row < len(panes) else ""
        right = beside[row] if row < len(beside) else ""
        # To a column: how wide the characters before it are, only the terminal knows.
        lines.append(f"{pane}\x1b[{left + 3}G{END_OF_LINE}{right}")
    prompt = f"{console.current.name}> "
    shown = typed[-max(1, width - len(prompt) - 1) :]
    current = paint(prompt, console.current.index, in_colour=in_colour)
    return [*lines, *(note[:width] for note in notes), current + shown]


def draw_conversations(console: Console, room: int, width: int, in_colour: bool) -> list[str]:
    """Draw the last lines of each conversation; of too many, those that were asked last."""
    everyone = console.chat.conversations
    by_age = sorted(everyone, key=lambda each: (each is console.current, each.asked))
    shown = [each for each in everyone if each in by_age[-max(1, room // 3) :]]
    lines: list[str] = []
    for number, conversation in enumerate(shown):
        share = (room - len(lines)) // (len(shown) - number)
        mark = "*" if conversation is console.current else " "
        title = f"{mark}{conversation.name}  {conversation.account}"
        lines.append(paint(title[:width], conversation.index, in_colour=in_colour))
        lines += transcript(conversation, width, in_colour)[-max(1, share - 1) :]
    return lines


def transcript(conversation: Conversation, width: int, in_colour: bool) -> list[str]:
    """Return all that was said, wrapped."""
    lines = []
    said = [(each["role"], each["content"]) for each in conversation.dialogue.messages]
    if conversation.is_answering:
        said.append(("assistant", conversation.text))
    for role, content in said:
        if role == "system":
            continue
        for number, line in enumerate(wrap(content, width - 2)):
            if role == "user":
                line = ("> " if number == 0 else "  ") + line
                lines.append(f"{DIM}{line}{RESET}" if in_colour else line)
            else:
                lines.append(f"  {line}")
    return lines


@contextmanager
def whole_screen(descriptor: int) -> Iterator[None]:
    """Take over the terminal: its second screen, keys one by one; give it back in any case."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)  # what was typed already isn't lost
        sys.stdout.write(ENTER_SCREEN)
        yield
    finally:
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def run(console: Console, *, in_colour: bool) -> None:
    """Chat until the user leaves; then print what was said, which the screen took along."""
    descriptor, chat = sys.stdin.fileno(), console.chat
    editor, notes = Editor(), [NEWEST]
    waiting: deque[str] = deque()
    drawn = 0.0
    with whole_screen(descriptor):
        while not console.wants_end and not editor.has_ended:
            if time.perf_counter() - drawn > FRAME_SECONDS or not chat.is_answering:
                width, height = shutil.get_terminal_size()
                pending = [f"waits for {console.current.name}: {line}" for line in waiting]
                frame = draw(
                    console,
                    editor.text,
                    notes + pending,
                    width=width,
                    height=height,
                    in_colour=in_colour,
                )
                end = END_OF_LINE + "\n"
                sys.stdout.write(HOME + end.join(frame) + END_OF_LINE + END_OF_SCREEN)
                sys.stdout.flush()
                drawn = time.perf_counter()
            ready, _, _ = select.select([descriptor], [], [], 0 if chat.is_answering else 1)
            if ready:
                keys = os.read(descriptor, 4096)
                editor.has_ended = editor.has_ended or not keys
                waiting += editor.type(keys)
            while waiting and not console.waits(waiting[0]):
                notes = _obey(console, waiting.popleft())
            if chat.is_answering:
                chat.step()
    for conversation in chat.conversations:
        print(f"{conversation.name}  {conversation.account}")
        print("\n".join(transcript(conversation, shutil.get_terminal_size().columns, False)))
    print(" ".join(chat.pool.account()))


def _obey(console: Console, line: str) -> list[str]:
    try:
        said = console.obey(line)
    except ValueError as error:
        return [printable(str(error))]
    console.wants_pool = False  # it is drawn already
    return said.split("\n")
