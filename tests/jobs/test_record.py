import json
import math

import pytest
from batch_mock import answers, chat_completion

from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.jobs.batch_request import BatchRequest
from dcpjax.jobs.record import RecordSummary, encode_record, error_record, read_record, result_record
from dcpjax.openai.request import RequestBody

NAME = "12_00000000000000ff"


def request() -> BatchRequest:
    messages = [{"role": "user", "content": "abcd"}]
    body = RequestBody(kind="chat", sampling=SamplingParams(), messages=messages)
    return BatchRequest(line=12, fingerprint="00000000000000ff", custom_id="c", body=body)


def record(asked: BatchRequest, output: RequestOutput | None = None) -> dict:
    return result_record(asked, [output] if output else answers(asked.body), model="m", created=5)


def test_a_chat_is_answered_with_openais_chat_completion():
    assert record(request()) == {
        "id": f"batch_req_{NAME}",
        "custom_id": "c",
        "response": {
            "status_code": 200,
            "request_id": f"req_{NAME}",
            "body": chat_completion(NAME),
        },
        "error": None,
    }


def test_a_request_that_failed_is_an_error_record():
    asked = request()
    failed = RequestOutput("0", None, [1], [CompletionOutput(0, "", [], "error", error="it broke")], True)
    assert record(asked, failed) == error_record(12, "00000000000000ff", "c", message="it broke", code="engine_error")


def test_an_error_names_its_line():
    made = error_record(12, "00000000000000ff", None, message="no", code="line_too_long")
    assert made["error"] == {"code": "line_too_long", "message": "no", "line": 12}
    body = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "line_too_long"}}
    assert made["response"] == {"status_code": 413, "request_id": f"req_{NAME}", "body": body}


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
    assert read_record(encode_record(record(request()))) == RecordSummary(12, "00000000000000ff", False)
    assert read_record(encode_record(error_record(3, "0" * 16, None, message=""))) == RecordSummary(3, "0" * 16, True)


@pytest.mark.parametrize(
    "data", [b"", b"\0\0", b"[]", b"{}", b'{"id": "x", "error": null}', b'{"id": 3}', b"[" * 10**5, b"\xff"]
)
def test_what_is_no_record_is_not_taken_for_one(data):
    assert read_record(data) is None
