"""The body of a chat or a completion request -> a `RequestBody` whose options are checked.

Bodies have the options of OpenAI's API and those that vLLM adds to it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dcpjax.api.checks import check_option_names
from dcpjax.api.sampling_params import MAX_N, SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.openai.json_text import short_field, short_json
from dcpjax.openai.response_format import BODY_OPTIONS, from_body
from dcpjax.openai.tools import DemandedCall, read_tools

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
    "logprob_token_ids",
    "truncate_prompt_tokens",
)
IGNORED_OPTIONS = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
)
# Variables of the chat template under the same name, which templates of models that know them read.
TEMPLATE_OPTIONS = {
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),
    "verbosity": ("low", "medium", "high"),
}
MAX_PROMPTS = 2048
# Accepted only at the value that changes nothing.
UNSUPPORTED_OPTIONS: dict[str, Any] = {
    "best_of": 1,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
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
    "stream",
    "stream_options",
    "spaces_between_special_tokens",
)
OPTIONS: dict[Kind, tuple[str, ...]] = {
    "chat": (
        *_COMMON,
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        *TEMPLATE_OPTIONS,
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
    """A checked body. `messages` is set for a chat, `prompt` for a completion: a text, token ids or a list of these."""

    kind: Kind
    sampling: SamplingParams
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    demanded_call: DemandedCall | None = None
    parallel_tool_calls: bool = True  # False: the answer has at most one call
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    cache_salt: str | None = None
    echo: bool = False
    generates: bool = True  # False for max_tokens=0: the one token that is sampled is not shown
    stream: bool = False
    include_usage: bool = False  # a stream ends with a chunk that tells the usage
    continuous_usage: bool = False  # every chunk of a stream tells the usage so far

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """The prompts of a completion."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


def read_body(
    kind: Kind,
    body: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    place: str = "here",
    may_stream: bool = False,
) -> RequestBody:
    """Check a request body. A null is the same as leaving the option out.

    Args:
        defaults: fields of SamplingParams for what the body does not say.
        place: ends "suffix must be empty ..." in the error for an unsupported option, as "in a batch".
        may_stream: whether `stream` may be true.

    Raises:
        BodyError: a value of the wrong kind, or two options that contradict each other.
        ValueError: an unknown option, or a sampling option out of its range.
    """
    options = {name: value for name, value in body.items() if value is not None}
    check_option_names(options, OPTIONS[kind])
    _check_unsupported(options, place)
    _typed(options, "spaces_between_special_tokens", bool, "true or false", True)  # joined as decoding all of them does
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS[kind], **(defaults or {}), **_sampling(kind, options)}
    read = _chat(options, sampling) if kind == "chat" else _completion(options, sampling)
    made = RequestBody(
        kind=kind,
        sampling=SamplingParams.from_options(sampling),
        priority=_typed(options, "priority", int, "an integer", 0),
        cache_salt=_cache_salt(options),
        **_stream(options, place, may_stream),
        **read,
    )
    _check_completions(made)
    return made


def _check_completions(body: RequestBody) -> None:
    prompts, n = len(body.prompts), body.sampling.n
    if prompts * n > MAX_N:
        raise BodyError(
            f"prompt must ask for at most {MAX_N:,} completions, but asks for {prompts:,} times n={n:,}; "
            "use several requests"
        )


def _check_unsupported(options: Mapping[str, Any], place: str) -> None:
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        if options.get(name, neutral) != neutral:
            raise BodyError(
                f"{name} must be {json.dumps(neutral)} {place}, but is {short_json(options[name])}; leave it out"
            )


