"""Beam search on tables of next tokens."""

import math

import pytest

from dcpjax.api.beam_search import BeamSearchParams, BeamSearchSequence
from dcpjax.api.logprobs import Logprob
from dcpjax.frontend.beam_search import Search, run

END = 0
TABLE = {  # after the last token: the next ones and their probabilities
    1: {2: 0.6, 3: 0.4},
    2: {2: 0.4, 3: 0.35, END: 0.25},
    3: {END: 0.9, 2: 0.1},
    END: {2: 1.0},
}


def search(*, max_tokens: int = 3, width: int = 2, **options) -> list[BeamSearchSequence]:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options)
    asked = Search([1], params, max_tokens, {END})
    run([asked], lambda texts: [{t: Logprob(math.log(p)) for t, p in TABLE[ids[-1]].items()} for ids in texts])
    return asked.result()


def likelihoods(beams: list[BeamSearchSequence]) -> list[float]:
    return [round(math.exp(beam.cum_logprob), 6) for beam in beams]


def test_what_is_likely_as_a_whole_wins_over_what_begins_likely():
    best, second = search(length_penalty=0.0)
    assert (best.tokens, best.finish_reason, best.stop_reason) == ([1, 3], "stop", END)
    assert second.tokens == [1, 2, 3]
    assert likelihoods([best, second]) == [0.36, 0.189]


def test_the_end_shows_if_it_is_asked_for():
    assert search(include_stop_str_in_output=True)[0].tokens[-1] == END


def test_an_end_that_is_ignored_is_a_token_like_others():
    best = search(ignore_eos=True, length_penalty=0.0)[0]
    assert (best.tokens, best.finish_reason) == ([1, 3, END, 2], "length")
    assert likelihoods([best]) == [0.36]


def test_length_is_rewarded_as_asked():
    assert len(search(length_penalty=-3.0, max_tokens=5)[0].tokens) < len(
        search(length_penalty=3.0, max_tokens=5)[0].tokens
    )


def test_every_token_of_a_beam_has_its_log_probabilities():
    for beam in search():
        assert len(beam.logprobs) == len(beam.tokens) - 1 + (beam.finish_reason == "stop")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width must be an integer of at least 1"),
        ({"beam_width": 1, "max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"beam_width": 1, "max_tokens": 1, "temperature": 0.5}, "temperature must be 0 or 1 in beam search"),
        ({"beam_width": 1, "max_tokens": 1, "length_penalty": "a"}, "length_penalty must be a number"),
    ],
)
def test_options_out_of_range_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        BeamSearchParams(**options)
