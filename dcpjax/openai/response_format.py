"""The options of a request body that demand a structure -> arguments of `StructuredOutputsParams`."""

from collections.abc import Mapping
from typing import Any

from dcpjax.api.checks import check_option_names, option_names
from dcpjax.api.structured_outputs import StructuredOutputsParams

STRUCTURES = tuple(option_names(StructuredOutputsParams))
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
# The options that demand a structure, of OpenAI and of vLLM.
BODY_OPTIONS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def from_response_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """The `response_format` of OpenAI's API as keyword arguments of StructuredOutputsParams; none for plain text.

    A schema is always enforced, whether or not `strict` is set. Raises ValueError for an unknown form.
    """
    kind = _mapping("response_format", value).get("type")
    if kind not in RESPONSE_FORMATS:
        raise ValueError(f"response_format.type must be one of {', '.join(RESPONSE_FORMATS)}, but is {kind!r}")
    if kind == "json_schema":
        schema = _mapping("response_format.json_schema", value.get("json_schema")).get("schema")
        return {"json": dict(_mapping("response_format.json_schema.schema", schema))}
    return {"json_object": True} if kind == "json_object" else {}


def from_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Whichever of `BODY_OPTIONS` a request's body holds, as keyword arguments of StructuredOutputsParams.

    Nulls count as absent. Raises ValueError for an unknown form, or if two options demand a structure.
    """
    asked = {name: _body_option(name, body[name]) for name in BODY_OPTIONS if body.get(name) is not None}
    asked = {name: options for name, options in asked.items() if options}
    if len(asked) > 1:
        raise ValueError(f"a request must ask for one structure, but asks with {' and '.join(asked)}; leave one")
    return next(iter(asked.values()), {})


def _body_option(name: str, value: Any) -> dict[str, Any]:
    if name == "response_format":
        return from_response_format(value)
    if name == "structured_outputs":
        options = {key: option for key, option in _mapping(name, value).items() if option is not None}
        check_option_names(options, STRUCTURES)
        return options
    return {name.removeprefix("guided_"): value}


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, but is {value!r}")
    return value
