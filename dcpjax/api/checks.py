"""Checks of arguments that users give. Each raises ValueError with one sentence that names the argument.

`name` is printed as it is given, so a caller may pass it in the spelling its user typed.
"""

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from numbers import Integral
from typing import Any, TypeGuard, TypeVar

MAX_TOKEN_ID = 2**31 - 1
# of float32, in which the device computes: normal numbers, rounded to two digits inside their range
LEAST_FLOAT32, LARGEST_FLOAT32 = 1.2e-38, 3.4e38

Options = TypeVar("Options")


def option_names(options: Any) -> list[str]:
    """The field names of a dataclass of options."""
    return [field.name for field in fields(options)]


def check_option_names(names: Iterable[str], valid: Sequence[str], what: str = "option") -> None:
    """Raise ValueError for the first name that is not valid: "unknown option 'x'; did you mean y?"."""
    for name in names:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"valid {what}s: {', '.join(valid)}"
            raise ValueError(f"unknown {what} {name!r}; {hint}")


def from_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """An instance of the dataclass `kind`. Raises ValueError for an unknown option, as `check_option_names`."""
    check_option_names(options, option_names(kind))
    return kind(**options)


def is_integer(value: Any) -> TypeGuard[int]:
    """An int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """An int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_nan(value: Any) -> bool:
    """Whether a number of any kind is NaN; `math.isnan` does not take integers beyond the largest float."""
    return not -math.inf <= value <= math.inf


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    """Accept an integer within `least` and `most`, both inclusive.

    "x must be an integer, but is 1.5", "x must be at least 1, but is 0; use 1".
    """
    if not is_integer(value):
        raise ValueError(f"{name} must be an integer, but is {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}; use {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, but is {value}; use {most}")


def check_size(name: str, value: Any, least: int = 1) -> None:
    """Accept an integer of at least `least`: "x must be an integer of at least 1, but is 0; use 1 or more"."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, but is {value!r}; use {least} or more")


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Accept a finite number in [low, high], or in (low, high] if `open_low`.

    "x must be a number, but is 'a'", "x must be in [0, 1], but is 2; use 1".
    """
    if not is_number(value) or is_nan(value):
        raise ValueError(f"{name} must be a number, but is {value!r}")
    too_low, infinite = value <= low if open_low else value < low, abs(value) == math.inf
    if too_low or value > high or infinite:
        interval = f"{'(' if open_low else '['}{low:g}, {'inf)' if math.isinf(high) else f'{high:g}]'}"
        nearest = 1.0 if infinite else (high if value > high else (0.01 if open_low else low))
        raise ValueError(f"{name} must be in {interval}, but is {value!r}; use {nearest:g}")


def check_share(name: str, value: Any, *, zero_allowed: bool = False) -> None:
    """Accept a number above 0 and at most 1: "x must be in (0, 1], but is 2; use 0.9"."""
    if not is_number(value) or not (0 < value <= 1 or (zero_allowed and value == 0)):
        raise ValueError(f"{name} must be in {'[' if zero_allowed else '('}0, 1], but is {value!r}; use 0.9")


def check_seconds(name: str, value: Any) -> None:
    """Accept a finite number from 0 on: "x must be a number of seconds, at least 0, but is -1; use 0 or more"."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, at least 0, but is {value!r}; use 0 or more")


def check_bool(name: str, value: Any) -> None:
    """Accept True and False: "x must be True or False, but is 1"."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, but is {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Accept one of `choices`: "x must be one of a, b, but is 'c'"."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {value!r}")


def check_count(name: str, count: int, most: int, what: str) -> None:
    """Accept at most so many: "x must hold at most 2 strings, but holds 3; use 2 or fewer"."""
    if count > most:
        raise ValueError(f"{name} must hold at most {most} {what}, but holds {count}; use {most} or fewer")


def check_strings(name: str, texts: Any, most: int = sys.maxsize, most_characters: int = sys.maxsize) -> None:
    """Accept a sequence of at most `most` non-empty strings of at most `most_characters` characters each.

    "x must be a list of strings, but is 'a'; use ['a']", "x must hold non-empty strings, but holds ''", "x must hold
    strings of at most 4 characters, but one has 5; shorten it".
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ValueError(f"{name} must be a list of strings, but is {texts!r}; use [{str(texts)!r}]")
    check_count(name, len(texts), most, "strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, but holds {text!r}")
        if len(text) > most_characters:
            raise ValueError(
                f"{name} must hold strings of at most {most_characters} characters, but one has {len(text)}; shorten it"
            )


def checked_token_id(name: str, token: Any) -> int:
    """A token id from 0 to 2**31 - 1 as a Python int; raises as `check_integer`. NumPy's integers are accepted."""
    plain = int(token) if isinstance(token, Integral) and not isinstance(token, bool) else token
    check_integer(name, plain, 0, MAX_TOKEN_ID)
    return plain


def checked_token_ids(name: str, ids: Any, most: int) -> tuple[int, ...]:
    """A tuple of token ids from any iterable of at most `most`: "x must be a list of token ids, but is 3"."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"{name} must be a list of token ids, but is {ids!r}")
    listed = tuple(islice(ids, most + 1))
    if len(listed) > most:
        raise ValueError(f"{name} must hold at most {most} token ids, but holds more; use {most} or fewer")
    return tuple(checked_token_id(name, token) for token in listed)
