"""JSON values as error messages show them: short, in the spelling of the request."""

import json
from collections.abc import Mapping
from typing import Any

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
