"""JSON values as error messages show them: short, in the spelling of the request."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_CHARACTERS = 60


def short_json(value: Any) -> str:
    """The value as JSON, cut to 60 characters; of a list or an object only its length: "a list of 3"."""
    text = _length(value) if isinstance(value, list | dict) else json.dumps(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


def short_field(fields: Mapping[str, Any], name: str) -> str:
    """`short_json` of a field, or "missing"."""
    return short_json(fields[name]) if name in fields else "missing"


def _length(value: list[Any] | dict[str, Any]) -> str:
    kind = "a list" if isinstance(value, list) else "an object"
    return f"{kind} of {len(value)}" if value else f"an empty {kind.split()[1]}"


def read_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in UTF-8 that `data` is. Raises ValueError for anything else: "`what` must be ..."."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
        if b"\\ud" in data.lower():  # only an escape can be a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} must be UTF-8, but its byte {error.start} is {data[error.start]:#04x}") from None
    except UnicodeEncodeError as error:
        lone = error.object[error.start]
        raise ValueError(f"{what} must be valid Unicode, but holds the lone surrogate {lone!a}; remove it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} must be a JSON object, but is not: {error}") from None
    except RecursionError:
        raise ValueError(f"{what} must be a JSON object, but is nested too deep; nest less") from None
    except ValueError as error:  # such as an integer of thousands of digits
        raise ValueError(f"{what} must be JSON that can be read, but is not: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, but is {short_json(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which JSON has no number for")