def _stream(options: Mapping[str, Any], place: str, may_stream: bool) -> dict[str, bool]:
    """How the answer is streamed. Without a stream its options change nothing: answers always tell their usage."""
    if options.get("stream", False) and not may_stream:
        raise BodyError(f"stream must be false {place}, but is {short_json(options['stream'])}; leave it out")
    given = _typed(options, "stream_options", dict, "an object", {})
    if not all(isinstance(value, bool | None) for value in given.values()):
        raise BodyError("stream_options must hold true or false, but holds something else; leave it out")
    stream = _typed(options, "stream", bool, "true or false", False)
    return {
        "stream": stream,
        "include_usage": stream and bool(given.get("include_usage")),
        "continuous_usage": stream and bool(given.get("continuous_usage_stats")),
    }


def _sampling(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the options set."""
    fields = {name: options[name] for name in SAMPLING_OPTIONS if name in options}
    fields |= _max_tokens(options)
    fields |= _chat_logprobs(options) if kind == "chat" else _completion_logprobs(options)
    if fields.get("logprob_token_ids") is not None and not fields.get("logprobs"):
        fields["logprobs"] = None  # also where the defaults ask for some
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


def _chat(options: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat; a demanded tool call is added to `sampling` as the structure of the answer."""
    messages = options.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError(f"messages must be a list of at least one message, but is {short_field(options, 'messages')}")
    continues = _typed(options, "continue_final_message", bool, "true or false", False)
    if continues and options.get("add_generation_prompt"):
        raise BodyError("add_generation_prompt must be false when continue_final_message is true, but is true")
    tools, call, several = read_tools(options)
    if call is not None:
        _demand(call, sampling)
    kwargs = _typed(options, "chat_template_kwargs", dict, "an object", {})
    return {
        "messages": messages,
        "tools": tools,
        "demanded_call": call,
        "parallel_tool_calls": several,
        "chat_template_kwargs": {**_template_variables(options), **kwargs},
        "add_generation_prompt": _typed(options, "add_generation_prompt", bool, "true or false", not continues),
        "continue_final_message": continues,
    }


def _demand(call: DemandedCall, sampling: dict[str, Any]) -> None:
    if "structured_outputs" in sampling:
        raise BodyError(
            "tool_choice must be 'auto' or 'none' beside a structure such as response_format, but demands a call; "
            "leave one out"
        )
    sampling["structured_outputs"] = StructuredOutputsParams(json=call.schema())


def _template_variables(options: Mapping[str, Any]) -> dict[str, str]:
    for name, values in TEMPLATE_OPTIONS.items():
        if options.get(name, values[0]) not in values:
            raise BodyError(f"{name} must be one of {', '.join(values)}, but is {short_json(options[name])}")
    return {name: options[name] for name in TEMPLATE_OPTIONS if name in options}


def _completion(options: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a completion; what `echo` and `max_tokens` 0 need is added to `sampling`."""
    echo = _typed(options, "echo", bool, "true or false", False)
    if echo and sampling.get("logprobs") is not None:
        sampling.setdefault("prompt_logprobs", sampling["logprobs"])
    if echo and "logprob_token_ids" in sampling:
        raise BodyError("echo must not come with logprob_token_ids, but does; use logprobs")
    generates = sampling["max_tokens"] != 0 or isinstance(sampling["max_tokens"], bool)
    if not generates:
        sampling |= {"max_tokens": 1, "temperature": 0}
    return {"prompt": _prompt(options), "echo": echo, "generates": generates}


def _prompt(options: Mapping[str, Any]) -> Any:
    """One prompt, or a list of at least two."""
    prompt = options.get("prompt")
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return _single_prompt(prompt, short_field(options, "prompt"))
    if len(prompt) > MAX_PROMPTS:
        raise BodyError(
            f"prompt must be at most {MAX_PROMPTS:,} prompts, but is a list of {len(prompt):,}; "
            "give others a request of their own"
        )
    prompts = [_single_prompt(one, short_json(one)) for one in prompt]
    return prompts if len(prompts) > 1 else prompts[0]


def _single_prompt(prompt: Any, shown: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BodyError(f"prompt must be a text or a list of token ids, but is {shown}")
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
