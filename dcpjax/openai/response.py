"""A result -> the response body of OpenAI's API: choices, log-probabilities and usage, with vLLM's additions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.openai.request import RequestBody

if TYPE_CHECKING:
    from dcpjax.api.logprobs import Logprob

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON has no number for


def response_body(
    request: RequestBody, output: RequestOutput, *, name: str, model: str, created: int
) -> dict[str, Any]:
    """The body that answers `request`.

    Args:
        name: follows `chatcmpl-` or `cmpl-` in the body's id.
        model: what the body calls the model.
        created: Unix time in seconds.
    """
    make = _chat_body if request.kind == "chat" else _completion_body
    return {**make(request, output, name), "created": created, "model": model, "usage": _usage(output)}


def _chat_body(request: RequestBody, output: RequestOutput, name: str) -> dict[str, Any]:
    choices = [
        {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": _chat_logprobs(request, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    return {"id": f"chatcmpl-{name}", "object": "chat.completion", "choices": choices, **_prompt_logprobs(output)}


def _completion_body(request: RequestBody, output: RequestOutput, name: str) -> dict[str, Any]:
    prefix = str(request.prompt) if request.echo else ""
    choices = [
        {
            "index": completion.index,
            "text": prefix + completion.text,
            "logprobs": _completion_logprobs(request, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **_prompt_logprobs(output),
        }
        for completion in output.outputs
    ]
    return {"id": f"cmpl-{name}", "object": "text_completion", "choices": choices}


def _usage(output: RequestOutput) -> dict[str, Any]:
    prompt, new = len(output.prompt_token_ids), sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _chat_logprobs(request: RequestBody, completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = [
        {
            **_chat_token(token, logprobs[token]),
            "top_logprobs": [_chat_token(*entry) for entry in _most_likely(request, logprobs)],
        }
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: int, entry: "Logprob") -> dict[str, Any]:
    text, data = _token_text(token, entry), entry.token_bytes
    spelled = text.encode("utf-8", "replace") if data is None else data
    return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(spelled)}


def _completion_logprobs(request: RequestBody, completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
    sampled = [(token, logprobs[token]) for token, logprobs in pairs]
    return {
        "tokens": [_token_text(*entry) for entry in sampled],
        "token_logprobs": [_finite(entry.logprob) for _, entry in sampled],
        "top_logprobs": [
            {_token_text(token, entry): _finite(entry.logprob) for token, entry in _most_likely(request, logprobs)}
            for _, logprobs in pairs
        ],
        "text_offset": _offsets(sampled),
    }


def _offsets(sampled: "Sequence[tuple[int, Logprob]]") -> list[int]:
    """Characters of the text before each token. A token that adds no bytes to the text is not in it."""
    offset, offsets = 0, []
    for token, entry in sampled:
        offsets.append(offset)
        offset += 0 if entry.token_bytes == b"" else len(_token_text(token, entry))
    return offsets


def _most_likely(request: RequestBody, logprobs: "Mapping[int, Logprob]") -> "list[tuple[int, Logprob]]":
    """As many of the most likely tokens as the request asks for; -1 asks for the whole vocabulary.

    `logprobs` also holds the token that was sampled, which may be one more.
    """
    count = request.sampling.logprobs or 0
    ranked = sorted(logprobs.items(), key=lambda item: -_finite(item[1].logprob))
    return ranked if count < 0 else ranked[:count]


def _prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, if they were asked for: for each prompt token a mapping from token id."""
    if output.prompt_logprobs is None:
        return {}
    listed = [None if logprobs is None else _by_token_id(logprobs) for logprobs in output.prompt_logprobs]
    return {"prompt_logprobs": listed}


def _by_token_id(logprobs: "Mapping[int, Logprob]") -> dict[str, Any]:
    return {
        str(token): {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in logprobs.items()
    }


def _token_text(token: int, entry: "Logprob") -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _finite(logprob: float) -> float:
    """At least LEAST_LOGPROB, which also replaces NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
