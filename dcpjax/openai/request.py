"""One line of the input -> a request that has been checked, or an error that says what is wrong with the line.

A line is OpenAI's batch record, or a plain object with `prompt` or `messages` and options beside it. Knows the
names of OpenAI and vLLM; knows nothing about files, tokens or the engine.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NoReturn

from dcpjax.api.checks import check_option_names
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.jobs.lines import Line
from dcpjax.openai.response_format import BODY_OPTIONS, from_body

Kind = Literal["chat", "completion"]
KINDS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
MAX_TOKENS: dict[Kind, int | None] = {"chat": None, "completion": 16}  # OpenAI's; None: up to the model length

# Options of a body, by what becomes of them.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)
IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
NEUTRAL: dict[str, Any] = {  # legal at the value that changes nothing
    "best_of": 1,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "stream": False,
    "suffix": "",
    "use_beam_search": False,
}
_COMMON = (
    *SAMPLING,
    *BODY_OPTIONS,
    *IGNORED,
    *NEUTRAL,
    "max_tokens",
    "logit_bias",
    "logprobs",
    "cache_salt",
    "priority",
)
OPTIONS: dict[Kind, tuple[str, ...]] = {
    "chat": (
        *_COMMON,
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    ),
    "completion": (*_COMMON, "prompt", "echo"),
}
_RECORD_KEYS = ("custom_id", "method", "url", "body")


class RecordError(ValueError):
    """What is wrong with a line; `code` is for programs."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A checked line. `messages` is set for a chat, `prompt` (text or token ids) for a completion."""

    line: int
    fingerprint: str
    custom_id: str | None
    kind: Kind
    sampling: SamplingParams
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    cache_salt: str | None = None
    echo: bool = False


