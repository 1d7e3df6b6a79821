import math
from dataclasses import dataclass

import numpy as np
import pytest

from dcpjax.api import checks
from dcpjax.api.checks import check_option_names, checked_token_ids, from_options, option_names

REFUSED = [
    (checks.check_integer, (1.5,), "x must be an integer, but is 1.5"),
    (checks.check_integer, (True,), "x must be an integer, but is True"),
    (checks.check_integer, (0, 1), "x must be at least 1, but is 0; use 1"),
    (checks.check_integer, (9, 1, 8), "x must be at most 8, but is 9; use 8"),
    (checks.check_size, (0,), "x must be an integer of at least 1, but is 0; use 1 or more"),
    (checks.check_size, ("8",), "x must be an integer of at least 1, but is '8'; use 1 or more"),
    (checks.check_size, (1, 2), "x must be an integer of at least 2, but is 1; use 2 or more"),
    (checks.check_number, ("a", 0.0, 1.0), "x must be a number, but is 'a'"),
    (checks.check_number, (2, 0.0, 1.0), "x must be in [0, 1], but is 2; use 1"),
    (checks.check_number, (math.inf, 0.0, math.inf), "x must be in [0, inf), but is inf; use 1"),
    (checks.check_share, (0,), "x must be in (0, 1], but is 0; use 0.9"),
    (checks.check_share, (math.nan,), "x must be in (0, 1], but is nan; use 0.9"),
    (checks.check_seconds, (math.inf,), "x must be a number of seconds, at least 0, but is inf; use 0 or more"),
    (checks.check_bool, (1,), "x must be True or False, but is 1"),
    (checks.check_choice, ("c", ("a", "b")), "x must be one of a, b, but is 'c'"),
    (checks.check_strings, ("a",), "x must be a list of strings, but is 'a'; use ['a']"),
    (checks.check_strings, (["a", ""],), "x must hold non-empty strings, but holds ''"),
    (checks.check_strings, (["a", "b", "c"], 2), "x must hold at most 2 strings, but holds 3; use 2 or fewer"),
    (
        checks.check_strings,
        (["a", "bcd"], 2, 2),
        "x must hold strings of at most 2 characters, but one has 3; shorten it",
    ),
    (checks.checked_token_ids, (range(10**12), 9), "x must hold at most 9 token ids, but holds more; use 9 or fewer"),
    (checks.checked_token_ids, ("12", 9), "x must be a list of token ids, but is '12'"),
    (checks.checked_token_ids, ([2**31], 9), f"x must be at most {2**31 - 1}, but is {2**31}; use {2**31 - 1}"),
]


@pytest.mark.parametrize(("check", "arguments", "sentence"), REFUSED)
def test_what_is_not_accepted_is_refused_in_one_sentence(check, arguments, sentence):
    with pytest.raises(ValueError) as refusal:
        check("x", *arguments)
    assert str(refusal.value) == sentence


def test_the_edges_of_a_range_are_accepted():
    checks.check_integer("x", 1, 1, 1)
    checks.check_size("x", 1)
    checks.check_number("x", 0, 0.0, 1.0)
    checks.check_number("x", 1e-9, 0.0, 1.0, open_low=True)
    checks.check_share("x", 0, zero_allowed=True)
    checks.check_seconds("x", 0)


def test_open_low_leaves_out_the_lower_end():
    with pytest.raises(ValueError, match=r"^x must be in \(0, 1\], but is 0; use 0.01$"):
        checks.check_number("x", 0, 0.0, 1.0, open_low=True)


def test_token_ids_of_numpy_become_plain_integers():
    found = checked_token_ids("x", np.array([3, 4]), 2)
    assert found == (3, 4)
    assert [type(token) for token in found] == [int, int]


@dataclass
class Example:
    seed: int = 0
    stop: int = 0


def test_options_are_made_from_their_names():
    assert option_names(Example) == ["seed", "stop"]
    assert from_options(Example, {"stop": 3}) == Example(stop=3)
    with pytest.raises(ValueError, match="unknown option 'stops'; did you mean stop"):
        from_options(Example, {"stops": 3})


def test_an_option_near_to_none_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown option 'xyzzy'; valid options: seed, stop"):
        check_option_names({"xyzzy": 1}, ["seed", "stop"])
