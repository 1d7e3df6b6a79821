"""Checks of chat messages and tools before they reach a chat template."""

from collections.abc import Iterator, Mapping, Sequence
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
