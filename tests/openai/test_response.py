import math

from batch_mock import answers, chat_completion

from dcpjax.api.logprobs import Logprob
from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.openai.parsers.formats import HERMES
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody
from dcpjax.openai.response import response_body
from dcpjax.openai.tools import DemandedCall


def request(kind="chat", **options) -> RequestBody:
    sampling = SamplingParams(**options.pop("sampling", {}))
    given = {"messages": [{"role": "user", "content": "abcd"}]} if kind == "chat" else {"prompt": "abcd"}
    return RequestBody(kind=kind, sampling=sampling, **{**given, **options})


def body_of(asked: RequestBody, output: RequestOutput | None = None) -> dict:
    return response_body(asked, [output] if output else answers(asked), name="12", model="m", created=5)


def test_a_chat_is_answered_with_openais_chat_completion():
    assert body_of(request()) == chat_completion("12")


def test_a_completion_is_answered_with_openais_text_completion():
    body = body_of(request("completion", sampling={"n": 2}))
    assert (body["id"], body["object"], body["usage"]["completion_tokens"]) == ("cmpl-12", "text_completion", 8)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "ABCD"), (1, "ABCD")]
    assert body_of(request("completion", echo=True))["choices"][0]["text"] == "abcdABCD"


def scored() -> RequestOutput:
    first = {7: Logprob(-2.0, 3, "é"), 8: Logprob(-0.5, 1, "x"), 9: Logprob(-1.0, 2, None)}
    second = {8: Logprob(-math.inf, 1, "x")}
    made = CompletionOutput(0, "éx", [7, 8], "length", logprobs=[first, second])
    return RequestOutput("0", None, [1], [made], True, prompt_logprobs=[None, {1: Logprob(-0.25, 1, "p")}])


def test_a_chats_log_probabilities_are_openais():
    content = body_of(request(sampling={"logprobs": 2}), scored())["choices"][0]["logprobs"]
    assert content["content"][0] == {
        "token": "é",
        "logprob": -2.0,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "x", "logprob": -0.5, "bytes": [120]},
            {"token": "token_id:9", "logprob": -1.0, "bytes": list(b"token_id:9")},
        ],
    }
    assert content["content"][1]["logprob"] == -9999.0


def test_a_completions_log_probabilities_are_openais():
    body = body_of(request("completion", sampling={"logprobs": 1}), scored())
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["é", "x"],
        "token_logprobs": [-2.0, -9999.0],
        "top_logprobs": [{"x": -0.5}, {"x": -9999.0}],
        "text_offset": [0, 1],
    }
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {"1": {"logprob": -0.25, "rank": 1, "decoded_token": "p"}},
    ]


def test_the_whole_vocabulary_is_listed_when_it_is_asked_for():
    found = body_of(request(sampling={"logprobs": -1}), scored())["choices"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in found["content"]] == [3, 1]


def completion_of(text: str, index: int = 0, reason="stop") -> CompletionOutput:
    return CompletionOutput(index, text, [1] * len(text), reason)


def called(text: str, *, reason="stop", **options) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    asked = request(demanded_call=DemandedCall(tools=tools, **options))
    output = RequestOutput("0", None, [1], [completion_of(text, reason=reason)], True)
    return body_of(asked, output)["choices"][0]


def test_demanded_calls_are_read_from_the_text():
    text = '[{"name": "f", "parameters": {"a": "é"}}, {"name": "g", "parameters": {}}]'
    choice = called(text)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    first, second = choice["message"]["tool_calls"]
    assert first == {"id": "call_12_0_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    assert (second["id"], second["function"]) == ("call_12_0_1", {"name": "g", "arguments": "{}"})


def test_the_call_of_a_named_function_is_the_text_and_ends_as_openais_does():
    choice = called('{"a": 1}', name="f")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_calls_that_were_cut_off_stay_text():
    choice = called('[{"name": "f", "param', reason="length")
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": '[{"name": "f", "param', "refusal": None}


def answered(text: str, *, reason="stop", **options) -> dict:
    asked = request(tools=[{"type": "function", "function": {"name": "f"}}], **options)
    output = RequestOutput("0", None, [1], [completion_of(text, index, reason) for index in range(2)], True)
    body = response_body(asked, [output], name="12", model="m", created=5, formats=MessageFormats(calls=HERMES))
    return body["choices"][1]


def test_calls_of_the_models_own_accord_are_read_from_the_text():
    choice = answered('I look.\n<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>')
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    (call,) = choice["message"]["tool_calls"]
    assert call == {"id": "call_12_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


def test_an_answer_that_was_cut_off_behind_a_call_says_so():
    choice = answered('<tool_call>{"name": "f"}</tool_call> and', reason="length")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "and")


def test_calls_stay_text_where_nobody_says_how_they_are_written():
    output = RequestOutput("0", None, [1], [completion_of('<tool_call>{"name": "f"}</tool_call>')], True)
    message = body_of(request(tools=[{}]), output)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": '<tool_call>{"name": "f"}</tool_call>', "refusal": None}


def test_every_prompt_of_a_list_has_its_choices():
    asked = request("completion", sampling={"n": 2}, echo=True, prompt=["ab", "c"])
    body = body_of(asked)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["abAB", "abAB", "cC", "cC"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 6)


def test_no_tokens_at_all_leave_the_echo():
    body = body_of(request("completion", echo=True, generates=False, sampling={"max_tokens": 1}))
    assert body["choices"][0]["text"] == "abcd"
    assert body["choices"][0]["finish_reason"] == "length"
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (0, 4)


def test_a_token_that_the_text_does_not_show_takes_no_place_in_it():
    rest = {5: Logprob(-1.0, 1, "hi")}
    made = CompletionOutput(0, "!", [6], "stop", logprobs=[{6: Logprob(-1.0, 1, "!")}])
    output = RequestOutput("0", "hi", [1, 5], [made], True, prompt_logprobs=[None, rest])
    asked = request("completion", echo=True, sampling={"logprobs": 0}, prompt="hi")
    logprobs = body_of(asked, output)["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["", "hi", "!"], [0, 0, 2])
