"""The parser of a chat's answers, from what is known of the model and of the request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dcpjax.openai.parsers.choice import call_format, has_reasoning
from dcpjax.openai.parsers.deltas import Content, Delta
from dcpjax.openai.parsers.formats import CallFormat
from dcpjax.openai.parsers.reasoning import CLOSING, OPENING, ReasoningParser, opens_reasoning
from dcpjax.openai.parsers.tool_calls import CallParser
from dcpjax.openai.request import RequestBody

PROMPT_END = 16  # tokens: enough to spell the mark of reasoning where it is no token of its own


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer."""

    def chat_template(self, *, has_tools: bool) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class MessageParser:
    """Text of one answer in, deltas of its message out."""

    def __init__(self, reasoning: ReasoningParser | None = None, calls: CallParser | None = None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has been given out: a message that stops then does so for its calls."""
        return self._calls is not None and self._calls.has_calls

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text makes certain."""
        return self._with_calls(self._reasoning.feed(text) if self._reasoning else [Content(text)] if text else [])

    def finish(self) -> list[Delta]:
        """What was held back, once no more text comes."""
        last = self._with_calls(self._reasoning.finish() if self._reasoning else [])
        return last + (self._calls.finish() if self._calls else [])

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        """Content goes through the parser of calls."""
        if self._calls is None:
            return deltas
        return [
            made
            for delta in deltas
            for made in (self._calls.feed(delta.text) if isinstance(delta, Content) else [delta])
        ]


@dataclass(frozen=True, kw_only=True)
class MessageFormats:
    """How one model writes tool calls and reasoning. Without arguments: nothing is parsed."""

    calls: CallFormat | None = None
    reasons: bool = False
    decode: Callable[[Sequence[int]], str] = lambda token_ids: ""  # with special tokens

    @classmethod
    def of(
        cls, tokenizer: ChatTokenizer | None, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "MessageFormats":
        """By the names of parsers, which "auto" finds in the model's chat template.

        Raises ValueError for an unknown name.
        """
        template = tokenizer.chat_template(has_tools=True) if tokenizer else None
        return cls(
            calls=call_format(tool_call_parser, template),
            reasons=has_reasoning(reasoning_parser, template),
            decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False) if tokenizer else "",
        )

    def shown_tokens(self, body: RequestBody) -> tuple[str, ...]:
        """Special tokens that the parser must see in the text."""
        reasoning = (OPENING, CLOSING) if self._reasons(body) else ()
        calls = self._calls(body)
        return reasoning + (calls.marks if calls else ())

    def parser(self, body: RequestBody, prompt_token_ids: Sequence[int], *, call_ids: str) -> MessageParser:
        """A parser of one answer to a request. `call_ids` begins the ids of its tool calls."""
        form, most_calls = self._calls(body), None if body.parallel_tool_calls else 1
        opened = self._reasons(body) and opens_reasoning(self.decode(prompt_token_ids[-PROMPT_END:]))
        return MessageParser(
            ReasoningParser(opened=opened) if self._reasons(body) else None,
            CallParser(form, call_ids=call_ids, most_calls=most_calls) if form else None,
        )

    def _reasons(self, body: RequestBody) -> bool:
        """An answer that has a structure has it from its first token on."""
        return self.reasons and body.kind == "chat" and body.sampling.structured_outputs is None

    def _calls(self, body: RequestBody) -> CallFormat | None:
        return self.calls if body.tools and body.sampling.structured_outputs is None else None
