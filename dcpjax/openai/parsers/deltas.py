"""The parts of a message as they become certain, each the `delta` of a chunk in OpenAI's streams."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Content:
    """More of the text that the user reads."""

    text: str

    def as_openai(self) -> dict[str, Any]:
        return {"content": self.text}


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers. OpenAI's messages have no name for it; this is the name that
    DeepSeek's API has, and under which chat templates read it back."""

    text: str

    def as_openai(self) -> dict[str, Any]:
        return {"reasoning_content": self.text}


@dataclass(frozen=True)
class CallStart:
    """A new tool call: `index` counts the calls of a message from 0. Its arguments follow."""

    index: int
    id: str
    name: str

    def as_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": ""}
        return {"tool_calls": [{"index": self.index, "id": self.id, "type": "function", "function": function}]}


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of call `index`. All pieces of a call joined are a JSON object."""

    index: int
    text: str

    def as_openai(self) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.index, "function": {"arguments": self.text}}]}


Delta = Content | Reasoning | CallStart | CallArguments


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """OpenAI's message that the deltas add up to: without content if there is something else instead."""
    content, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, id, name):
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content), "refusal": None}
    message |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    return message if content or not (reasoning or calls) else {**message, "content": None}
