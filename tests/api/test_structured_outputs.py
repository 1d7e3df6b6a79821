import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest

from dcpjax.api.structured_outputs import StructuredOutputsParams

REFUSED = [
    (
        {},
        "structured_outputs must have exactly one of json, regex, choice, grammar, json_object, but has none",
    ),
    (
        {"regex": "a", "json": {}},
        "structured_outputs must have exactly one of json, regex, choice, grammar, json_object, ",
    ),
    ({"json_object": False}, "json_object must be True or None, but is False; use True"),
    ({"json": 3}, "json must be a schema as a mapping or its text, or a pydantic class, but is 3"),
    ({"json": dict}, "json must be a schema as a mapping or its text, or a pydantic class, but is <class 'dict'>"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace must come with json or json_object, but"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern must come with json or json_object, but comes"),
    ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False, but is 1"),
    ({"json": {}, "whitespace_pattern": 1}, "whitespace_pattern must be a string, but is 1"),
    (
        {"json": {}, "whitespace_pattern": " ?", "disable_any_whitespace": True},
        "whitespace_pattern must be None where disable_any_whitespace is True, but is ' ?'; leave one out",
    ),
    ({"regex": 3}, "regex must be a string, but is 3"),
    ({"grammar": ["a"]}, "grammar must be a string, but is ['a']"),
    ({"choice": "yes"}, "choice must be a list of strings, but is 'yes'"),
    ({"choice": []}, "choice must hold at least one string, but is empty"),
    ({"choice": ["yes", ""]}, "choice must hold non-empty strings, but holds ''"),
    ({"choice": [1]}, "choice must hold non-empty strings, but holds 1"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_what_is_not_one_constraint_is_refused(options, sentence):
    with pytest.raises(ValueError) as refusal:
        StructuredOutputsParams(**options)
    assert str(refusal.value).startswith(sentence)


ALLOWED = [{"json": {"type": "object"}}, {"json": "{}"}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}]
ALLOWED += [{"json": {}, "disable_any_whitespace": True}, {"json_object": True, "whitespace_pattern": "[ ]?"}]


@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_one_constraint_is_kept_as_it_is(options):
    params = StructuredOutputsParams(**options)
    assert {name: value for name, value in dataclasses.asdict(params).items() if value not in (None, False)} == options
    assert params.kind == next(iter(options))


def test_a_constraint_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StructuredOutputsParams(regex="a").regex = "b"


# --- pydantic


def test_a_pydantic_class_stands_for_its_schema():
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", name=(str, ...), age=(int, 3))
    assert StructuredOutputsParams(json=person).json == person.model_json_schema()


def test_a_pydantic_dataclass_stands_for_its_schema():
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.dataclasses.dataclass(type("Point", (), {"__annotations__": {"x": int, "y": int}}))
    assert StructuredOutputsParams(json=point).json == pydantic.TypeAdapter(point).json_schema()


def test_a_pydantic_class_that_json_cannot_express_is_refused_by_name():
    pydantic = pytest.importorskip("pydantic")
    odd = pydantic.create_model("Odd", call=(Callable[[], int], ...))
    with pytest.raises(ValueError, match="json must be a class with a JSON schema, but Odd has none"):
        StructuredOutputsParams(json=odd)


def test_pydantic_is_not_needed():
    """Nothing imports it for schemas that are mappings."""
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from dcpjax.api.structured_outputs import StructuredOutputsParams\n"
        "StructuredOutputsParams(json={'type': 'object'})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
