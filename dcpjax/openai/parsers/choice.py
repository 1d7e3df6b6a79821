"""Which format a model's tool calls and reasoning have: by name, or by what its chat template says."""

from typing import Literal, get_args

from dcpjax.api.checks import check_choice
from dcpjax.openai.parsers.formats import DEEPSEEK_V3, HERMES, KIMI_K2, LLAMA3, CallFormat
from dcpjax.openai.parsers.reasoning import CLOSING

ToolCallParserName = Literal["auto", "none", "hermes", "llama3_json", "deepseek_v3", "deepseek_v31", "kimi_k2"]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3"]
FORMATS: dict[str, CallFormat] = {  # by vLLM's names
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
}
# What a template holds if it asks for a format, and what it does not hold: others write XML between the same marks.
_HELD: dict[str, tuple[str, ...]] = {
    "kimi_k2": (KIMI_K2.opening,),
    "deepseek_v3": (DEEPSEEK_V3.opening,),
    "hermes": (HERMES.opening,),
    "llama3_json": (*LLAMA3.before, '"parameters": dictionary of argument name'),
}
_NOT_HELD = ("<function=", "<arg_key>", "<parameter=")


def call_format(name: str, template: str | None) -> CallFormat | None:
    """The format of tool calls of this name; None for "none".

    With "auto" it is the one that the chat template asks for, None if it asks for none that is known here. Raises
    ValueError for an unknown name.
    """
    check_choice("`tool_call_parser`", name, get_args(ToolCallParserName))
    return FORMATS.get(_guessed(template or "") if name == "auto" else name)


def has_reasoning(name: str, template: str | None) -> bool:
    """Whether answers may begin with reasoning; with "auto", whether the chat template knows its marks.

    Raises ValueError for an unknown name.
    """
    check_choice("`reasoning_parser`", name, get_args(ReasoningParserName))
    return CLOSING in (template or "") if name == "auto" else name != "none"


def _guessed(template: str) -> str:
    plain = template.replace('\\"', '"').replace("\\'", "'")
    if any(mark in plain for mark in _NOT_HELD):
        return "none"
    return next((name for name, marks in _HELD.items() if any(mark in plain for mark in marks)), "none")
