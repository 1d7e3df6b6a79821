"""What a user may ask of generation, checked when it is made. Knows nothing about arrays or the engine."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names and defaults are those of vLLM.

    Args:
        n: completions per prompt; completion i of a seeded request uses `seed + i`.
        temperature: 0 takes the most likely token; otherwise logits are divided by it before sampling.
        top_p: keep the fewest tokens whose probabilities reach this sum (Holtzman et al. 2020).
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        seed: makes the request's draws depend on nothing but it and the position. None: drawn from the
            engine's seed and the order in which requests were added.
        stop: strings that end generation; the text ends before the first of them.
        stop_token_ids: tokens that end generation, besides the model's own end of sequence.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: go on after the model's end of sequence.
        max_tokens: most tokens to generate; None generates up to the model length.
        min_tokens: fewest tokens before end-of-sequence or `stop_token_ids` may be sampled.
        skip_special_tokens: leave special tokens out of the text (never out of the token ids).

    Raises:
        ValueError: a value out of its range, named with the nearest legal one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._make_plain()
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, but is {getattr(self, name)!r}")
        _integer("n", self.n, 1)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens must be at most max_tokens={self.max_tokens}, but is {self.min_tokens}; "
                    f"use {self.max_tokens}"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    def _make_plain(self) -> None:
        """Numbers of NumPy and the like become Python's own."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, field.name, int(value))
            elif isinstance(value, Real) and not isinstance(value, bool):
                object.__setattr__(self, field.name, float(value))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "SamplingParams":
        """Build from keyword options, refusing an unknown one by name with the nearest valid one."""
        check_option_names(options, [field.name for field in fields(cls)])
        return cls(**options)


def check_option_names(options: Sequence[str] | dict[str, Any], valid: Sequence[str]) -> None:
    """Raise ValueError for the first name that is not valid, with the nearest that is."""
    for name in options:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"valid options: {', '.join(valid)}"
            raise ValueError(f"unknown option {name!r}; {hint}")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name} must be a number, but is {value!r}")
    too_low = value <= low if open_low else value < low
    if too_low or value > high or math.isinf(value):
        interval = f"{'(' if open_low else '['}{low:g}, {'inf)' if math.isinf(high) else f'{high:g}]'}"
        nearest = 1.0 if math.isinf(value) else (high if value > high else (0.01 if open_low else low))
        raise ValueError(f"{name} must be in {interval}, but is {value!r}; use {nearest:g}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, but is {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if value < low else f"at most {high}"
        raise ValueError(f"{name} must be {bound}, but is {value}; use {low if value < low else high}")


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(stop, str | Sequence | None):
        raise ValueError(f"stop must be a string or a list of strings, but is {stop!r}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for entry in stops:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"stop must hold non-empty strings, but holds {entry!r}")
    return stops


def _token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is not None and (isinstance(ids, str | bytes) or not isinstance(ids, Iterable)):
        raise ValueError(f"stop_token_ids must be a list of token ids, but is {ids!r}")
    checked = tuple(int(token) if isinstance(token, Integral) else token for token in (() if ids is None else ids))
    for token in checked:
        _integer("stop_token_ids", token, 0, MAX_TOKEN_ID)
    return checked
