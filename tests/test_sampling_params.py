import dataclasses
import math

import pytest

from dcpjax.sampling_params import MAX_SEED, SamplingParams, check_option_names

REFUSED = [
    ({"temperature": -0.1}, "temperature must be in [0, inf), but is -0.1; use 0"),
    ({"temperature": math.inf}, "temperature must be in [0, inf), but is inf; use 1"),
    ({"temperature": math.nan}, "temperature must be a number, but is nan"),
    ({"temperature": "hot"}, "temperature must be a number, but is 'hot'"),
    ({"temperature": True}, "temperature must be a number, but is True"),
    ({"temperature": None}, "temperature must be a number, but is None"),
    ({"top_p": 0}, "top_p must be in (0, 1], but is 0; use 0.01"),
    ({"top_p": 1.5}, "top_p must be in (0, 1], but is 1.5; use 1"),
    ({"min_p": -1}, "min_p must be in [0, 1], but is -1; use 0"),
    ({"min_p": 1.1}, "min_p must be in [0, 1], but is 1.1; use 1"),
    ({"top_k": -2}, "top_k must be at least -1, but is -2; use -1"),
    ({"top_k": 2.0}, "top_k must be an integer, but is 2.0"),
    ({"n": 0}, "n must be at least 1, but is 0; use 1"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, but is 0; use 1"),
    ({"max_tokens": -5}, "max_tokens must be at least 1, but is -5; use 1"),
    ({"max_tokens": 3.5}, "max_tokens must be an integer, but is 3.5"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, but is -1; use 0"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, but is 9; use 4"),
    ({"seed": 2**63}, f"seed must be at most {2**63 - 1}, but is {2**63}; use {2**63 - 1}"),
    ({"seed": 1.0}, "seed must be an integer, but is 1.0"),
    ({"stop": ""}, "stop must hold non-empty strings, but holds ''"),
    ({"stop": ["a", ""]}, "stop must hold non-empty strings, but holds ''"),
    ({"stop": [3]}, "stop must hold non-empty strings, but holds 3"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0, but is -1; use 0"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids must be an integer, but is 'x'"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_a_value_out_of_range_is_refused_with_the_nearest_legal_one(options, sentence):
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**options)
    assert str(refusal.value) == sentence


ALLOWED = [
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 10**12},
    {"max_tokens": None, "min_tokens": 1000},
    {"max_tokens": 4, "min_tokens": 4},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"seed": -MAX_SEED - 1},
]


@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_values_at_the_edge_of_their_range_are_allowed(options):
    params = SamplingParams(**options)
    assert {name: getattr(params, name) for name in options} == options


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) | {"stop": None, "stop_token_ids": None} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "skip_special_tokens": True,
    }


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("end", ("end",)), (["a", "bc"], ("a", "bc")), (("x",), ("x",)), ([], ())]
)
def test_stop_is_one_string_or_several(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_stop_tokens_are_any_sequence_of_ids():
    assert SamplingParams().stop_tokens == ()
    assert SamplingParams(stop_token_ids=range(3)).stop_tokens == (0, 1, 2)


def test_params_are_immutable_and_compare_by_value():
    params = SamplingParams(stop=["a"], seed=3)
    assert params == SamplingParams(stop="a", seed=3)
    assert hash(params) == hash(SamplingParams(stop="a", seed=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4


def test_a_changed_list_of_stops_does_not_change_the_params():
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    assert params.stop_strings == ("a",)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("stop_tokens", "stop_token_ids")]
)
def test_an_unknown_option_is_refused_with_the_nearest_valid_one(name, near):
    with pytest.raises(ValueError, match=f"unknown option '{name}'; did you mean {near}"):
        SamplingParams.from_options({"seed": 1, name: 1})


def test_an_option_near_to_none_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown option 'xyzzy'; valid options: seed, stop"):
        check_option_names({"xyzzy": 1}, ["seed", "stop"])


def test_valid_options_make_the_same_params():
    assert SamplingParams.from_options({"top_k": 3, "seed": 1}) == SamplingParams(top_k=3, seed=1)
