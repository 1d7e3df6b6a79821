import json
import math

import pytest
from batch_mock import answer

from dcpjax.api.logprobs import Logprob
from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.jobs.record import Stored, encode_record, error_record, read_record, result_record
from dcpjax.openai.request import BatchRequest

NAME = "12_00000000000000ff"


def request(kind="chat", **options) -> BatchRequest:
    sampling = SamplingParams(**options.pop("sampling", {}))
    given = {"messages": [{"role": "user", "content": "abcd"}]} if kind == "chat" else {"prompt": "abcd"}
    fields = {"line": 12, "fingerprint": "00000000000000ff", "custom_id": "c", "kind": kind, "sampling": sampling}
    return BatchRequest(**fields, **given, **options)


def record(asked: BatchRequest, output: RequestOutput | None = None) -> dict:
    return result_record(asked, output or answer(asked), model="m", created=5)


def test_a_chat_is_answered_with_openais_chat_completion():
    assert record(request()) == {
        "id": f"batch_req_{NAME}",
        "custom_id": "c",
        "response": {
            "status_code": 200,
            "request_id": f"req_{NAME}",
            "body": {
                "id": f"chatcmpl-{NAME}",
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
            },
        },
        "error": None,
    }


def test_a_completion_is_answered_with_openais_text_completion():
    body = record(request("completion", sampling={"n": 2}))["response"]["body"]
    assert (body["id"], body["object"], body["usage"]["completion_tokens"]) == (f"cmpl-{NAME}", "text_completion", 8)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "ABCD"), (1, "ABCD")]
    assert record(request("completion", echo=True))["response"]["body"]["choices"][0]["text"] == "abcdABCD"


def scored() -> RequestOutput:
    first = {7: Logprob(-2.0, 3, "é"), 8: Logprob(-0.5, 1, "x"), 9: Logprob(-1.0, 2, None)}
    second = {8: Logprob(-math.inf, 1, "x")}
    made = CompletionOutput(0, "éx", [7, 8], "length", logprobs=[first, second])
    return RequestOutput("0", None, [1], [made], True, prompt_logprobs=[None, {1: Logprob(-0.25, 1, "p")}])


def test_a_chats_log_probabilities_are_openais():
    content = record(request(sampling={"logprobs": 2}), scored())["response"]["body"]["choices"][0]["logprobs"]
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
    body = record(request("completion", sampling={"logprobs": 1}), scored())["response"]["body"]
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
    found = record(request(sampling={"logprobs": -1}), scored())["response"]["body"]["choices"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in found["content"]] == [3, 1]


def test_a_request_that_failed_is_an_error_record():
    asked = request()
    failed = RequestOutput("0", None, [1], [CompletionOutput(0, "", [], "error", error="it broke")], True)
    assert record(asked, failed) == error_record(12, "00000000000000ff", "c", message="it broke", code="engine_error")


def test_an_error_names_its_line():
    made = error_record(12, "00000000000000ff", None, message="no", code="line_too_long")
    assert made["error"] == {"code": "line_too_long", "message": "no", "line": 12}
    assert made["response"] == {"status_code": 413, "request_id": f"req_{NAME}", "body": None}


def test_a_record_is_one_line_however_a_reader_splits_lines():
    text = "a\u2028b\u2029c\x85d\r\n\x0b\x0c\x1c\x1d\x1e\x00é😀"
    made = error_record(1, "0" * 16, text, message=text)
    data = encode_record(made)
    assert data.decode().splitlines() == [data.decode().removesuffix("\n")]
    assert json.loads(data) == made


def test_a_record_holds_no_number_that_json_lacks():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_record({"a": math.nan})


def test_what_was_written_is_known_again():
    assert read_record(encode_record(record(request()))) == Stored(12, "00000000000000ff", False)
    assert read_record(encode_record(error_record(3, "0" * 16, None, message=""))) == Stored(3, "0" * 16, True)


@pytest.mark.parametrize(
    "data", [b"", b"\0\0", b"[]", b"{}", b'{"id": "x", "error": null}', b'{"id": 3}', b"[" * 10**5, b"\xff"]
)
def test_what_is_no_record_is_not_taken_for_one(data):
    assert read_record(data) is None
