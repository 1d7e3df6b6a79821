"""Typed values of a config.json. A value of another type or size raises ValueError naming its key."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

MOST_LAYERS = 2**12
MOST_EXPERTS = 2**14
MOST_EXPERTS_OF_ALL_LAYERS = 2**18  # each is named one by one: ten times those of the largest published model
MOST_HEADS = 2**16
MOST_POSITIONS = 2**31 - 1  # positions are int32
MOST = 2**24  # of any other size
LARGEST = 1e30  # of any other number: far from the end of float32

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """`value` for an error message, cut to a line."""
    try:
        return _short.repr(value)
    except Exception:  # an integer of more digits than Python writes, or an object that cannot be shown
        return f"a {type(value).__name__} that is too long to show"


def integer(config: Json, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
    """A whole number; `default` stands for a missing one and for null."""
    value = config.get(key)
    value = default if value is None else value
    kind = {0: "an integer of at least 0", 1: "a positive integer"}[least]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config.json: {key} must be {kind}, but is {shown(value)}")
    if value > most:
        raise ValueError(f"config.json: {key} must be at most {most}, but is {shown(value)}")
    return value


def number(config: Json, key: str, default: float | None = None, *, zero: bool = False) -> float:
    """A positive finite number, or zero where that is allowed; `default` stands for a missing one, not for null."""
    value = config.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (1 / LARGEST <= value <= LARGEST or (zero and value == 0)):
        return float(value)
    kind = "a number of at least 0" if zero else "a positive number"
    raise ValueError(f"config.json: {key} must be {kind}, but is {shown(value)}")


def optional_number(config: Json, key: str, *, zero: bool = False) -> float | None:
    """The same, or None for a missing one and for null."""
    return None if config.get(key) is None else number(config, key, zero=zero)


def flag(config: Json, key: str, default: bool = False) -> bool:
    """true or false; null is false, as it is wherever Python tests it."""
    value = config.get(key, default)
    if not isinstance(value, bool | None):
        raise ValueError(f"config.json: {key} must be true or false, but is {shown(value)}")
    return bool(value)


def word(config: Json, key: str, choices: Sequence[str], default: str) -> str:
    """One of some words; `default` stands for a missing one and for null."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"config.json: {key} must be one of {', '.join(choices)}, but is {shown(value)}")
    return value


def entries(config: Json, key: str) -> Json:
    """An object; empty for a missing one and for null."""
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"config.json: {key} must be an object, but is {shown(value)}")
    return value or {}


def items(config: Json, key: str, kind: type) -> Sequence[Any]:
    """A list of strings or of integers; empty for a missing one and for null."""
    value = config.get(key)
    value = () if value is None else value
    if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
        name = {int: "integers", str: "words"}[kind]
        raise ValueError(f"config.json: {key} must be a list of {name}, but is {shown(value)}")
    return value


def numbers(config: Json, key: str) -> tuple[float, ...]:
    """A list of positive numbers; empty for a missing one."""
    value = config.get(key, ())
    if not isinstance(value, list | tuple):
        raise ValueError(f"config.json: {key} must be a list of numbers, but is {shown(value)}")
    return tuple(number({key: item}, key) for item in value)
