"""What can be typed: messages, and commands about the conversations."""

from __future__ import annotations

from typing import NamedTuple

from paged_ops.chat.conversations import Chat, Conversation
from paged_ops.demo.pool_picture import LETTERS

HELP = """\
Type a message, and others while it is answered:
  @B MESSAGE   to conversation B, which begins with it or goes on, and so do later messages
  /new         begin another conversation
  /fork        begin one that has gone like this one so far; if this one is answering, so is that
  /stop        end the answer here
  /pool        draw the pool
  /quit        leave (Ctrl-D, too)
"40/57 found, 0.09 s, 22.0 tokens/s" is of an answer: 40 of 57 prompt tokens lay in the pool,
its first word came after 0.09 s, and the others at that rate."""

COMMANDS = ("new", "fork", "stop", "pool", "help", "quit")


class Line(NamedTuple):
    """A line that was typed.

    Attributes
    ----------
    command : str
        One of `COMMANDS`; empty for a message.
    letter : str
        The conversation that it names; empty: none.
    message : str
        What is to be asked; empty: nothing.
    """

    command: str = ""
    letter: str = ""
    message: str = ""


def read_line(text: str) -> Line:
    """Take a line apart.

    Raises
    ------
    ValueError
        It begins like a command and isn't one.

    Examples
    --------
    >>> read_line("@b  And in Rome?")
    Line(command='', letter='B', message='And in Rome?')
    >>> read_line("/fork").command
    'fork'
    """
    text = text.strip()
    if text.startswith("/"):
        command = text[1:].lower()
        if command not in COMMANDS:
            raise ValueError(f"there is no {text}; /help says what there is")
        return Line(command)
    if text.startswith("@"):
        letter, _, message = text[1:].partition(" ")
        if len(letter) != 1 or letter.upper() not in LETTERS:
            raise ValueError(f"@{letter} is no conversation: say @A, @B, ...")
        return Line("", letter.upper(), message.strip())
    return Line("", "", text)


class Console:
    """Does what is typed.

    Attributes
    ----------
    chat : Chat
        The conversations.
    current : Conversation
        The one that messages go to.
    wants_pool, wants_end : bool
        Whether the pool was asked for, to be drawn once, and whether it is over.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.current: Conversation = chat.open()
        self.wants_pool = self.wants_end = False

    def waits(self, text: str) -> bool:
        """Tell whether a line has to wait for an answer that is on its way."""
        try:
            line = read_line(text)
        except ValueError:
            return False
        asked = self._find(line.letter) if line.letter else self.current
        return bool(line.message) and asked is not None and asked.is_answering

    def obey(self, text: str) -> str:
        """Do what a line says; return what there is to say about it.

        Raises
        ------
        ValueError
            It can't be done, with the reason; nothing has changed.
        """
        line = read_line(text)
        if line.letter:
            self.current = self._find(line.letter) or self._open(line.letter)
        if line.message:
            self.chat.ask(self.current, line.message)
        elif line.command == "new":
            self.current = self.chat.open()
        elif line.command == "fork":
            parent, self.current = self.current, self.chat.fork(self.current)
            return f"{self.current.name} goes on from {parent.name}"
        elif line.command == "stop":
            self.chat.stop(self.current)
        elif line.command == "help":
            return HELP
        self.wants_pool = line.command == "pool"
        self.wants_end = line.command == "quit"
        return ""

    def _find(self, letter: str) -> Conversation | None:
        return next((each for each in self.chat.conversations if each.name == letter), None)

    def _open(self, letter: str) -> Conversation:
        following = LETTERS[len(self.chat.conversations) % len(LETTERS)]
        if letter != following:
            raise ValueError(f"there is no {letter} yet: the next conversation is {following}")
        return self.chat.open()
