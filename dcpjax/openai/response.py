"""Results -> the response body of OpenAI's API: choices, log-probabilities and usage, with vLLM's additions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.api.outputs import CompletionOutput, RequestOutput
from dcpjax.openai.parsers.deltas import message_of
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody
from dcpjax.openai.tools import DemandedCall

if TYPE_CHECKING:
    from dcpjax.api.logprobs import Logprob

UNPARSED = MessageFormats()
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON has no number for


def response_body(
    request: RequestBody,
    outputs: Sequence[RequestOutput],
    *,
    name: str,
    model: str,
    created: int,
    formats: MessageFormats = UNPARSED,
) -> dict[str, Any]:
    """The body that answers `request`.

    Args:
        outputs: one for each of the request's prompts; one for a chat.
        name: follows `chatcmpl-` or `cmpl-` in the body's id.
        model: what the body calls the model.
        created: Unix time in seconds.
        formats: how the model writes tool calls and reasoning; by default they stay in the text.
    """
    if request.kind == "chat":
        body = _chat_body(request, outputs[0], name, formats)
    else:
        body = _completion_body(request, outputs, name)
    return {**body, "created": created, "model": model, "usage": usage(request, outputs)}


def error_body(message: str, *, code: str, status: int) -> dict[str, Any]:
    """The body that answers a request which failed with this HTTP status."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _chat_body(request: RequestBody, output: RequestOutput, name: str, formats: MessageFormats) -> dict[str, Any]:
    choices = [
        {
            "index": completion.index,
            **_answer(request, output, completion, f"call_{name}_{completion.index}", formats),
            "logprobs": chat_logprobs(request, completion),
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    return {"id": f"chatcmpl-{name}", "object": "chat.completion", "choices": choices, **prompt_logprobs(output)}


def _answer(
    request: RequestBody, output: RequestOutput, completion: CompletionOutput, call_ids: str, formats: MessageFormats
) -> dict[str, Any]:
    """The message and why it ended. As with OpenAI, a call of a named function ends with "stop"."""
    if request.demanded_call is not None:
        message = _demanded_message(request.demanded_call, completion.text, call_ids)
    else:
        parser = formats.parser(request, output.prompt_token_ids, call_ids=call_ids)
        message = message_of([*parser.feed(completion.text), *parser.finish()])
    calls = "tool_calls" in message and not (request.demanded_call and request.demanded_call.name)
    reason = completion.finish_reason
    return {"message": message, "finish_reason": "tool_calls" if calls and reason == "stop" else reason}


def _demanded_message(demanded: DemandedCall, text: str, call_ids: str) -> dict[str, Any]:
    calls = demanded.read(text, call_ids)
    message = {"role": "assistant", "content": text, "refusal": None}
    return message if calls is None else {**message, "content": None, "tool_calls": calls}


def _completion_body(request: RequestBody, outputs: Sequence[RequestOutput], name: str) -> dict[str, Any]:
    """Every prompt has n choices, which follow those of the prompt before."""
    choices = [
        {
            "index": place * request.sampling.n + completion.index,
            "text": prefix + (completion.text if request.generates else ""),
            "logprobs": completion_logprobs(request, output, completion, prefix)[0],
            "finish_reason": completion.finish_reason if request.generates else "length",
            "stop_reason": completion.stop_reason if request.generates else None,
            **({} if request.echo and request.sampling.logprobs is not None else prompt_logprobs(output)),
        }
        for place, (output, prefix) in enumerate(zip(outputs, prefixes(request, outputs), strict=True))
        for completion in output.outputs
    ]
    return {"id": f"cmpl-{name}", "object": "text_completion", "choices": choices}


def prefixes(request: RequestBody, outputs: Sequence[RequestOutput]) -> Iterator[str]:
    """What comes before the text of each prompt's completions: the prompt itself, if it is to be echoed."""
    for prompt, output in zip(request.prompts, outputs, strict=True):
        text = prompt if isinstance(prompt, str) else output.prompt or ""
        yield text if request.echo else ""


def usage(request: RequestBody, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens so far. A prompt counts once, however many completions it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    new = new if request.generates else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def chat_logprobs(request: RequestBody, completion: CompletionOutput) -> dict[str, Any] | None:
    """The `logprobs` of a chat's choice, or of a piece of one; None if they were not asked for."""
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


def completion_logprobs(
    request: RequestBody, output: RequestOutput, completion: CompletionOutput, prefix: str, start: int = 0
) -> tuple[dict[str, Any] | None, int]:
    """Of the new tokens, after those of the prompt if it is echoed; the first of a prompt has none.

    Returns them, None if they were not asked for, and how many characters of text end with the last of their tokens if
    `start` come before the first.
    """
    if completion.logprobs is None:
        return None, start
    pairs: list[tuple[int, Mapping[int, Logprob] | None]] = []
    if request.echo:
        pairs += zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    if request.generates:
        pairs += zip(completion.token_ids, completion.logprobs, strict=True)
    entries = [None if logprobs is None else logprobs[token] for token, logprobs in pairs]
    tokens = [_token_text(token, entry) for (token, _), entry in zip(pairs, entries, strict=True)]
    if request.echo:
        tokens[0] = _first_text(prefix, tokens[: len(output.prompt_token_ids)])
    *offsets, end = _offsets(tokens, entries, start)
    made = {
        "tokens": tokens,
        "token_logprobs": [logprobs and _finite(logprobs[token].logprob) for token, logprobs in pairs],
        "top_logprobs": [logprobs and _top_logprobs(request, logprobs) for _, logprobs in pairs],
        "text_offset": offsets,
    }
    return made, end


def _top_logprobs(request: RequestBody, logprobs: "Mapping[int, Logprob]") -> dict[str, float]:
    return {_token_text(token, entry): _finite(entry.logprob) for token, entry in _most_likely(request, logprobs)}


def _first_text(prompt: str, tokens: Sequence[str]) -> str:
    """The text of a prompt's first token: what the others leave of the prompt, which may be nothing."""
    others = "".join(tokens[1:])
    return prompt.removesuffix(others) if prompt.endswith(others) else tokens[0]


def _offsets(tokens: Sequence[str], entries: "Sequence[Logprob | None]", start: int) -> list[int]:
    """Characters of the text before each token and after the last. A token that adds no bytes to it is not in it."""
    offsets = [start]
    for token, entry in zip(tokens, entries, strict=True):
        offsets.append(offsets[-1] + (0 if entry is not None and entry.token_bytes == b"" else len(token)))
    return offsets


def _most_likely(request: RequestBody, logprobs: "Mapping[int, Logprob]") -> "list[tuple[int, Logprob]]":
    """As many of the most likely tokens as the request asks for, or those it names; -1 asks for the whole vocabulary.

    `logprobs` also holds the token that was sampled, which may be one more.
    """
    named = request.sampling.logprob_token_ids
    if named is not None:
        return [(token, logprobs[token]) for token in named if token in logprobs]
    count = request.sampling.logprobs or 0
    ranked = sorted(logprobs.items(), key=lambda item: -_finite(item[1].logprob))
    return ranked if count < 0 else ranked[:count]


def prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
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


def _token_text(token: int, entry: "Logprob | None") -> str:
    return f"token_id:{token}" if entry is None or entry.decoded_token is None else entry.decoded_token


def _finite(logprob: float) -> float:
    """At least LEAST_LOGPROB, which also replaces NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
