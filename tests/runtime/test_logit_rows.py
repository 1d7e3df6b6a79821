"""Which tokens of a step meet the head."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from entries import GEOMETRY, SHAPES, entry, steps
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.batch import build
from dcpjax.runtime.logit_rows import LEAST_SCORED, SampledRows, ScoredTokens, sampled_entries, scored_tokens

VOCAB = 64


def choice(*step: Scheduled) -> SampledRows | None:
    return SampledRows.of(step, build(step, SHAPES, GEOMETRY), SHAPES, VOCAB)


# --- choosing


def test_only_requests_at_their_newest_token_choose():
    found = choice(entry(0, 5, 1), replace(entry(1, 0, 3), samples=False), entry(2, 7, 4))
    assert found is not None
    assert found.indices.tolist() == [0, 7, 0, 0, 0, 0, 0, 0]
    assert np.asarray(found.options.seat).tolist() == [31, 29] + [-1] * 6


def test_a_step_in_which_nobody_is_at_the_newest_token_chooses_nothing():
    assert choice(replace(entry(0, 0, 40), samples=False)) is None


def test_the_prompts_beside_decodes_do_not_widen_their_choice():
    decodes = [entry(number, 20, 1) for number in range(8)]
    found = choice(*decodes, replace(entry(8, 0, 24), samples=False))
    assert found is not None
    assert found.indices.tolist() == list(range(8))


def test_options_of_those_that_do_not_choose_are_not_part_of_the_choice():
    drawn, greedy = entry(0, 0, 3, temperature=1.0), entry(1, 7, 4, temperature=0.0)
    found = choice(replace(drawn, samples=False), greedy)
    assert found is not None
    assert found.options.draw is None


@given(st.integers(0, 2**32 - 1))
def test_each_choice_follows_from_the_last_token_of_its_request(seed):
    step = steps(seed, SHAPES)
    batch, found, rows = build(step, SHAPES, GEOMETRY), choice(*step), sampled_entries(step)
    assert (found is None) == (not rows)
    if found is not None:
        assert len(found.indices) == len(found.options.seat) == SHAPES.rows(len(rows))
        for index, seat, row in zip(found.indices, np.asarray(found.options.seat), rows, strict=False):
            assert batch.work.rows[index] == row
            assert batch.work.positions[index] == step[row].start + step[row].count - 1
            assert seat == step[row].request.seat


# --- scoring


@given(st.integers(0, 2**32 - 1))
def test_each_scored_token_follows_the_one_that_is_picked_for_it(seed):
    step = steps(seed, SHAPES)
    batch, found, scored = build(step, SHAPES, GEOMETRY), ScoredTokens.of(step, VOCAB), scored_tokens(step)
    assert (found is None) == (not scored)
    if found is not None:
        count = len(scored)
        assert len(found.indices) == len(found.targets) >= max(LEAST_SCORED, count)
        assert (found.targets[count:] == -1).all()
        for (row, index, position), picked, target in zip(scored, found.indices, found.targets, strict=False):
            assert picked == index
            assert batch.work.rows[index] == row
            assert batch.work.positions[index] == position
            assert target == step[row].request.prompt_token_ids[position + 1]


def positions(step: Sequence[Scheduled]) -> list[int]:
    return [position for _, _, position in scored_tokens(step)]


def test_a_prompt_token_is_scored_where_its_predecessor_runs():
    """The last prompt token has no successor in the prompt; the first has no predecessor."""
    assert positions([entry(0, 0, 4, prompt_logprobs=0)]) == [0, 1, 2]
    assert positions([entry(0, 2, 2, prompt_logprobs=0)]) == [2]
    assert positions([entry(0, 0, 1, prompt_logprobs=0)]) == []
    assert positions([entry(0, 0, 4)]) == []


def test_generated_tokens_are_not_scored_as_if_they_were_of_the_prompt():
    assert positions([entry(0, 0, 6, prompt=3, prompt_logprobs=0)]) == [0, 1]
    assert positions([entry(0, 4, 1, prompt=3, prompt_logprobs=0)]) == []


def test_a_prompt_scored_in_chunks_is_scored_once():
    whole = entry(0, 0, 20, prompt_logprobs=0)
    chunks = [Scheduled(whole.request, start, 5, whole.block_table, start == 15) for start in range(0, 20, 5)]
    assert [position for chunk in chunks for position in positions([chunk])] == list(range(19))


def test_only_the_first_completion_is_scored():
    follower = entry(1, 0, 4, prompt_logprobs=0)
    follower.request.first_sibling = entry(0, 0, 4).request
    assert positions([follower]) == []


def test_one_number_of_alternatives_serves_all_who_want_some():
    found = ScoredTokens.of(
        [entry(0, 0, 4, prompt_logprobs=0), entry(1, 0, 4), entry(2, 0, 4, prompt_logprobs=3)], VOCAB
    )
    assert found is not None
    assert found.num_logprobs == 4
