import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from dcpjax.api.checks import LARGEST_FLOAT32, LEAST_FLOAT32
from dcpjax.api.sampling_params import MAX_SEED, SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams

REFUSED = [
    ({"temperature": -0.1}, "temperature must be in [0, 3.4e+38], but is -0.1; use 0"),
    ({"temperature": math.inf}, "temperature must be in [0, 3.4e+38], but is inf; use 1"),
    ({"temperature": 1e39}, "temperature must be in [0, 3.4e+38], but is 1e+39; use 3.4e+38"),
    ({"temperature": 10**400}, f"temperature must be in [0, 3.4e+38], but is {10**400}; use 3.4e+38"),
    ({"temperature": Fraction(10**400)}, "temperature must be in [0, 3.4e+38], but is inf; use 1"),
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
    ({"n": 10**6}, "n must be at most 16384, but is 1000000; use 16384"),
    ({"stop": ["a"] * 129}, "stop must hold at most 128 strings, but holds 129; use 128 or fewer"),
    ({"stop": "a" * 1025}, "stop must hold strings of at most 1024 characters, but one has 1025; shorten it"),
    ({"bad_words": ["a"] * 1025}, "bad_words must hold at most 1024 strings, but holds 1025; use 1024 or fewer"),
    ({"bad_words": ["a" * 257]}, "bad_words must hold strings of at most 256 characters, but one has 257; shorten it"),
    (
        {"logit_bias": dict.fromkeys(range(1025), 1)},
        "logit_bias must hold at most 1024 tokens, but holds 1025; use 1024 or fewer",
    ),
    (
        {"stop_token_ids": range(10**12)},
        "stop_token_ids must hold at most 1024 token ids, but holds more; use 1024 or fewer",
    ),
    (
        {"allowed_token_ids": range(10**12)},
        "allowed_token_ids must hold at most 1048576 token ids, but holds more; use 1048576 or fewer",
    ),
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
    ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], but is 2.5; use 2"),
    ({"presence_penalty": None}, "presence_penalty must be a number, but is None"),
    ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], but is -3; use -2"),
    ({"frequency_penalty": math.nan}, "frequency_penalty must be a number, but is nan"),
    ({"repetition_penalty": 0}, "repetition_penalty must be in [1.2e-38, 3.4e+38], but is 0; use 1.2e-38"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty must be in [1.2e-38, 3.4e+38], but is 1e-40; use 1.2e-38"),
    ({"repetition_penalty": 1e39}, "repetition_penalty must be in [1.2e-38, 3.4e+38], but is 1e+39; use 3.4e+38"),
    ({"repetition_penalty": math.inf}, "repetition_penalty must be in [1.2e-38, 3.4e+38], but is inf; use 1"),
    ({"logit_bias": [3]}, "logit_bias must be a mapping from token id to number, but is [3]"),
    ({"logit_bias": {"x": 1}}, "logit_bias must be an integer, but is 'x'"),
    ({"logit_bias": {-1: 1}}, "logit_bias must be at least 0, but is -1; use 0"),
    ({"logit_bias": {1: "a lot"}}, "logit_bias must hold numbers, but holds 'a lot' for token 1"),
    ({"logit_bias": {1: math.nan}}, "logit_bias must hold numbers, but holds nan for token 1"),
    ({"allowed_token_ids": []}, "allowed_token_ids must hold at least one token id, but is empty; use None for all"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids must be at least 0, but is -1; use 0"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids must be an integer, but is True"),
    ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of token ids, but is 3"),
    ({"bad_words": "no"}, "bad_words must be a list of strings, but is 'no'; use ['no']"),
    ({"bad_words": ["no", ""]}, "bad_words must hold non-empty strings, but holds ''"),
    ({"logprobs": -2}, "logprobs must be at least -1, but is -2; use -1"),
    ({"logprobs": True}, "logprobs must be an integer, but is True"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs must be an integer, but is 1.5"),
    ({"detokenize": 1}, "detokenize must be True or False, but is 1"),
    (
        {"detokenize": False, "stop": "end"},
        "stop must be empty where detokenize is False, but is ['end']; use stop_token_ids or detokenize=True",
    ),
    (
        {"structured_outputs": {"regex": "a"}},
        "structured_outputs must be StructuredOutputsParams, but is {'regex': 'a'}; "
        'use StructuredOutputsParams(regex="...") or the like',
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[str(options)[:60] for options, _ in REFUSED])
def test_a_value_out_of_range_is_refused_with_the_nearest_legal_one(options, sentence):
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**options)
    assert str(refusal.value) == sentence


ALLOWED = [
    {"temperature": 0},
    {"temperature": 100.0},
    {"temperature": LARGEST_FLOAT32},
    {"repetition_penalty": LEAST_FLOAT32},
    {"repetition_penalty": LARGEST_FLOAT32},
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
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 1e-9},
    {"repetition_penalty": 50},
    {"logprobs": -1, "prompt_logprobs": 0},
    {"n": 16_384},
    {"stop": [f"{number:01024}" for number in range(128)]},
    {"bad_words": [f"{number:0256}" for number in range(1024)]},
    {"logit_bias": dict.fromkeys(range(1024), 1.0), "stop_token_ids": list(range(1024))},
    {"structured_outputs": StructuredOutputsParams(regex="a")},
]


