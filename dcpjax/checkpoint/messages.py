"""Checks of chat messages and tools before they reach a chat template, and the two forms of a tool call's arguments."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages must be a list of at least one {{'role': ..., 'content': ...}}, but is {_short_repr(messages)}"
        )
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise ValueError(f"messages[{index}] must be a dict with role and content, but is {_short_repr(message)}")
    if message.get("role") not in ROLES:
        raise ValueError(
            f"messages[{index}]['role'] must be one of {', '.join(ROLES)}, but is {_short_repr(message.get('role'))}"
        )
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return dict(message)
    if content is None and message["role"] == "assistant":
        return {**message, "content": ""}
    return {**message, "content": _checked_content(index, content)}


def _checked_content(index: int, content: Any) -> str:
    """The text parts of a message joined to one string: most templates accept no parts, and parts could together spell
    a control token."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ValueError(
            f"messages[{index}]['content'] must be a str or a list of text parts, but is {_short_repr(content)}"
        )
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for text, part in zip(texts, parts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"messages[{index}]['content'] must hold only text parts, but holds {_short_repr(part)}")
    return "\n".join(map(str, texts))


def with_arguments(messages: Sequence[Mapping[str, Any]], change: Callable[[str, str], Any]) -> list[dict[str, Any]]:
    """Copies of the messages in which `change(place, text)` replaces every tool call's arguments that are a text."""
    return [_with_arguments(f"messages[{index}]", message, change) for index, message in enumerate(messages)]


def _with_arguments(place: str, message: Mapping[str, Any], change: Callable[[str, str], Any]) -> dict[str, Any]:
    made, calls = dict(message), message.get("tool_calls")
    if isinstance(calls, list | tuple):
        made["tool_calls"] = [
            _changed(f"{place}['tool_calls'][{number}]", call, change) for number, call in enumerate(calls)
        ]
    if "function_call" in message:  # OpenAI's older form
        made["function_call"] = _changed(f"{place}['function_call']", message["function_call"], change)
    return made


def _changed(place: str, call: Any, change: Callable[[str, str], Any]) -> Any:
    """The arguments stand in the call itself or in its function."""
    if not isinstance(call, Mapping):
        return call
    made = dict(call)
    if isinstance(call.get("arguments"), str):
        made["arguments"] = change(f"{place}['arguments']", call["arguments"])
    if "function" in call:
        made["function"] = _changed(f"{place}['function']", call["function"], change)
    return made


def decoded_arguments(place: str, text: str) -> dict[str, Any]:
    """The JSON object that a text spells; an empty text stands for no arguments."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f"{place} must be a JSON object, whose entries this model's chat template reads, but is "
            f"{_short_repr(text)}; correct it"
        )
    return value


def check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas (dicts), but is {_short_repr(tools)}")


def nested_keys(value: Any) -> Iterator[Any]:
    """Every key of nested dicts and lists. Without recursion, since requests may be nested deeply."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Mapping):
            yield from current
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
