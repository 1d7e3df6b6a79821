import dataclasses

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
    ({"json": 3}, "json must be a schema as a mapping or its text, but is 3"),
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


@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_one_constraint_is_kept_as_it_is(options):
    params = StructuredOutputsParams(**options)
    assert {name: value for name, value in dataclasses.asdict(params).items() if value is not None} == options


def test_a_constraint_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StructuredOutputsParams(regex="a").regex = "b"
