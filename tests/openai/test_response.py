import math

from batch_mock import answers

from dcpjax.api.logprobs import Logprob
from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.openai.request import RequestBody
from dcpjax.openai.response import response_body


def request(kind="chat", **options) -> RequestBody:
    sampling = SamplingParams(**options.pop("sampling", {}))
    given = {"messages": [{"role": "user", "content": "abcd"}]} if kind == "chat" else {"prompt": "abcd"}
    return RequestBody(kind=kind, sampling=sampling, **given, **options)


def body_of(asked: RequestBody, output: RequestOutput | None = None) -> dict:
    return response_body(asked, [output] if output else answers(asked), name="12", model="m", created=5)


def test_a_chat_is_answered_with_openais_chat_completion():
    assert body_of(request()) == {
        "id": "chatcmpl-12",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ABCD", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


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
