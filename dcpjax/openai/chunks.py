"""An answer while it is streamed: events of its completions -> the chunks of OpenAI's API.

What a chat's text means, such as a tool call, an `AnswerParser` finds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dcpjax.api.outputs import CompletionOutput, RequestOutput, StreamEvent
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody
from dcpjax.openai.response import UNPARSED, chat_logprobs, completion_logprobs, prefixes, prompt_logprobs, usage
from dcpjax.openai.tools import DemandedCall


class Delta(Protocol):
    """A part of a message that has become certain."""

    def as_openai(self) -> Mapping[str, Any]:
        """The `delta` of a chunk."""
        ...


class AnswerParser(Protocol):
    """Text of one answer in, deltas of its message out."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has been given out."""
        ...

    def feed(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]:
        """What was held back, once no more text comes."""
        ...


@dataclass(frozen=True)
class PlainDelta:
    """The fields of a delta as they are."""

    fields: Mapping[str, Any]

    def as_openai(self) -> Mapping[str, Any]:
        return self.fields


class DemandedCallParser:
    """The text is the call that the request demands. Arguments of a named function are given out as they come, a list
    of calls once it is whole."""

    def __init__(self, call: DemandedCall, call_ids: str) -> None:
        self._call, self._call_ids = call, call_ids
        self._parts: list[str] = []
        self.has_calls = False

    def feed(self, text: str) -> Sequence[Delta]:
        first, begun = not self._parts, bool(text)
        self._parts.append(text)
        if self._call.name is None or not begun:
            return []
        function = {"arguments": text}
        if not first:
            return [_call_delta({"index": 0, "function": function})]
        whole = {"id": f"{self._call_ids}_0", "type": "function", "function": {"name": self._call.name, **function}}
        return [_call_delta({"index": 0, **whole})]

    def finish(self) -> Sequence[Delta]:
        if self._call.name is not None:
            return []
        text = "".join(self._parts)
        calls = self._call.read(text, self._call_ids)
        if calls is None:
            return [PlainDelta({"content": text})]
        self.has_calls = True
        return [_call_delta({"index": index, **call}) for index, call in enumerate(calls)]


@dataclass(kw_only=True)
class _Choice:
    """How far one completion has been given out."""

    index: int  # in the response
    prefix: str  # the echoed prompt
    parser: AnswerParser
    begun: bool = False
    tokens: int = 0
    characters: int = 0


class Chunks:
    """The chunks of one answer."""

    def __init__(
        self,
        request: RequestBody,
        outputs: Sequence[RequestOutput],
        *,
        name: str,
        model: str,
        created: int,
        formats: MessageFormats = UNPARSED,
    ) -> None:
        """
        Args:
            outputs: one for each of the request's prompts; they fill while the completions run.
            name: follows `chatcmpl-` or `cmpl-` in the id of every chunk.
            model: what the chunks call the model.
            created: Unix time in seconds.
            formats: how the model writes tool calls and reasoning; by default they stay in the text.
        """
        self._request, self._outputs, self._name, self._formats = request, outputs, name, formats
        chat = request.kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._prefixes = list(prefixes(request, outputs)) if not chat else [""]
        self._without_echo = replace(request, echo=False)
        self._choices: dict[tuple[int, int], _Choice] = {}

    def of(self, place: int, event: StreamEvent) -> list[dict[str, Any]]:
        """The chunks that tell what happened to a completion of prompt number `place`."""
        choice, output = self._choice(place, event.index), self._outputs[place]
        piece = _piece(output, event, choice.tokens)
        give = self._chat if self._request.kind == "chat" else self._completion
        made = give(choice, output, piece)
        choice.begun, choice.tokens = True, choice.tokens + len(event.token_ids)
        return [self._chunk(one, first and place == 0) for one, first in made]

    def last(self) -> list[dict[str, Any]]:
        """The chunk that tells the usage, if the request asks for it."""
        if not self._request.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": usage(self._request, self._outputs)}]

    def _choice(self, place: int, index: int) -> _Choice:
        if (place, index) not in self._choices:
            self._choices[place, index] = _Choice(
                index=place * self._request.sampling.n + index,
                prefix=self._prefixes[place],
                parser=self._made_parser(place, f"call_{self._name}_{index}"),
            )
        return self._choices[place, index]

    def _made_parser(self, place: int, call_ids: str) -> AnswerParser:
        if self._request.demanded_call is not None:
            return DemandedCallParser(self._request.demanded_call, call_ids)
        return self._formats.parser(self._request, self._outputs[place].prompt_token_ids, call_ids=call_ids)

    def _chunk(self, choice: dict[str, Any], first: bool) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self._request.kind == "chat" and first:
            chunk |= prompt_logprobs(self._outputs[0])
        if self._request.continuous_usage:
            return {**chunk, "usage": usage(self._request, self._outputs)}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def _chat(
        self, choice: _Choice, output: RequestOutput, piece: CompletionOutput
    ) -> list[tuple[dict[str, Any], bool]]:
        """(choice of a chunk, whether it is the completion's first) for each delta."""
        deltas = [delta.as_openai() for delta in choice.parser.feed(piece.text)]
        if piece.finish_reason is not None:
            deltas += [delta.as_openai() for delta in choice.parser.finish()]
        if piece.logprobs and not deltas:
            deltas = [{"content": ""}]
        logprobs = [chat_logprobs(self._request, piece)] + [None] * len(deltas)
        made = [
            ({"index": choice.index, "delta": delta, "logprobs": scores, "finish_reason": None}, False)
            for delta, scores in zip(deltas, logprobs, strict=False)
        ]
        if not choice.begun:
            role = {"role": "assistant", "content": ""}
            made.insert(0, ({"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None}, True))
        if piece.finish_reason is not None:
            made.append((self._chat_end(choice, piece), False))
        return made

    def _chat_end(self, choice: _Choice, piece: CompletionOutput) -> dict[str, Any]:
        called = choice.parser.has_calls and piece.finish_reason == "stop"
        return {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": "tool_calls" if called else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _completion(
        self, choice: _Choice, output: RequestOutput, piece: CompletionOutput
    ) -> list[tuple[dict[str, Any], bool]]:
        request = self._without_echo if choice.begun else self._request
        prefix = "" if choice.begun else choice.prefix
        text = prefix + (piece.text if request.generates else "")
        ended = piece.finish_reason is not None
        if not text and not ended and not piece.logprobs:
            return []
        logprobs, choice.characters = completion_logprobs(request, output, piece, prefix, choice.characters)
        asked = {} if request.echo and request.sampling.logprobs is not None else prompt_logprobs(output)
        made = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason if request.generates or not ended else "length",
            "stop_reason": piece.stop_reason if request.generates else None,
            **({} if choice.begun else asked),
        }
        return [(made, not choice.begun)]


def _piece(output: RequestOutput, event: StreamEvent, start: int) -> CompletionOutput:
    """What the event adds to its completion, of which `start` tokens have been given out."""
    logprobs, end = output.outputs[event.index].logprobs, start + len(event.token_ids)
    return CompletionOutput(
        event.index,
        event.text,
        event.token_ids,
        event.finish_reason,
        event.stop_reason,
        logprobs=None if logprobs is None else logprobs[start:end],
    )


def _call_delta(call: dict[str, Any]) -> PlainDelta:
    return PlainDelta({"tool_calls": [call]})
