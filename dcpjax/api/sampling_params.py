"""Options of one request: how tokens are sampled and when generation ends."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from numbers import Integral, Real
from typing import Any, TypeVar

from dcpjax.api.bitmask import pack
from dcpjax.api.checks import (
    LARGEST_FLOAT32,
    LEAST_FLOAT32,
    check_bool,
    check_count,
    check_integer,
    check_number,
    check_option_names,
    check_strings,
    checked_token_id,
    checked_token_ids,
    is_nan,
    option_names,
)
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.api.vllm_options import SAMPLING, without_neutral

MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 100.0
# Bounds on the work that one request can ask for. `n` and `logit_bias` have vLLM's; OpenAI takes 128 and 4 stops.
MAX_N = 16_384
MAX_LOGIT_BIASES = 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 128, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 1024, 256
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**20  # more than any vocabulary holds
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's

Params = TypeVar("Params")


def _accepts_options_of_vllm(kind: type[Params]) -> type[Params]:
    """Let the constructor take vLLM's other options where they change nothing, and refuse unknown ones by name."""
    plain, names = kind.__init__, option_names(kind)

    @wraps(plain)
    def initialise(self: Any, **options: Any) -> None:
        if not options.keys() <= kind.__dataclass_fields__.keys():  # pyright: ignore[reportAttributeAccessIssue]
            options = without_neutral(options, SAMPLING)
            check_option_names(options, names)
        plain(self, **options)

    kind.__init__ = initialise
    return kind