@pytest.mark.parametrize("options", ALLOWED, ids=lambda options: str(options)[:60])
def test_values_at_the_edge_of_their_range_are_allowed(options):
    params = SamplingParams(**options)
    lists = {name: list(value) if isinstance(value, tuple | range) else value for name, value in options.items()}
    assert {name: getattr(params, name) for name in options} == lists


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) | {"stop": None, "stop_token_ids": None, "bad_words": None} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logprob_token_ids": None,
        "truncate_prompt_tokens": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "structured_outputs": None,
    }


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("end", ("end",)), (["a", "bc"], ("a", "bc")), (("x",), ("x",)), ([], ())]
)
def test_stop_is_one_string_or_several(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_stop_tokens_are_any_sequence_of_ids():
    assert SamplingParams().stop_tokens == ()
    assert SamplingParams(stop_token_ids=range(3)).stop_tokens == (0, 1, 2)


def test_params_compare_by_value_and_can_be_changed():
    params = SamplingParams(stop=["a"], seed=3)
    assert params == SamplingParams(stop="a", seed=3)
    params.seed = 4
    assert params == SamplingParams(stop="a", seed=4) != SamplingParams(stop="a", seed=3)


def test_a_changed_value_is_checked_when_the_params_are_copied():
    params = SamplingParams(seed=3)
    params.temperature = -1
    with pytest.raises(ValueError, match="temperature must be in"):
        params.clone()


def test_an_assignment_to_no_option_is_refused_with_the_nearest():
    params = SamplingParams()
    with pytest.raises(ValueError, match="unknown option 'max_token'; did you mean max_tokens"):
        params.max_token = 4
    params.best_of = 1
    with pytest.raises(ValueError, match="best_of must be None or 1, but is 2; use n"):
        params.best_of = 2


def test_a_copy_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0}, allowed_token_ids=[1, 2])
    copied = params.clone()
    assert copied == params
    copied.stop.append("b")
    copied.logit_bias[4] = 2.0
    copied.allowed_token_ids.append(3)
    assert params == SamplingParams(stop=["a"], logit_bias={3: 1.0}, allowed_token_ids=[1, 2])
    assert copied.clone().allowed_bits != params.allowed_bits


def test_lists_are_lists_as_in_vllm():
    params = SamplingParams(stop=("a",), stop_token_ids=range(2), bad_words=("x",), allowed_token_ids=(1,))
    lists = params.stop, params.stop_token_ids, params.bad_words, params.allowed_token_ids
    assert lists == (["a"], [0, 1], ["x"], [1])
    empty = SamplingParams()
    assert (empty.stop, empty.stop_token_ids, empty.bad_words) == ([], [], [])


