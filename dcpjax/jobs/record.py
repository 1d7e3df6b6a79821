"""Results and errors -> lines of the output, in the form of OpenAI's batch files.

    {"id": "batch_req_<line>_<fingerprint>", "custom_id": ..., "response": {...}, "error": null}

The id is how a later run knows which line of the input a record answers. Plain data; knows nothing about files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.jobs.lines import FINGERPRINT_BYTES
from dcpjax.openai.request import BatchRequest

if TYPE_CHECKING:
    from dcpjax.api.logprobs import Logprob

BEGINNING = b'{"id": "batch_req_'  # of every record
_ID = re.compile(rf"batch_req_([1-9]\d{{0,9}})_([0-9a-f]{{{2 * FINGERPRINT_BYTES}}})")
LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON has no number for
STATUS = {"line_too_long": 413, "engine_error": 500}  # others: 400
# Legal in JSON strings, but some readers take them for the end of a line.
_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


class Stored(NamedTuple):
    """What a record of the output says about itself."""

    line: int
    fingerprint: str
    is_error: bool


def result_record(request: BatchRequest, output: RequestOutput, *, model: str, created: int) -> dict[str, Any]:
    """The record of a request that was run; an error if any of its completions is one."""
    if output.error is not None:
        return error_record(
            request.line, request.fingerprint, request.custom_id, message=output.error, code="engine_error"
        )
    name = f"{request.line}_{request.fingerprint}"
    make = _chat_body if request.kind == "chat" else _completion_body
    body = {**make(request, output, name), "created": created, "model": model, "usage": _usage(output)}
    return {
        "id": f"batch_req_{name}",
        "custom_id": request.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{name}", "body": body},
        "error": None,
    }


def error_record(
    line: int, fingerprint: str, custom_id: str | None, *, message: str, code: str = "invalid_request"
) -> dict[str, Any]:
    name = f"{line}_{fingerprint}"
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": STATUS.get(code, 400), "request_id": f"req_{name}", "body": None},
        "error": {"code": code, "message": message, "line": line},
    }


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8, whichever characters a reader takes for the end of a line."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    return text.encode("utf-8", "replace") + b"\n"


def read_record(data: bytes) -> Stored | None:
    """What `encode_record` wrote, or None for anything else."""
    try:
        record = json.loads(data)
        found = _ID.fullmatch(record["id"])
        return found and Stored(int(found[1]), found[2], record["error"] is not None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _chat_body(request: BatchRequest, output: RequestOutput, name: str) -> dict[str, Any]:
    choices = [
        {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": _chat_logprobs(request, one),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        for one in output.outputs
    ]
    return {"id": f"chatcmpl-{name}", "object": "chat.completion", "choices": choices, **_prompt_logprobs(output)}


def _completion_body(request: BatchRequest, output: RequestOutput, name: str) -> dict[str, Any]:
    prefix = str(request.prompt) if request.echo else ""
    choices = [
        {
            "index": one.index,
            "text": prefix + one.text,
            "logprobs": _completion_logprobs(request, one),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            **_prompt_logprobs(output),
        }
        for one in output.outputs
    ]
    return {"id": f"cmpl-{name}", "object": "text_completion", "choices": choices}


def _usage(output: RequestOutput) -> dict[str, Any]:
    prompt, new = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _chat_logprobs(request: BatchRequest, output: CompletionOutput) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None
    content = [
        {**_chat_token(token, found[token]), "top_logprobs": [_chat_token(*one) for one in _top(request, found)]}
        for token, found in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: int, found: "Logprob") -> dict[str, Any]:
    text = _text(token, found)
    return {"token": text, "logprob": _finite(found.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _completion_logprobs(request: BatchRequest, output: CompletionOutput) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None
    pairs = list(zip(output.token_ids, output.logprobs, strict=True))
    tokens = [_text(token, found[token]) for token, found in pairs]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(found[token].logprob) for token, found in pairs],
        "top_logprobs": [
            {_text(token, one): _finite(one.logprob) for token, one in _top(request, found)} for _, found in pairs
        ],
        "text_offset": _offsets(tokens),
    }


def _offsets(tokens: Sequence[str]) -> list[int]:
    """Characters before each token."""
    offset, offsets = 0, []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return offsets


def _top(request: BatchRequest, found: "Mapping[int, Logprob]") -> "list[tuple[int, Logprob]]":
    """As many as were asked for: the token that was chosen is there besides, when it is none of them."""
    wanted = request.sampling.logprobs or 0
    ranked = sorted(found.items(), key=lambda one: -_finite(one[1].logprob))
    return ranked if wanted < 0 else ranked[:wanted]  # -1: the whole vocabulary


def _prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [None if one is None else _by_token_id(one) for one in output.prompt_logprobs]}


def _by_token_id(found: "Mapping[int, Logprob]") -> dict[str, Any]:
    """vLLM's form."""
    return {
        str(token): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in found.items()
    }


def _text(token: int, found: "Logprob") -> str:
    return f"token_id:{token}" if found.decoded_token is None else found.decoded_token


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for what is no number
