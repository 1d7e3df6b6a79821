"""Results and errors -> lines of the output, in the form of OpenAI's batch files, and back.

    {"id": "batch_req_<line>_<fingerprint>", "custom_id": ..., "response": {...}, "error": null}

The id tells a later run which line of the input a record answers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcpjax.api.outputs import RequestOutput
from dcpjax.jobs.batch_request import BatchRequest
from dcpjax.jobs.lines import FINGERPRINT_BYTES
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.response import UNPARSED, error_body, response_body

RECORD_START = b'{"id": "batch_req_'  # every record begins with it
_ID = re.compile(rf"batch_req_([1-9]\d{{0,9}})_([0-9a-f]{{{2 * FINGERPRINT_BYTES}}})")
STATUS_CODES = {"line_too_long": 413, "engine_error": 500}  # by error code; all others: 400
# Legal in JSON strings, but some readers take them for the end of a line.
_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


class RecordSummary(NamedTuple):
    """What a later run needs of a record: the line it answers, that line's fingerprint, whether it is an error."""

    line: int
    fingerprint: str
    is_error: bool


def result_record(
    request: BatchRequest,
    outputs: Sequence[RequestOutput],
    *,
    model: str,
    created: int,
    formats: MessageFormats = UNPARSED,
) -> dict[str, Any]:
    """The record of a request that was run, from the result of each of its prompts; an error if a completion failed."""
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None:
        return error_record(request.line, request.fingerprint, request.custom_id, message=failed, code="engine_error")
    name = f"{request.line}_{request.fingerprint}"
    body = response_body(request.body, outputs, name=name, model=model, created=created, formats=formats)
    return {
        "id": f"batch_req_{name}",
        "custom_id": request.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{name}", "body": body},
        "error": None,
    }


def error_record(
    line: int, fingerprint: str, custom_id: str | None, *, message: str, code: str = "invalid_request"
) -> dict[str, Any]:
    """`error` also names the line; the body is the one that OpenAI's API answers such a request with."""
    name, status = f"{line}_{fingerprint}", STATUS_CODES.get(code, 400)
    body = error_body(message, code=code, status=status)
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": {"code": code, "message": message, "line": line},
    }


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8, in which other characters that some readers take for the end of a line are escaped."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    return text.encode("utf-8", "replace") + b"\n"


def read_record(data: bytes) -> RecordSummary | None:
    """The summary of what `encode_record` wrote, or None for anything else."""
    try:
        record = json.loads(data)
        found = _ID.fullmatch(record["id"])
        return found and RecordSummary(int(found[1]), found[2], record["error"] is not None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