def test_a_changed_list_of_stops_does_not_change_the_params():
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    assert params.stop_strings == ("a",)


def test_a_changed_mapping_does_not_change_the_params():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 1.0
    assert params.logit_bias == {1: 2.0}


def test_biases_are_read_as_json_has_them_and_held_within_their_limits():
    params = SamplingParams(logit_bias={"50256": -1000, 7: np.float32(3.5), np.int64(8): 200})
    assert params.logit_bias == {50256: -100.0, 7: 3.5, 8: 100.0}
    ids, values = params.bias_arrays
    assert (ids.tolist(), values.tolist()) == ([50256, 7, 8], [-100.0, 3.5, 100.0])
    assert (ids.itemsize, values.itemsize) == (4, 4)


def test_the_largest_numbers_are_held_within_the_limits_of_a_bias():
    params = SamplingParams(logit_bias={1: 10**400, 2: -(10**400), 3: math.inf})
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 100.0}


def test_numbers_at_the_limits_are_normal_numbers_of_the_device():
    least, largest = np.float32(LEAST_FLOAT32), np.float32(LARGEST_FLOAT32)
    assert np.finfo(np.float32).smallest_normal < least
    assert largest < np.finfo(np.float32).max


def test_bad_words_are_kept_once_each():
    assert SamplingParams(bad_words=["a", "b", "a"]).bad_words == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "penalizes"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -1}, True),
        ({"repetition_penalty": 2}, True),
    ],
)
def test_params_know_whether_they_penalize(options, penalizes):
    assert SamplingParams(**options).has_penalties == penalizes


REFUSED_BY_THE_MODEL = [
    ({"stop_token_ids": [3, 100]}, "stop_token_ids must be in [0, 99], but one is 100"),
    ({"logit_bias": {100: 1.0}}, "logit_bias must be in [0, 99], but one is 100"),
    ({"allowed_token_ids": [5, 400]}, "allowed_token_ids must be in [0, 99], but one is 400"),
    ({"logprobs": 21}, "logprobs must be at most max_logprobs=20, but is 21; use 20"),
    ({"prompt_logprobs": 50}, "prompt_logprobs must be at most max_logprobs=20, but is 50; use 20"),
    ({"logprobs": -1}, "logprobs must be at most max_logprobs=20, but is -1, all 100; use 20"),
]


@pytest.mark.parametrize(
    ("options", "sentence"), REFUSED_BY_THE_MODEL, ids=[str(one) for one, _ in REFUSED_BY_THE_MODEL]
)
def test_what_the_model_or_the_engine_cannot_do_is_refused(options, sentence):
    params = SamplingParams(**options)
    with pytest.raises(ValueError) as refusal:
        params.check_against(vocab_size=100, max_logprobs=20)
    assert str(refusal.value) == sentence


def test_what_the_model_and_the_engine_can_do_is_not_refused():
    edge = {"stop_token_ids": [99], "logit_bias": {99: 1.0}, "allowed_token_ids": [0, 99]}
    SamplingParams(**edge, logprobs=20, prompt_logprobs=0).check_against(vocab_size=100, max_logprobs=20)
    SamplingParams(logprobs=-1, prompt_logprobs=-1).check_against(vocab_size=100, max_logprobs=-1)
    SamplingParams().check_against(vocab_size=100, max_logprobs=0)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("stop_tokens", "stop_token_ids")]
)
def test_an_unknown_option_is_refused_with_the_nearest_valid_one(name, near):
    with pytest.raises(ValueError, match=f"unknown option '{name}'; did you mean {near}"):
        SamplingParams.from_options({"seed": 1, name: 1})


def test_valid_options_make_the_same_params():
    assert SamplingParams.from_options({"top_k": 3, "seed": 1}) == SamplingParams(top_k=3, seed=1)
