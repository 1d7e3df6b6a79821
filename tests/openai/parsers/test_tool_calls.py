import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.openai.parsers import tool_calls
from dcpjax.openai.parsers.choice import FORMATS
from dcpjax.openai.parsers.deltas import CallArguments, CallStart, Content, Delta, message_of
from dcpjax.openai.parsers.tool_calls import CallParser

QUERY = '{"query": "a \\"b\\" </tool_call> } {", "n": [1, {"x": "é"}]}'
DEEPSEEK = {
    "first": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{QUERY}\n```<｜tool▁call▁end｜>",
    "second": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
}
# By format: text before two calls, what is between them, what ends them.
WRITTEN: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "find", "arguments": {QUERY}}}\n</tool_call>\n<tool_call>{{"name": "now"}}'
    "</tool_call>",
    "llama3_json": f'<|python_tag|>{{"name": "find", "parameters": {QUERY}}}; {{"type": "function", "name": "now", '
    '"parameters": {}}',
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{DEEPSEEK['first']}\n{DEEPSEEK['second']}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{QUERY}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:3<|tool_call_argument_begin|>{QUERY}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
}
ANYWHERE = [name for name, form in FORMATS.items() if form.anywhere]


def deltas(form: str, *pieces: str, **options: Any) -> list[Delta]:
    parser = CallParser(FORMATS[form], call_ids="call", **options)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def message(form: str, *pieces: str, **options: Any) -> dict[str, Any]:
    return message_of(deltas(form, *pieces, **options))


def called(form: str, *pieces: str, **options: Any) -> list[tuple[str, Any]]:
    calls = message(form, *pieces, **options).get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("form", FORMATS)
def test_the_calls_of_each_format_are_read(form):
    assert called(form, WRITTEN[form]) == [("find", json.loads(QUERY)), ("now", {})]
    assert message(form, WRITTEN[form] + "\n")["content"] is None
    ids = [call["id"] for call in message(form, WRITTEN[form])["tool_calls"]]
    assert ids == (["functions.find:3", "functions.now:4"] if form == "kimi_k2" else ["call_0", "call_1"])


@pytest.mark.parametrize("form", ANYWHERE)
def test_text_around_calls_is_content(form):
    made = message(form, f"Let me look.\n\n{WRITTEN[form]}\n\nDone. ")
    assert (made["content"], len(made["tool_calls"])) == ("Let me look.Done. ", 2)


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_begins_with_its_name_and_no_arguments_and_keeps_its_index(form):
    made = deltas(form, *WRITTEN[form])
    assert [(type(one), one.index) for one in made if not isinstance(one, Content)] == [
        (CallStart, 0),
        (CallArguments, 0),
        (CallStart, 1),
        (CallArguments, 1),
    ]
    chunk = made[0].as_openai()["tool_calls"][0]
    assert chunk["type"] == "function"
    assert chunk["function"] == {"name": "find", "arguments": ""}


MALFORMED = {
    "hermes": [
        "<tool_call>",
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": {"a": "cut\n</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f\\n", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "not an object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "reason": "b"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
        '<tool_call>{"name": "f", "type": "class", "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100_000}}}}}</tool_call>',
        "<tool_call><function=f></function></tool_call>",
        'said </tool_call> and "<tool_cal',
    ],
    "llama3_json": [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"}',
        '{"name": "f", "parameters": {"a": ',
        "<|python_tag|>brave_search.call(query='x')",
        'Use {"name": "f", "parameters": {}}',
        '; {"a": 1} {"name": "f", "parameters": {}}',
        "<|python_tag|>",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[]\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>text<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜> \n<｜tool▁calls▁begin｜> ",
    ],
    "kimi_k2": [
        "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>",
        "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
    ],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_content_as_it_was_written(form, text):
    assert message(form, text) == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize("form", ANYWHERE)
def test_a_malformed_call_takes_no_other_with_it(form):
    bad = FORMATS[form].opening + '{"a": "b\n' + FORMATS[form].closing
    assert len(called(form, f"{bad}{WRITTEN[form]}{bad}")) == 2
    assert message(form, f"{bad}{WRITTEN[form]}{bad}")["content"] == bad + bad


def test_a_call_that_lacks_only_its_closing_mark_is_one():
    written = '<tool_call>{"name": "f", "arguments": {}}'
    for end in ("", "\n", "\n</tool_c", f"\n{written}"):
        assert {name for name, _ in called("hermes", written + end)} == {"f"}
        assert message("hermes", written + end)["content"] is None


def test_arguments_written_as_a_text_are_the_object_it_spells():
    assert called("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>') == [("f", {"a": 1})]


def test_a_lone_surrogate_stays_an_escape():
    (call,) = message("hermes", '<tool_call>{"name": "f", "arguments": {"é": "\\ud800"}}</tool_call>')["tool_calls"]
    assert json.loads(call["function"]["arguments"].encode()) == {"é": "\ud800"}


def test_calls_after_the_most_that_are_allowed_are_content():
    made = message("hermes", WRITTEN["hermes"], most_calls=1)
    assert [call["function"]["name"] for call in made["tool_calls"]] == ["find"]
    assert made["content"] == '<tool_call>{"name": "now"}</tool_call>'


def test_an_id_that_the_model_gives_twice_is_given_out_once():
    written = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>" * 2
    assert [call["id"] for call in message("kimi_k2", written)["tool_calls"]] == ["functions.f:0", "call_1"]


def parts_of(form: str) -> list[str]:
    """What texts with and without calls are made of; `#` becomes a number of its own."""
    marks, written = (
        FORMATS[form].marks,
        [part for part in re.split(r"(?<=\n)|(?<=｜>)|(?<=\|>)", WRITTEN[form]) if part],
    )
    numbered = [WRITTEN[form].replace("now", "now#"), WRITTEN[form].replace('{"query"', '{"#": "#", "query"'), "text#"]
    numbered += ['"#', '\n#"', '{"name": "f#", "parameters": {"#": 1}}', '{"#"}']
    halves = [mark[: len(mark) // 2] for mark in marks]
    return [*marks, *halves, *written, *numbered, '"', "\\", "\n", " ", "{", "}", ";"]


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """(A format, a text cut into pieces)."""
    form = draw(st.sampled_from(sorted(FORMATS)))
    text = "".join(draw(st.lists(st.sampled_from(parts_of(form)), max_size=12)))
    numbers = itertools.count(100)
    text = re.sub("#", lambda match: f"<{next(numbers)}>", text)
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=30).map(sorted))
    return form, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(texts())
def test_a_text_gives_the_same_message_however_it_is_cut(case):
    form, pieces = case
    whole = message(form, "".join(pieces))
    assert message(form, *pieces) == whole
    assert message(form, *"".join(pieces)) == whole


@given(texts())
def test_nothing_is_lost_and_nothing_is_said_twice(case):
    """Each number of the text is in the content or in a call, once; without calls the content is the text."""
    form, pieces = case
    text, made = "".join(pieces), message(form, *pieces)
    calls = made.get("tool_calls", [])
    functions = [call["function"]["name"] + call["function"]["arguments"] for call in calls]
    given_out = (made["content"] or "") + "".join(functions)
    assert sorted(re.findall(r"<\d+>", given_out)) == re.findall(r"<\d+>", text)
    if not calls:
        assert made["content"] == text


def test_no_character_is_looked_at_again_and_again(monkeypatch):
    """The characters searched for marks grow with the text, not with its square."""

    def searched(size: int) -> int:
        seen = 0
        first_stop = tool_calls.first_stop

        def counted(text: str, *rest: Any) -> Any:
            nonlocal seen
            seen += len(text)
            return first_stop(text, *rest)

        with monkeypatch.context() as patch:
            patch.setattr("dcpjax.openai.parsers.json_strings.first_stop", counted)
            patch.setattr(tool_calls, "first_stop", counted)
            text = '<tool_call>{"a": "' + "x" * size + '" \\' + "<tool_call>{" * (size // 10) + "\n" * size
            assert message("hermes", text)["content"] == text
            assert message("hermes", *text)["content"] == text
        return seen

    assert searched(4000) < 2.5 * searched(2000)