def parse_record(line: Line, *, max_line_bytes: int) -> dict[str, Any]:
    """The JSON object of a line. Raises RecordError for anything else, RecursionError if it is nested too deep."""
    if line.data is None:
        raise RecordError(
            f"a line must hold at most {max_line_bytes:,} bytes, but holds {line.size:,}; "
            "shorten it or raise max_line_bytes",
            "line_too_long",
        )
    try:
        record = json.loads(line.data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RecordError(
            f"a line must be UTF-8, but byte {error.start + 1} is {line.data[error.start]:#04x}", "invalid_json"
        ) from None
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")  # some of Python's messages end so
        raise RecordError(
            f"a line must be a JSON object, but is not: {reason} at column {error.colno}", "invalid_json"
        ) from None
    except RecordError:
        raise
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise RecordError(f"a line must be JSON that can be read, but is not: {error}", "invalid_json") from None
    if not isinstance(record, dict):
        raise RecordError(f"a line must be a JSON object, but is {_brief(record)}", "invalid_json")
    return record


def read_custom_id(record: Mapping[str, Any]) -> str | None:
    """`custom_id`, or in a plain line also `id`; an integer becomes its digits."""
    plain = _is_plain(record)
    name = "id" if plain and record.get("custom_id") is None else "custom_id"
    custom_id = record.get(name)
    if isinstance(custom_id, int) and not isinstance(custom_id, bool) and plain:
        return str(custom_id)
    if custom_id is None and plain:
        return None
    if not isinstance(custom_id, str):
        raise RecordError(f"{name} must be a string, but is {_shown(record, name)}")
    _check_unicode(custom_id)
    return custom_id


def read_request(
    record: Mapping[str, Any], line: Line, *, custom_id: str | None, defaults: Mapping[str, Any], seed: int = 0
) -> BatchRequest:
    """Check a record. `defaults` are fields of SamplingParams that hold where the record does not say.

    Random draws of a record without a seed follow from `seed` and the line alone: a job that was interrupted
    gives the same results as one that was not.

    Raises:
        ValueError: an option that is unknown or out of its range.
    """
    if line.data is not None and b"\\ud" in line.data.lower():  # only an escape can be a lone surrogate
        _check_unicode(record)
    kind, body = _kind_and_body(record)
    options = {name: value for name, value in body.items() if value is not None}
    check_option_names(options, OPTIONS[kind])
    _check_neutral(options)
    own = {"seed": _line_seed(seed, line), **_sampling(kind, options)}
    base = {"max_tokens": MAX_TOKENS[kind], **defaults}
    read = _chat if kind == "chat" else _completion
    return BatchRequest(
        line=line.number,
        fingerprint=line.fingerprint,
        custom_id=custom_id,
        kind=kind,
        sampling=SamplingParams.from_options({**base, **own}),
        priority=_typed(options, "priority", int, "an integer", 0),
        cache_salt=_cache_salt(options),
        **read(options),
    )


def _is_plain(record: Mapping[str, Any]) -> bool:
    return not any(name in record for name in ("body", "url", "method"))


def _kind_and_body(record: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    if _is_plain(record):
        body = {name: value for name, value in record.items() if name not in ("custom_id", "id")}
        return _plain_kind(body), body
    for name in record:
        if name not in _RECORD_KEYS:
            near = difflib.get_close_matches(name, _RECORD_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"put options into body (keys: {', '.join(_RECORD_KEYS)})"
            raise RecordError(f"unknown key {name!r}; {hint}")
    if record.get("method", "POST") != "POST":
        raise RecordError(f"method must be 'POST', but is {_brief(record['method'])}")
    url, body = record.get("url"), record.get("body")
    if url not in list(KINDS):
        near = [*difflib.get_close_matches(str(url), KINDS, n=1, cutoff=0.3), *KINDS][0]
        raise RecordError(f"url must be one of {', '.join(KINDS)}, but is {_shown(record, 'url')}; use {near}")
    if not isinstance(body, dict):
        raise RecordError(f"body must be an object, but is {_shown(record, 'body')}")
    return KINDS[url], body


def _plain_kind(body: Mapping[str, Any]) -> Kind:
    given = [name for name in ("messages", "prompt") if body.get(name) is not None]
    if len(given) != 1:
        has = "both" if given else f"neither ({', '.join(map(repr, body))})" if body else "neither"
        raise RecordError(
            f"a line must have prompt or messages, or custom_id, method, url and body, but has {has[:200]}"
        )
    return "chat" if given == ["messages"] else "completion"


def _check_neutral(options: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        if options.get(name, neutral) != neutral:
            raise RecordError(
                f"{name} must be {json.dumps(neutral)} in a batch, but is {_brief(options[name])}; leave it out"
            )


def _sampling(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams that the options ask for."""
    made = {name: options[name] for name in SAMPLING if name in options}
    made |= _max_tokens(options)
    made |= _chat_logprobs(options) if kind == "chat" else _completion_logprobs(options)
    if "logit_bias" in options:
        made["logit_bias"] = _logit_bias(options["logit_bias"])
    return made | _structure(options)


def _max_tokens(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: options[name] for name in ("max_completion_tokens", "max_tokens") if name in options}
    if len(given) == 2 and given["max_tokens"] != given["max_completion_tokens"]:
        raise RecordError(
            f"max_tokens must equal max_completion_tokens={_brief(given['max_completion_tokens'])}, "
            f"but is {_brief(given['max_tokens'])}; leave one out"
        )
    return {"max_tokens": next(iter(given.values()))} if given else {}


def _chat_logprobs(options: Mapping[str, Any]) -> dict[str, Any]:
    wanted = _typed(options, "logprobs", bool, "true or false", False)
    if "top_logprobs" in options and not wanted:
        raise RecordError("top_logprobs must come with logprobs, but stands alone; add logprobs: true")
    return {"logprobs": _typed(options, "top_logprobs", int, "an integer", 0)} if wanted else {}


def _completion_logprobs(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": _typed(options, "logprobs", int, "an integer", 0)} if "logprobs" in options else {}


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"logit_bias must be an object of token ids and numbers, but is {_brief(value)}")
    wrong = next((key for key in value if not re.fullmatch(r"\d{1,10}", key, re.ASCII)), None)
    if wrong is not None:
        raise RecordError(f"logit_bias must have token ids as its keys, but has {_brief(wrong)}")
    return {int(key): bias for key, bias in value.items()}


def _structure(options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = from_body(options)
    if not arguments:
        return {}
    return {"structured_outputs": StructuredOutputsParams(**arguments)}


def _chat(options: Mapping[str, Any]) -> dict[str, Any]:
    messages = options.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RecordError(f"messages must be a list of at least one message, but is {_shown(options, 'messages')}")
    continues = _typed(options, "continue_final_message", bool, "true or false", False)
    if continues and options.get("add_generation_prompt"):
        raise RecordError("add_generation_prompt must be false when continue_final_message is true, but is true")
    return {
        "messages": messages,
        "tools": _tools(options),
        "chat_template_kwargs": _typed(options, "chat_template_kwargs", dict, "an object", {}),
        "add_generation_prompt": _typed(options, "add_generation_prompt", bool, "true or false", not continues),
        "continue_final_message": continues,
    }


def _tools(options: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """What the template may show. A call in the answer stays text, so none can be forced."""
    tools = _typed(options, "tools", list, "a list", [])
    choice = options.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RecordError(f"tool_choice must be 'auto' or 'none', but is {_brief(choice)}; use 'auto'")
    if not all(isinstance(tool, dict) for tool in tools):
        raise RecordError("tools must be a list of objects, but holds something else")
    return tools if tools and choice == "auto" else None


def _completion(options: Mapping[str, Any]) -> dict[str, Any]:
    prompt = _prompt(options)
    echo = _typed(options, "echo", bool, "true or false", False)
    if echo and not isinstance(prompt, str):
        raise RecordError("echo must come with a text, but the prompt is token ids; leave it out")
    if echo and "logprobs" in options:
        raise RecordError("echo must not come with logprobs, but does; use prompt_logprobs instead of echo")
    return {"prompt": prompt, "echo": echo}


def _prompt(options: Mapping[str, Any]) -> str | list[int]:
    """One text or one list of token ids; either may stand alone in a list, as OpenAI's may."""
    prompt = options.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RecordError(f"prompt must be one prompt, but is a list of {len(prompt)}; give each a line")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise RecordError(f"prompt must be a text or a list of token ids, but is {_shown(options, 'prompt')}")
    return prompt


def _cache_salt(options: Mapping[str, Any]) -> str | None:
    if options.get("cache_salt") == "":
        raise RecordError("cache_salt must be a text of at least one character, but is empty; leave it out")
    return _typed(options, "cache_salt", str, "a text", None)


def _typed(options: Mapping[str, Any], name: str, kind: type, what: str, default: Any) -> Any:
    value = options.get(name, default)
    if name in options and type(value) is not kind:  # a bool is no integer here
        raise RecordError(f"{name} must be {what}, but is {_brief(value)}")
    return value


def _line_seed(seed: int, line: Line) -> int:
    digest = blake2b(f"{seed} {line.number} {line.fingerprint}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # SamplingParams takes 63 bits


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            f"a line must be valid Unicode, but holds the lone surrogate {error.object[error.start]!a}; remove it"
        ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"a line must be JSON, but holds {name}, which JSON has no number for", "invalid_json")


def _shown(record: Mapping[str, Any], name: str) -> str:
    return _brief(record[name]) if name in record else "missing"


def _brief(value: Any) -> str:
    """JSON, as it stands in the line, cut short."""
    text = json.dumps(value) if not isinstance(value, list | dict) else _brief_collection(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _brief_collection(value: list[Any] | dict[str, Any]) -> str:
    kind = "a list" if isinstance(value, list) else "an object"
    return f"{kind} of {len(value)}" if value else f"an empty {kind.split()[1]}"
