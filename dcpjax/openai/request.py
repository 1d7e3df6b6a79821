"""The body of a chat or a completion request -> a `RequestBody` whose options are checked.

Bodies have the options of OpenAI's API and those that vLLM adds to it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dcpjax.api.checks import check_option_names
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.openai.json_text import short_field, short_json
from dcpjax.openai.response_format import BODY_OPTIONS, from_body

Kind = Literal["chat", "completion"]
KIND_OF_URL: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
# OpenAI's defaults; None: up to the model length.
DEFAULT_MAX_TOKENS: dict[Kind, int | None] = {"chat": None, "completion": 16}

SAMPLING_OPTIONS = (  # fields of SamplingParams under the same name
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
IGNORED_OPTIONS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Accepted only at the value that changes nothing.
UNSUPPORTED_OPTIONS: dict[str, Any] = {
    "best_of": 1,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "stream": False,
    "suffix": "",
    "use_beam_search": False,
}
_COMMON = (
    *SAMPLING_OPTIONS,
    *BODY_OPTIONS,
    *IGNORED_OPTIONS,
    *UNSUPPORTED_OPTIONS,
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


class BodyError(ValueError):
    """A request body that cannot be served; the message says why."""


@dataclass(frozen=True, kw_only=True)
class RequestBody:
    """A checked body. `messages` is set for a chat, `prompt` (text or token ids) for a completion."""

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


def read_body(
    kind: Kind, body: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, place: str = "here"
) -> RequestBody:
    """Check a request body. A null is the same as leaving the option out.

    Args:
        defaults: fields of SamplingParams for what the body does not say.
        place: ends "stream must be false ..." in the error for an unsupported option, as "in a batch".

    Raises:
        BodyError: a value of the wrong kind, or two options that contradict each other.
        ValueError: an unknown option, or a sampling option out of its range.
    """
    options = {name: value for name, value in body.items() if value is not None}
    check_option_names(options, OPTIONS[kind])
    _check_unsupported(options, place)
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS[kind], **(defaults or {}), **_sampling(kind, options)}
    read = _chat if kind == "chat" else _completion
    return RequestBody(
        kind=kind,
        sampling=SamplingParams.from_options(sampling),
        priority=_typed(options, "priority", int, "an integer", 0),
        cache_salt=_cache_salt(options),
        **read(options),
    )


def _check_unsupported(options: Mapping[str, Any], place: str) -> None:
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        if options.get(name, neutral) != neutral:
            raise BodyError(
                f"{name} must be {json.dumps(neutral)} {place}, but is {short_json(options[name])}; leave it out"
            )


def _sampling(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the options set."""
    fields = {name: options[name] for name in SAMPLING_OPTIONS if name in options}
    fields |= _max_tokens(options)
    fields |= _chat_logprobs(options) if kind == "chat" else _completion_logprobs(options)
    if "logit_bias" in options:
        fields["logit_bias"] = _logit_bias(options["logit_bias"])
    return fields | _structured_outputs(options)


def _max_tokens(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: options[name] for name in ("max_completion_tokens", "max_tokens") if name in options}
    if len(given) == 2 and given["max_tokens"] != given["max_completion_tokens"]:
        raise BodyError(
            f"max_tokens must equal max_completion_tokens={short_json(given['max_completion_tokens'])}, "
            f"but is {short_json(given['max_tokens'])}; leave one out"
        )
    return {"max_tokens": next(iter(given.values()))} if given else {}


def _chat_logprobs(options: Mapping[str, Any]) -> dict[str, Any]:
    wanted = _typed(options, "logprobs", bool, "true or false", False)
    if "top_logprobs" in options and not wanted:
        raise BodyError("top_logprobs must come with logprobs, but stands alone; add logprobs: true")
    return {"logprobs": _typed(options, "top_logprobs", int, "an integer", 0)} if wanted else {}


def _completion_logprobs(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": _typed(options, "logprobs", int, "an integer", 0)} if "logprobs" in options else {}


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise BodyError(f"logit_bias must be an object of token ids and numbers, but is {short_json(value)}")
    wrong = next((key for key in value if not re.fullmatch(r"\d{1,10}", key, re.ASCII)), None)
    if wrong is not None:
        raise BodyError(f"logit_bias must have token ids as its keys, but has {short_json(wrong)}")
    return {int(key): bias for key, bias in value.items()}


def _structured_outputs(options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = from_body(options)
    if not arguments:
        return {}
    return {"structured_outputs": StructuredOutputsParams(**arguments)}


def _chat(options: Mapping[str, Any]) -> dict[str, Any]:
    messages = options.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError(f"messages must be a list of at least one message, but is {short_field(options, 'messages')}")
    continues = _typed(options, "continue_final_message", bool, "true or false", False)
    if continues and options.get("add_generation_prompt"):
        raise BodyError("add_generation_prompt must be false when continue_final_message is true, but is true")
    return {
        "messages": messages,
        "tools": _tools(options),
        "chat_template_kwargs": _typed(options, "chat_template_kwargs", dict, "an object", {}),
        "add_generation_prompt": _typed(options, "add_generation_prompt", bool, "true or false", not continues),
        "continue_final_message": continues,
    }


def _tools(options: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The tools that the chat template is given. Tool calls are not parsed out of answers, so none can be required."""
    tools = _typed(options, "tools", list, "a list", [])
    choice = options.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise BodyError(f"tool_choice must be 'auto' or 'none', but is {short_json(choice)}; use 'auto'")
    if not all(isinstance(tool, dict) for tool in tools):
        raise BodyError("tools must be a list of objects, but holds something else")
    return tools if tools and choice == "auto" else None


def _completion(options: Mapping[str, Any]) -> dict[str, Any]:
    prompt = _prompt(options)
    echo = _typed(options, "echo", bool, "true or false", False)
    if echo and not isinstance(prompt, str):
        raise BodyError("echo must come with a text, but the prompt is token ids; leave it out")
    if echo and "logprobs" in options:
        raise BodyError("echo must not come with logprobs, but does; use prompt_logprobs instead of echo")
    return {"prompt": prompt, "echo": echo}


def _prompt(options: Mapping[str, Any]) -> str | list[int]:
    """One text or one list of token ids, alone or as the only entry of a list, as OpenAI allows."""
    prompt = options.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BodyError(
                f"prompt must be one prompt, but is a list of {len(prompt)}; give each a request of its own"
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BodyError(f"prompt must be a text or a list of token ids, but is {short_field(options, 'prompt')}")
    return prompt


def _cache_salt(options: Mapping[str, Any]) -> str | None:
    if options.get("cache_salt") == "":
        raise BodyError("cache_salt must be a text of at least one character, but is empty; leave it out")
    return _typed(options, "cache_salt", str, "a text", None)


def _typed(options: Mapping[str, Any], name: str, kind: type, what: str, default: Any) -> Any:
    value = options.get(name, default)
    if name in options and type(value) is not kind:  # exact: True is no integer
        raise BodyError(f"{name} must be {what}, but is {short_json(value)}")
    return value
