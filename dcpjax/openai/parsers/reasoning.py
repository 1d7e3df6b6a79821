"""What a model thinks before it answers, `<think>...</think>`, found while the text arrives."""

from typing import Literal

from dcpjax.frontend.text import held_back
from dcpjax.openai.parsers.deltas import Content, Delta, Reasoning

OPENING, CLOSING = "<think>", "</think>"


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt, or the end of one, has begun the reasoning that the answer goes on with."""
    return prompt.rstrip().endswith(OPENING)


class ReasoningParser:
    """Text in, reasoning and content out. Whitespace beside a mark belongs to neither.

    An answer reasons only at its start: a mark in the middle is content. Reasoning that never ends is all there is.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt has begun the reasoning. A model may repeat the mark."""
        self._opened = opened
        self._at: Literal["start", "reasoning", "between", "content"] = "start"
        self._rest = ""  # text that may begin a mark
        self._blank: list[str] = []  # whitespace that is reasoning only if more of it follows
        self._reasons = False  # some reasoning has been given out

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text makes certain."""
        self._rest += text
        deltas: list[Delta] = []
        if self._at == "start":
            self._pass_start()
        if self._at == "reasoning":
            self._reason(deltas)
        if self._at == "between" and self._rest.strip():
            self._at, self._rest = "content", self._rest.lstrip()
        if self._at == "content" and self._rest:
            deltas.append(Content(self._rest))
            self._rest = ""
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, once no more text comes."""
        rest, self._rest = self._rest, ""
        if self._at == "reasoning" or (self._at == "start" and self._opened):
            return [Reasoning(rest)] if (rest := self._with_blank(rest)) else []
        return [Content(rest)] if rest and self._at == "start" else []

    def _pass_start(self) -> None:
        """Find out what the text begins with, as soon as that is certain."""
        text = self._rest.lstrip()
        if text.startswith(OPENING):
            self._at, self._rest = "reasoning", text.removeprefix(OPENING)
        elif not OPENING.startswith(text):
            self._at = "reasoning" if self._opened else "content"

    def _reason(self, deltas: list[Delta]) -> None:
        """Reasoning up to the closing mark, or up to what may become it."""
        text, mark, after = self._rest.partition(CLOSING)
        end = len(text) if mark else len(text) - held_back(text, (CLOSING,))
        said = text[:end].rstrip()
        if said:
            deltas.append(Reasoning(self._with_blank(said)))
            self._blank.clear()
            self._reasons = True
        self._blank.append(text[len(said) : end])
        self._at, self._rest = ("between", after) if mark else ("reasoning", text[end:])

    def _with_blank(self, text: str) -> str:
        whole = "".join(self._blank) + text
        return whole if self._reasons else whole.lstrip()
