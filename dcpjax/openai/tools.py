"""The tools of a chat request: what the template is told of them, and calls that the request demands.

A demanded call is generated under a JSON schema and read back from the text. What a model calls of its own accord
(`tool_choice` "auto") it writes in a format of its family, which the `parsers` know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpjax.openai.json_text import short_json

Tool = Mapping[str, Any]
DEFINITIONS = "$defs"


class ToolError(ValueError):
    """Tools or a tool choice that cannot be served; the message says why."""


@dataclass(frozen=True, kw_only=True)
class DemandedCall:
    """A call that the answer must be."""

    tools: Sequence[Tool]
    name: str | None = None  # of the function to call; None: any of the tools, one or several times
    several: bool = True

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the answer: the arguments of the named function, or a list of calls."""
        if self.name is not None:
            return dict(next(_parameters(tool) for tool in self.tools if _name(tool) == self.name))
        definitions: dict[str, Any] = {}
        calls = [_call_schema(tool, definitions) for tool in self.tools]
        most = {} if self.several else {"maxItems": 1}
        listed = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
        return {**listed, DEFINITIONS: definitions} if definitions else listed

    def read(self, text: str, id_start: str) -> list[dict[str, Any]] | None:
        """The calls in an answer, as OpenAI has them. None for a list that was cut off."""
        if self.name is not None:
            return [_call(f"{id_start}_0", self.name, text)]
        try:
            calls = json.loads(text)
        except json.JSONDecodeError:
            return None
        return [
            _call(f"{id_start}_{index}", call["name"], json.dumps(call["parameters"], ensure_ascii=False))
            for index, call in enumerate(calls)
        ]


def read_tools(options: Mapping[str, Any]) -> tuple[list[Tool] | None, DemandedCall | None, bool]:
    """(The tools that the template is given, the call that `tool_choice` demands, whether several calls are allowed).

    Raises ToolError.
    """
    tools, choice = options.get("tools", []), options.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ToolError(f"tools must be a list of objects, but is {short_json(tools)}")
    several = options.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ToolError(f"parallel_tool_calls must be true or false, but is {short_json(several)}")
    if choice in ("auto", "none"):
        return (tools if tools and choice == "auto" else None), None, several
    names = [_name(tool) for tool in tools]
    if not names:
        raise ToolError(f"tool_choice must come with tools, but is {short_json(choice)} without any; add tools")
    return tools, DemandedCall(tools=tools, name=_chosen(choice, names), several=several), several


def _chosen(choice: Any, names: Sequence[str]) -> str | None:
    """The function that must be called; None for any of them."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ToolError(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, but is "
            f"{short_json(choice)}; use 'auto'"
        )
    if function["name"] not in names:
        raise ToolError(f"tool_choice must name one of the tools ({', '.join(names)}), but names {function['name']!r}")
    return function["name"]


def _name(tool: Tool) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) and tool.get("type") == "function" else None
    if not isinstance(name, str) or not name:
        raise ToolError(
            f"tools must be {{'type': 'function', 'function': {{'name': ...}}}}, but one is {short_json(tool)}"
        )
    return name


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """The schema of a function's arguments; one without has none."""
    parameters = tool["function"].get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise ToolError(f"parameters of {_name(tool)} must be a JSON schema, but is {short_json(parameters)}")
    return parameters


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one call. Its definitions move to those of the whole schema, where references look for them."""
    parameters = dict(_parameters(tool))
    own = parameters.pop(DEFINITIONS, None)
    if not isinstance(own, dict | None):
        raise ToolError(f"{DEFINITIONS} of {_name(tool)} must be an object, but is {short_json(own)}; leave it out")
    for name, definition in (own or {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise ToolError(f"tools must agree on {DEFINITIONS}, but differ in {name!r}; rename one")
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [_name(tool)]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
