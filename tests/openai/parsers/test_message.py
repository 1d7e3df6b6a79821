"""The parser of a whole message, as it is chosen for a model and a request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from dcpjax.openai.parsers.choice import call_format, has_reasoning
from dcpjax.openai.parsers.deltas import CallArguments, CallStart, Content, Reasoning, message_of
from dcpjax.openai.parsers.formats import DEEPSEEK_V3, HERMES, KIMI_K2, LLAMA3
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody, read_body

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
QWEN = r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}"""
THINKS = "{%- set content = content.split('</think>')[-1] %}"
TEMPLATES = [  # what a template says, and the format that it asks for
    (QWEN, HERMES),
    (QWEN + THINKS, HERMES),
    (r"""{{- 'in this format:\n<tool_call>\n<function=example_function_name>\n<parameter=a>' }}""", None),
    (
        r"""{{- "Answer as {\"name\": function name, \"parameters\": dictionary of argument name and its""",
        LLAMA3,
    ),
    ("""{{- "<|python_tag|>" + tool_call.name + ".call(" }}""", LLAMA3),
    ("""{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}""", DEEPSEEK_V3),
    ("""<|tool_calls_section_begin|>{%- for call in calls -%}<|tool_call_begin|>{{ call.id }}""", KIMI_K2),
    ("{{ message.content }}", None),
    (None, None),
]


class MockTokenizer:
    """Ids are characters; the chat template is given."""

    def __init__(self, template: str | None) -> None:
        self.template = template

    def chat_template(self, *, has_tools: bool) -> str | None:
        return self.template

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def chat(**options: Any) -> RequestBody:
    return read_body("chat", {"messages": [{"role": "user", "content": "a"}], **options})


def parsed(text: str, *, prompt: str = "a", formats: MessageFormats, **options: Any) -> dict[str, Any]:
    parser = formats.parser(chat(**options), list(map(ord, prompt)), call_ids="call")
    message = message_of([*parser.feed(text), *parser.finish()])
    assert parser.has_calls == ("tool_calls" in message)
    return message


@pytest.mark.parametrize(("template", "form"), TEMPLATES)
def test_the_format_is_the_one_that_the_template_asks_for(template, form):
    assert call_format("auto", template) is form
    assert call_format("none", template) is None
    assert call_format("kimi_k2", template) is KIMI_K2


def test_answers_may_reason_where_the_template_knows_the_marks():
    assert has_reasoning("auto", QWEN + THINKS)
    assert not has_reasoning("auto", QWEN)
    assert not has_reasoning("none", THINKS)
    assert has_reasoning("qwen3", None)


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_those_that_there_are(option):
    with pytest.raises(ValueError, match=f"`{option}` must be one of auto, none, .*, but is 'gpt'"):
        MessageFormats.of(None, **{option: "gpt"})


ANSWER = '<think>\nLook it up.\n</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
QWEN3 = MessageFormats.of(MockTokenizer(QWEN + THINKS))


def test_a_message_has_reasoning_content_and_calls():
    assert parsed(ANSWER, formats=QWEN3, tools=TOOLS) == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Look it up.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        "refusal": None,
    }


def test_calls_are_parsed_only_where_the_request_offers_tools_and_reasoning_before_a_free_text_alone():
    content = ANSWER.split("</think>\n\n")[1]
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = parsed(ANSWER, formats=QWEN3, **options)
        assert (message["content"], "tool_calls" in message) == (content, False)
    structured = parsed(ANSWER, formats=QWEN3, tools=TOOLS, response_format={"type": "json_object"})
    assert structured == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert parsed(ANSWER, formats=MessageFormats(), tools=TOOLS)["content"] == ANSWER


def test_reasoning_goes_on_where_the_prompt_has_begun_it():
    message = parsed("Hm.</think>Yes", prompt="<|assistant|><think>\n", formats=QWEN3)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    assert parsed("Hm.", prompt="<think></think>", formats=QWEN3)["content"] == "Hm."


def test_a_second_call_is_content_where_the_request_allows_one():
    calls = ANSWER.split("I look.\n")[1]
    message = parsed(calls + calls, formats=QWEN3, tools=TOOLS, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1
    assert message["content"] == calls


def test_the_parser_sees_the_marks_of_what_it_parses():
    assert "<tool_call>" in QWEN3.shown_tokens(chat(tools=TOOLS))
    assert QWEN3.shown_tokens(chat()) == ("<think>", "</think>")
    assert MessageFormats.of(MockTokenizer(QWEN)).shown_tokens(chat()) == ()


def test_completions_are_not_parsed():
    body = read_body("completion", {"prompt": "a"})
    parser = QWEN3.parser(body, [97], call_ids="call")
    assert [*parser.feed(ANSWER), *parser.finish()] == [Content(ANSWER)]
    assert QWEN3.shown_tokens(body) == ()


@pytest.mark.parametrize("delta", [Content("a"), Reasoning("b"), CallStart(0, "id", "f"), CallArguments(0, "{}")])
def test_every_delta_is_one_of_openais(delta):
    ChoiceDelta.model_validate(delta.as_openai(), strict=True)


@given(st.lists(st.integers(0, 2 * len(ANSWER)), max_size=20).map(sorted))
def test_a_message_is_the_same_however_it_is_cut(cuts):
    text = ANSWER + "\n" + ANSWER
    parser = QWEN3.parser(chat(tools=TOOLS), [97], call_ids="call")
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    assert message_of([*deltas, *parser.finish()]) == parsed(text, formats=QWEN3, tools=TOOLS)
