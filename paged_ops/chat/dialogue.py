"""A dialogue as the model reads it: one run of token ids that only grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Dialogue:
    """Messages, and the token ids that stand for them.

    What the model has said keeps the ids that it said it with. To tokenize its words anew may give
    others, and the cache finds a beginning by its ids.

    Parameters
    ----------
    tokenizer
        Of transformers, with a chat template.
    system : str
        What the model is told before all; empty: what its template says.

    Attributes
    ----------
    messages : list of dict
        ``role`` and ``content`` of each.
    prompt : list of int
        What was asked last, with all that came before; empty before the first question.

    Examples
    --------
    >>> from paged_ops.demo.llama import load_tokenizer
    >>> tokenizer = load_tokenizer()
    >>> tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    >>> dialogue = Dialogue(tokenizer, "Be kind.")
    >>> tokenizer.decode(dialogue.ask("Who?"))
    '<Be kind.><Who?>'
    """

    def __init__(self, tokenizer: Any, system: str = "") -> None:
        self._tokenizer = tokenizer
        self.messages = [{"role": "system", "content": system}] if system else []
        self.prompt: list[int] = []
        self._text = ""  # what the prompt stands for
        self._known: list[int] = []  # the ids of the prompt before, and of its answer
        self._known_text = ""

    def copy(self) -> Dialogue:
        """Return one that goes on from here by itself."""
        twin = Dialogue(self._tokenizer)
        twin.messages, twin.prompt, twin._text = [*self.messages], [*self.prompt], self._text
        twin._known, twin._known_text = [*self._known], self._known_text
        return twin

    def ask(self, question: str) -> list[int]:
        """Add a question and return the prompt that asks it.

        Raises
        ------
        ValueError
            The question has one of the model's own marks in it; nothing has changed.
        """
        for mark in self._tokenizer.all_special_tokens:
            if mark in question:
                raise ValueError(f"a message can't hold {mark}: the model reads it as its own")
        self.messages.append({"role": "user", "content": question})
        text = self._tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=False
        )
        known = self._known if text.startswith(self._known_text) else []
        rest = text[len(self._known_text) :] if known else text
        encoded = self._tokenizer.encode(rest, add_special_tokens=False)
        self.prompt, self._text = known + encoded, text
        return self.prompt

    def take_back(self) -> None:
        """Remove the last question, which got no answer."""
        self.messages.pop()

    def answer(self, tokens: Sequence[int]) -> None:
        """Add the answer to the last question: the ids of its words, without the end's mark."""
        words = self.words(tokens)
        self.messages.append({"role": "assistant", "content": words})
        self._known, self._known_text = [*self.prompt, *tokens], self._text + words

    def words(self, tokens: Sequence[int]) -> str:
        """Return the text of some ids."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text
