"""Several decode steps in one call change no token, and nobody waits for them."""

import random
from collections.abc import Sequence

import pytest
from engine_mock import (
    MockGuide,
    MockRunner,
    alone,
    alone_with_guide,
    check_idle,
    engine,
    expected,
    finish,
    prompts,
    request,
)
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine.scheduler import Scheduled

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
SEEDS = st.integers(0, 2**32 - 1)


def watched() -> tuple[MockRunner, list[list[int]]]:
    """A runner, and the decode steps of each row of the calls that it got."""
    calls: list[list[int]] = []
    return MockRunner(before_launch=lambda step: calls.append([entry.steps for entry in step])), calls


@BOTH
@pytest.mark.parametrize("steps", [2, 4, 8])
def test_the_host_is_asked_once_for_so_many_tokens(steps, async_scheduling):
    runner, calls = watched()
    running, one = engine(runner, async_scheduling=async_scheduling, num_decode_steps=steps), request(0, [1, 2], 17)
    assert finish(running, [one]) == expected([one])
    assert calls == [[1], *[[steps]] * (16 // steps)]  # the prompt gives the first token
    assert running.stats().steps == len(calls)
    assert running.stats().fused_steps == 16 - 16 // steps


@given(
    SEEDS,
    st.sampled_from([(6, 1, 3), (6, 8, 5), (7, 4, 9), (9, 3, 16), (50, 8, 64)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([2, 3, 4, 8]),
)
def test_results_depend_on_nothing_but_the_prompt(seed, sizes, async_scheduling, caching, steps):
    """Ends, lengths, preemption, prefix hits and requests of other kinds beside them."""
    dice, (num_blocks, seats, budget) = random.Random(seed), sizes
    requests, wanted = [], {}
    for number, prompt in enumerate(prompts(7, seed)):
        most = dice.randint(1, 9)
        said = alone(prompt, most)
        end = dice.choice([said[-1], 50])
        least = min(most, dice.choice([0, 0, 3]))
        guide = MockGuide() if dice.random() < 0.15 else None
        ends = [] if guide else [end]
        requests.append(request(number, prompt, most, ends, guide=guide, min_tokens=0 if guide else least))
        stop = next((at for at, token in enumerate(said, 1) if token == end and at > least), most)
        wanted[number] = alone_with_guide(prompt, most) if guide else said[:stop]
    running = engine(
        num_blocks=num_blocks,
        seats=seats,
        budget=budget,
        async_scheduling=async_scheduling,
        caching=caching,
        num_decode_steps=steps,
    )
    assert finish(running, requests) == wanted


@BOTH
@pytest.mark.parametrize("length", range(1, 9))
def test_an_end_token_ends_the_request_and_nothing_after_it_is_computed(length, async_scheduling):
    said, other = alone([1, 2, 3], 8), alone([5, 5], 8)
    if said[length - 1] in said[: length - 1]:
        pytest.skip("that token comes earlier")
    runner = MockRunner()
    running = engine(runner, async_scheduling=async_scheduling, num_decode_steps=4)
    ended, goes_on = request(0, [1, 2, 3], 8, ends=[said[length - 1]]), request(1, [5, 5], 8)
    assert finish(running, [ended, goes_on]) == {0: said[:length], 1: other}
    assert ended.finish_reason == ("stop" if length < 8 or said[7] in ended.end_token_ids else "length")
    surplus = runner.computed - (3 + length - 1) - (2 + 8 - 1)
    assert surplus <= (4 if length == 1 and async_scheduling else 0)  # the end was found after the next call had begun


def test_a_finished_request_leaves_only_blocks_that_hold_what_they_say():
    """The next one finds all but the slots that were never written; `finish` looks into every block."""
    said = alone(range(6), 8)
    running = engine(num_decode_steps=8)
    finish(running, [request(0, range(6), 8, ends=[said[4]])])
    again = request(1, [*range(6), *said[:5], 3], 4)
    assert finish(running, [again]) == expected([again])
    assert again.metrics.num_cached_tokens == 10


def test_no_request_is_preempted_for_blocks_of_later_tokens():
    runner, calls = watched()
    running = engine(runner, num_blocks=4, num_decode_steps=8, caching=False)
    requests = [request(0, [1, 2, 3], 6), request(1, [4, 5, 6], 6)]  # two blocks of four each
    assert finish(running, requests) == expected(requests)
    assert running.stats().preemptions == 0
    assert max(map(max, calls)) > 1


def test_fewer_steps_run_where_blocks_are_free_for_fewer():
    runner, calls = watched()
    running = engine(runner, num_blocks=3, num_decode_steps=8, caching=False)
    requests = [request(0, [1, 2], 10), request(1, [4, 5], 10)]
    assert finish(running, requests) == expected(requests)
    assert [2, 2] in calls
    assert running.stats().preemptions == 1


def test_a_waiting_prompt_makes_it_one_step():
    runner, calls = watched()
    running = engine(runner, seats=1, num_decode_steps=4)
    requests = [request(0, [1, 2], 7), request(1, [3], 7)]
    assert finish(running, requests) == expected(requests)
    assert calls[:7] == [[1]] * 7  # the other one waits for the seat
    assert [4] in calls[7:]


def test_a_new_prompt_waits_for_the_call_that_runs_and_no_other():
    runner, calls = watched()
    running, first = engine(runner, num_decode_steps=4), request(0, [1, 2], 30)
    running.add(first)
    for _ in range(3):
        running.step()
    assert calls == [[1], [4], [4]]
    running.add(request(1, [3, 4, 5], 2))
    running.step()
    assert calls[3:] == [[1, 1]]


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"min_tokens": 8}, {"logprobs": -1}],
    ids=str,
)
def test_options_that_the_device_cannot_carry_on_run_one_step_at_a_time(options):
    runner, calls = watched()
    requests = [request(0, [1, 2], 8, **options), request(1, [3, 4], 8)]
    assert finish(engine(runner, num_decode_steps=4), requests) == expected(requests)
    assert max(map(max, calls)) == 1


def test_once_min_tokens_are_reached_several_steps_run():
    runner, calls = watched()
    one = request(0, [1, 2], 9, min_tokens=4)
    assert finish(engine(runner, num_decode_steps=4), [one]) == expected([one])
    assert calls == [[1]] * 4 + [[4], [1]]


def test_a_streamed_request_keeps_its_own_limit():
    runner, calls = watched()
    running = engine(runner, num_decode_steps=8, num_streamed_steps=2)
    streamed, other = request(0, [1, 2], 5), request(1, [3, 4], 20)
    other.streamed = False
    assert finish(running, [streamed, other]) == expected([streamed, other])
    assert calls[:3] == [[1, 1], [2, 2], [2, 2]]
    assert [8] in calls


@BOTH
def test_a_row_that_is_not_finite_in_a_later_step_ends_with_an_error_and_its_neighbours_do_not_change(async_scheduling):
    bad = MockRunner(bad_rows=lambda entry: entry.request.number == 1 and entry.start > 12)
    requests = [request(number, [*range(10), number]) for number in range(4)]
    found = finish(engine(bad, async_scheduling=async_scheduling, num_decode_steps=4), requests)
    assert requests[1].error == "the model's logits are not finite (NaN or infinity)"
    assert found.pop(1) == alone(requests[1].prompt_token_ids, 5)[:3]
    assert found == expected([requests[0], *requests[2:]])


@given(SEEDS, st.booleans(), st.integers(6, 20), st.sampled_from([2, 4, 8]))
def test_whoever_is_given_up_at_any_moment_changes_nothing_for_the_others(seed, async_scheduling, num_blocks, steps):
    dice = random.Random(seed)
    running = engine(
        num_blocks=num_blocks, seats=3, budget=6, async_scheduling=async_scheduling, num_decode_steps=steps
    )
    requests = [request(number, prompt, 12) for number, prompt in enumerate(prompts(8, seed))]
    for each in requests:
        running.add(each)
    while running.has_work:
        running.step()
        if dice.random() < 0.2:
            running.end(dice.choice(requests))
        running.blocks.check_integrity()
    check_idle(running)
    for each in requests:
        said = alone(each.prompt_token_ids, 12)
        assert each.output_token_ids == said[: len(each.output_token_ids)]
        assert each.finish_reason == "abort" or len(each.output_token_ids) == 12


@BOTH
@pytest.mark.parametrize("moment", ["before_launch", "before_collect"])
@given(seed=SEEDS)
def test_a_call_that_fails_ends_its_requests_alone(moment, async_scheduling, seed):
    dice, failed = random.Random(seed), set[int]()

    def fail(step: Sequence[Scheduled]) -> None:
        if dice.random() < 0.15:
            failed.update(entry.request.number for entry in step)
            raise RuntimeError("out of memory")

    runner = MockRunner()
    setattr(runner, moment, fail)
    requests = [request(number, prompt, 12) for number, prompt in enumerate(prompts(6, seed))]
    running = engine(runner, num_blocks=14, seats=4, budget=9, async_scheduling=async_scheduling, num_decode_steps=4)
    finish(running, requests)
    for each in requests:
        said = alone(each.prompt_token_ids, 12)
        assert each.output_token_ids == said[: len(each.output_token_ids)]
        assert len(each.output_token_ids) == 12 or each.number in failed