@_accepts_options_of_vllm
@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names and defaults are those of vLLM.

    Options can be assigned after the params are made; requests run with what they are when they are passed, and are
    checked again then.

    Args:
        n: completions per prompt, at most 16,384; completion i of a seeded request uses `seed + i`.
        temperature: 0 takes the most likely token; otherwise logits are divided by it before sampling.
        top_p: keep the smallest set of most likely tokens whose probabilities reach this sum (Holtzman et al. 2020).
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: above 1 makes tokens of the prompt and of the text so far less likely, below 1 more
            likely (Keskar et al. 2019).
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        presence_penalty: subtracted from a token's logit if it was generated before.
        logit_bias: numbers added to the logits of these token ids, clipped to -100 and 100; at most 1,024.
        allowed_token_ids: only these tokens are generated; None allows all.
        bad_words: texts that are not generated, neither at the start of a word nor after a space; at most 1,024 of
            256 characters.
        seed: makes the random draws of the request depend on this seed and the token's position alone. None:
            derived from the engine's seed and the order in which requests were added.
        stop: strings that end generation; the text ends before the one that occurs first. At most 128 of 1,024
            characters.
        stop_token_ids: tokens that end generation, besides the model's own end of sequence; at most 1,024.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: continue after the model's end of sequence.
        max_tokens: most tokens to generate; None generates up to the model length.
        min_tokens: only after so many tokens may end of sequence or `stop_token_ids` be sampled or a stop string be
            completed.
        logprobs: return the log-probabilities of each generated token and of this many of the most likely ones;
            -1 returns the whole vocabulary.
        prompt_logprobs: the same for the tokens of the prompt.
        logprob_token_ids: return the log-probabilities of each generated token and of exactly these.
        truncate_prompt_tokens: keep this many of the prompt's last tokens; -1 keeps as many as the model length allows.
        detokenize: turn tokens into text; `stop` needs it.
        skip_special_tokens: leave special tokens out of the text (never out of the token ids).
        structured_outputs: a structure that the text must have, such as a JSON schema.

    Raises:
        ValueError: a value out of its range, named with the nearest legal one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._make_plain()
        self._check_numbers()
        self._check_lengths()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams, but is {self.structured_outputs!r}; "
                'use StructuredOutputsParams(regex="...") or the like'
            )
        self._copy_lists()
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop must be empty where detokenize is False, but is "
                f"{list(self.stop_strings)}; use stop_token_ids or detokenize=True"
            )

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0.0, LARGEST_FLOAT32)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, LEAST_FLOAT32, LARGEST_FLOAT32)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_integer("n", self.n, 1, MAX_N)
        check_integer("top_k", self.top_k, -1)
        if self.seed is not None:
            check_integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)

    def _check_lengths(self) -> None:
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens must be at most max_tokens={self.max_tokens}, but is {self.min_tokens}; "
                    f"use {self.max_tokens}"
                )

    def _copy_lists(self) -> None:
        """Copy lists, so that later changes by the caller have no effect."""
        set_ = object.__setattr__
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        set_(self, "stop", _unique_strings("stop", stops, MAX_STOPS, MAX_STOP_CHARACTERS))
        set_(self, "bad_words", _unique_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS))
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        if self.logit_bias is not None:
            set_(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must hold at least one token id, but is empty; use None for all")
        if self.logprob_token_ids is not None:
            set_(
                self,
                "logprob_token_ids",
                _token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
            )
            self._check_logprob_token_ids(len(self.logprob_token_ids))

    def _check_logprob_token_ids(self, count: int) -> None:
        if not count:
            raise ValueError("logprob_token_ids must hold at least one token id, but is empty; use None for none")
        if self.logprobs is not None and self.logprobs != count:
            raise ValueError(
                f"logprobs must be None or {count}, the number of logprob_token_ids, but is {self.logprobs}; use None"
            )

    def _make_plain(self) -> None:
        """Turn numbers of NumPy and the like into Python's int and float."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, field.name, int(value))
            elif isinstance(value, Real) and not isinstance(value, bool):
                object.__setattr__(self, field.name, _plain_float(value))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses a name that is no option; the value is checked when the params are used."""
        if name not in self.__dataclass_fields__:
            check_option_names(without_neutral({name: value}, SAMPLING), option_names(self))
        else:
            object.__setattr__(self, name, value)

    def clone(self) -> "SamplingParams":
        """A checked copy that shares no list with this one."""
        return replace(self)

    @property
    def scores_tokens(self) -> bool:
        """Whether log-probabilities of generated tokens are returned."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def allowed_bits(self) -> bytes:
        """`allowed_token_ids` as packed by `bitmask.pack`."""
        return pack(self.allowed_token_ids or ())

    @cached_property
    def bias_arrays(self) -> tuple[array, array]:
        """The token ids (int32) and values (float32) of `logit_bias`."""
        bias = self.logit_bias or {}
        return array("i", bias), array("f", bias.values())

    def check_against(self, vocab_size: int, max_logprobs: int) -> None:
        """Raise ValueError for what this model or engine cannot do.

        Args:
            max_logprobs: most that `logprobs` and `prompt_logprobs` may ask for; -1 is the whole vocabulary.
        """
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name} must be in [0, {vocab_size - 1}], but one is {token}")
        most = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if name == "logprobs" and self.logprob_token_ids is not None:
                continue
            if count is not None and (vocab_size if count == -1 else count) > most:
                shown = f"-1, all {vocab_size}" if count == -1 else count
                raise ValueError(f"{name} must be at most max_logprobs={most}, but is {shown}; use {most}")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "SamplingParams":
        """Build from keyword options, refusing an unknown one by name with the nearest valid one."""
        return cls(**options)


def _unique_strings(name: str, texts: Sequence[str] | None, most: int, most_characters: int) -> list[str]:
    if texts is None:
        return []
    check_strings(name, texts, most, most_characters)
    return list(dict.fromkeys(texts))


def _token_ids(name: str, ids: Any, most: int) -> list[int]:
    return [] if ids is None else list(checked_token_ids(name, ids, most))


def _biases(biases: Any) -> dict[int, float]:
    """Ids may be strings of digits, as in JSON. Values are clipped to [-100, 100], as in vLLM."""
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias must be a mapping from token id to number, but is {biases!r}")
    check_count("logit_bias", len(biases), MAX_LOGIT_BIASES, "tokens")
    found = {}
    for token, bias in biases.items():
        token = int(token) if isinstance(token, str) and token.isdecimal() else token
        if isinstance(bias, bool) or not isinstance(bias, Real) or is_nan(bias):
            raise ValueError(f"logit_bias must hold numbers, but holds {bias!r} for token {token}")
        found[checked_token_id("logit_bias", token)] = float(min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias)))
    return found


def _plain_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a fraction beyond the largest float
        return math.inf if value > 0 else -math.inf
