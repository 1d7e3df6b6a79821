"""How families of models write tool calls: the marks around a call, and reading what stands between them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

_OBJECT = re.compile(r"\s*\{")


class Call(NamedTuple):
    """A call that was read. `arguments` is a JSON object; `id` is None if the format has no names for calls."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """A call begins with `opening` and ends with `closing`; marks inside JSON strings do not count.

    Args:
        read: the call in the text between the two marks; None if it is malformed.
        before: marks that belong to the calls behind them.
        after: marks that belong to the calls before them.
        inner: marks inside a call, which `read` knows.
        nested: the marks are brackets: a call ends with the `closing` of its own `opening`.
        anywhere: whether a call may follow other text. If not, it is the first thing in the message, or follows another
            call or a mark of `before`.
    """

    opening: str
    closing: str
    read: Callable[[str], Call | None]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    nested: bool = False
    anywhere: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opening, self.closing, *self.before, *self.after, *self.inner


def _hermes(text: str) -> Call | None:
    """`{"name": ..., "arguments": {...}}`; a function without parameters may have no arguments."""
    return _named_call(text, needs_arguments=False)


def _llama3(text: str) -> Call | None:
    """`"name": ..., "parameters": {...}` between the braces. An answer in JSON may have a name too, but not both."""
    return _named_call(f"{{{text}}}", needs_arguments=True)


_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = re.compile(
    rf"""\s* (?: function {_DEEPSEEK_SEPARATOR} \s* (?P<fenced>[^\n]+?) \s*\n\s* ```json (?P<block>.*) ```
           | (?P<name>[^\n]+?) \s* {_DEEPSEEK_SEPARATOR} (?P<plain>\s*\{{.*) ) \s*""",
    re.DOTALL | re.VERBOSE,
)


def _deepseek_v3(text: str) -> Call | None:
    """V3 and R1: the type, the name and a block of JSON; V3.1: the name and JSON."""
    found = _DEEPSEEK.fullmatch(text)
    return found and _call(found["fenced"] or found["name"], found["block"] or found["plain"] or "")


_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


def _kimi_k2(text: str) -> Call | None:
    """The id, which is `functions.NAME:NUMBER`, and JSON. The id is kept: the chat template reads it back."""
    call_id, mark, arguments = text.partition(_KIMI_ARGUMENTS)
    found = _KIMI_ID.fullmatch(call_id.strip())
    return _call(found["name"], arguments, call_id.strip()) if found and mark else None


HERMES = CallFormat(opening="<tool_call>", closing="</tool_call>", read=_hermes)
LLAMA3 = CallFormat(
    opening="{",
    closing="}",
    read=_llama3,
    before=("<|python_tag|>",),
    after=(";",),
    nested=True,
    anywhere=False,
)
DEEPSEEK_V3 = CallFormat(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    read=_deepseek_v3,
    before=("<｜tool▁calls▁begin｜>",),
    after=("<｜tool▁calls▁end｜>",),
    inner=(_DEEPSEEK_SEPARATOR,),
)
KIMI_K2 = CallFormat(
    opening="<|tool_call_begin|>",
    closing="<|tool_call_end|>",
    read=_kimi_k2,
    before=("<|tool_calls_section_begin|>",),
    after=("<|tool_calls_section_end|>",),
    inner=(_KIMI_ARGUMENTS,),
)


def _named_call(text: str, *, needs_arguments: bool) -> Call | None:
    """A call that is an object of its name and its arguments. Whatever else it held would be lost: then it is none.

    Models call the arguments also `parameters`, and write them also as the text of an object.
    """
    fields = _object(text) or {}
    name, kind = fields.pop("name", None), fields.pop("type", "function")
    arguments = [fields.pop(key) for key in ("arguments", "parameters") if key in fields]
    if not arguments and not needs_arguments:
        arguments = [{}]
    if fields or kind != "function" or len(arguments) != 1 or not isinstance(name, str):
        return None
    return _call(name, arguments[0] if isinstance(arguments[0], str) else _written(arguments[0]))


def _call(name: str, arguments: str, call_id: str | None = None) -> Call | None:
    """A call whose arguments are the text of an object, and stay as they were written."""
    well_formed = name.strip() and name.isprintable() and _object(arguments) is not None
    return Call(name, arguments.strip(), call_id) if well_formed else None


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None if it holds anything else, or two entries of one name."""
    if not _OBJECT.match(text):
        return None
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return None


def _written(value: Any) -> str:
    """The JSON of a value that was read; no JSON for a number beyond all floats, and for a value nested too deep."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return ""
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in text)
    return text if is_unicode else json.dumps(value)  # lone surrogates stay escapes


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object must hold each name once")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
