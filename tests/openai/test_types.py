"""Every body that is written is one of the `openai` package's types, read strictly."""

from typing import Any

import pytest
from batch_mock import answers
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject

from dcpjax.api.logprobs import Logprob
from dcpjax.api.outputs import CompletionOutput, RequestOutput, StreamEvent
from dcpjax.openai.chunks import Chunks
from dcpjax.openai.parsers.formats import HERMES
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import read_body
from dcpjax.openai.response import error_body, response_body

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
ONE = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f"}</tool_call>'
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"logprob_token_ids": [7, 8]},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": ONE},
    {"prompt_logprobs": 1},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "prompt": ["a", [1, 2]]},
    {"logprobs": 2},
    {"echo": True},
    {"echo": True, "prompt": [[1, 2], [3]]},
    {"max_tokens": 0},
    {"max_tokens": 0, "echo": True},
    {"max_tokens": 0, "logprobs": 1},
    {"prompt_logprobs": 1},
]


def scored(text: str, tokens: list[int], *, prompt: list[int]) -> RequestOutput:
    """A result with log-probabilities of prompt and text, a letter each."""

    def entry(token: int) -> dict[int, Logprob]:
        return {token: Logprob(-1.5, 2, chr(token)), 7: Logprob(-0.5, 1, "x"), 8: Logprob(-9.0, 9, "y")}

    made = CompletionOutput(
        0, text, tokens, "stop", logprobs=[entry(token) for token in tokens], cumulative_logprob=-3.0
    )
    shown = [None, *map(entry, prompt[1:])]
    return RequestOutput("0", "".join(map(chr, prompt)), prompt, [made], True, prompt_logprobs=shown)


def body_of(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": "ab"}]} if kind == "chat" else {"prompt": "ab"}
    request = read_body(kind, {"model": "m", **given, **options})
    wants_scores = request.sampling.scores_tokens or request.sampling.prompt_logprobs is not None
    outputs = [scored("xy", [120, 121], prompt=[97, 98])] if wants_scores else answers(request)
    if request.demanded_call is not None:
        outputs[0].outputs[0].text = '[{"name": "f", "parameters": {}}]'
    return response_body(request, outputs, name="1", model="m", created=5)


@pytest.mark.parametrize("options", CHATS, ids=str)
def test_a_chat_is_one_of_openais(options):
    ChatCompletion.model_validate(body_of("chat", options), strict=True)


@pytest.mark.parametrize(
    "text", ["<think>a</think>b", "<think>a", '<think>a</think><tool_call>{"name": "f"}</tool_call>']
)
def test_a_chat_with_reasoning_and_calls_is_one_of_openais(text):
    request = read_body("chat", {"messages": [{"role": "user", "content": "ab"}], "tools": TOOLS})
    outputs = answers(request)
    outputs[0].outputs[0].text = text
    formats = MessageFormats(calls=HERMES, reasons=True)
    body = response_body(request, outputs, name="1", model="m", created=5, formats=formats)
    message = ChatCompletion.model_validate(body, strict=True).choices[0].message
    assert (message.model_extra or {})["reasoning_content"] == "a"
    assert len(message.tool_calls or ()) == text.count("<tool_call>")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_streamed_chat_with_reasoning_and_calls_adds_up_to_the_whole_one(size):
    text = '<think>a</think>so: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    request = read_body("chat", {"messages": [{"role": "user", "content": "ab"}], "tools": TOOLS})
    outputs, formats = answers(request), MessageFormats(calls=HERMES, reasons=True)
    outputs[0].outputs[0].text = text
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    events = [
        StreamEvent(0, 0, part, [], "stop" if number == len(parts) else None) for number, part in enumerate(parts, 1)
    ]
    chunks = Chunks(request, outputs, name="1", model="m", created=5, formats=formats)
    made = [ChatCompletionChunk.model_validate(chunk, strict=True) for one in events for chunk in chunks.of(0, one)]
    deltas = [choice.delta for chunk in made for choice in chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
    message = response_body(request, outputs, name="1", model="m", created=5, formats=formats)["choices"][0]["message"]
    assert "".join(delta.content or "" for delta in deltas) == message["content"]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "a"
    assert "".join(call.name or "" for call in calls) == "f"
    assert "".join(call.arguments or "" for call in calls) == message["tool_calls"][0]["function"]["arguments"]
    assert made[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("options", COMPLETIONS, ids=str)
def test_a_completion_is_one_of_openais(options):
    Completion.model_validate(body_of("completion", options), strict=True)


def test_an_echo_with_log_probabilities_is_one_of_openais_but_for_the_first_token():
    """OpenAI's API gives null for the token that nothing precedes, where its package declares numbers."""
    logprobs = (body := body_of("completion", {"echo": True, "logprobs": 1}))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "x", "y"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert (logprobs["token_logprobs"].pop(0), logprobs["top_logprobs"].pop(0)) == (None, None)
    assert logprobs["top_logprobs"] == [{"x": -0.5}] * 3
    Completion.model_validate(body, strict=True)


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (500, "server_error")])
def test_an_error_is_one_of_openais(status, kind):
    error = ErrorObject.model_validate(error_body("no", code="c", status=status)["error"], strict=True)
    assert (error.message, error.type, error.param, error.code) == ("no", kind, None, "c")
