import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_mock import (
    VOCAB,
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

from dcpjax.engine.engine import Engine
from dcpjax.engine.request import Request, Status
from dcpjax.engine.result import StepResult, TokenScores
from dcpjax.engine.scheduler import PrefillBudget, Scheduled

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@BOTH
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4], list(range(8)), list(range(21))])
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_a_request_alone_gets_the_models_tokens(prompt, max_tokens, async_scheduling):
    one = request(0, prompt, max_tokens)
    assert finish(engine(async_scheduling=async_scheduling), [one]) == {0: alone(prompt, max_tokens)}
    assert one.output_token_ids == alone(prompt, max_tokens)
    assert one.finish_reason == "length"
    assert one.stop_reason is None


SIZES = [(6, 1, 3), (6, 8, 5), (7, 4, 1), (9, 3, 16), (50, 8, 64), (50, 8, 4)]  # blocks, seats, budget


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(SIZES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([None, PrefillBudget(tokens=2), PrefillBudget(tokens=4, cost_per_position=0.3)]),
)
def test_results_depend_on_nothing_but_the_prompt(seed, sizes, async_scheduling, caching, least_copied, prefill_budget):
    """Batching, chunking, caching, preemption, the order of arrival and that of steps change no token."""
    num_blocks, seats, budget = sizes
    running = engine(
        num_blocks=num_blocks,
        seats=seats,
        budget=budget,
        async_scheduling=async_scheduling,
        caching=caching,
        least_copied=least_copied,
        prefill_budget=prefill_budget,
    )
    requests = [request(number, prompt, max_tokens=8) for number, prompt in enumerate(prompts(6, seed))]
    random.Random(seed).shuffle(requests)
    assert finish(running, requests) == expected(requests)


@BOTH
def test_a_pool_so_small_that_every_younger_request_is_preempted_gives_the_same_tokens(async_scheduling):
    requests = [request(number, [number, 1, 2], max_tokens=16) for number in range(5)]
    found = finish(engine(num_blocks=5, async_scheduling=async_scheduling), requests)
    assert found == expected(requests)
    assert requests[0].metrics.preemptions == 0
    assert all(each.metrics.preemptions for each in requests[1:])


@BOTH
def test_requests_that_arrive_later_join_the_running_ones(async_scheduling):
    running = engine(async_scheduling=async_scheduling)
    first, second = request(0, [1, 2, 3]), request(1, [4, 5])
    running.add(first)
    running.step()
    finish(running, [second])
    assert [first.output_token_ids, second.output_token_ids] == [alone([1, 2, 3], 5), alone([4, 5], 5)]


def test_the_next_step_is_launched_before_the_last_one_is_collected():
    events = []
    runner = MockRunner(
        before_launch=lambda step: events.append("launch"), before_collect=lambda step: events.append("collect")
    )
    finish(engine(runner), [request(0, [1, 2], max_tokens=3)])
    assert events == ["launch", "launch", "collect", "launch", "collect", "collect"]


def test_without_async_scheduling_every_step_is_collected_at_once():
    events = []
    runner = MockRunner(
        before_launch=lambda step: events.append("launch"), before_collect=lambda step: events.append("collect")
    )
    finish(engine(runner, async_scheduling=False), [request(0, [1, 2], max_tokens=3)])
    assert events == ["launch", "collect"] * 3


# --- what the cache holds already


@BOTH
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_the_same_prompt_twice_gives_the_same_tokens_and_computes_one(length, async_scheduling):
    runner = MockRunner()
    running = engine(runner, async_scheduling=async_scheduling)
    prompt = list(range(length))
    finish(running, [request(0, prompt, 1)])
    first = runner.computed
    again = request(1, prompt, 1)
    assert finish(running, [again]) == {1: alone(prompt, 1)}
    assert runner.computed - first == 1
    assert again.metrics.num_cached_tokens == length - 1


@pytest.mark.parametrize("least_copied", [1, 2])
@given(seed=st.integers(0, 2**32 - 1))
def test_copies_of_partly_filled_blocks_change_no_token(least_copied, seed):
    runner, dice = MockRunner(), random.Random(seed)
    running = engine(runner, num_blocks=12, least_copied=least_copied, budget=8)
    stem = [dice.randrange(VOCAB) for _ in range(11)]
    requests = [
        request(number, stem[: dice.randint(1, 11)] + [dice.randrange(2)] * dice.randint(1, 3), max_tokens=6)
        for number in range(10)
    ]
    assert finish(running, requests) == expected(requests)


def test_copies_are_made_of_blocks_whose_owner_still_writes_to_them():
    runner = MockRunner()
    running = engine(runner)
    owner, copier = request(0, [1, 2, 3, 4, 5, 6], 12), request(1, [1, 2, 3, 4, 5, 6, 7], 12)
    running.add(owner)
    running.step()
    assert finish(running, [copier])[1] == alone(copier.prompt_token_ids, 12)
    assert runner.copied == 1
    assert owner.output_token_ids == alone(owner.prompt_token_ids, 12)


@BOTH
@pytest.mark.parametrize("length", [1, 4, 6, 8, 13])
def test_completions_of_one_prompt_compute_it_once(length, async_scheduling):
    runner, prompt = MockRunner(), list(range(length))
    first = request(0, prompt, 4)
    requests = [first, *(request(number, prompt, 4, first_sibling=first) for number in range(1, 5))]
    found = finish(engine(runner, async_scheduling=async_scheduling, budget=4), requests)
    assert found == expected(requests)
    assert runner.computed == length + 4 + 5 * 3
    assert [each.metrics.num_cached_tokens for each in requests] == [0] + [length - 1] * 4


@BOTH
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_completions_live_on_when_one_of_them_is_given_up(number, steps, async_scheduling):
    first = request(0, list(range(9)), 4)
    requests = [first, *(request(number, list(range(9)), 4, first_sibling=first) for number in range(1, 4))]
    running = engine(async_scheduling=async_scheduling, budget=4)
    for each in requests:
        running.add(each)
    for _ in range(steps):
        running.step()
    running.end(requests[number])
    finish(running)
    left = [each for each in requests if each.number != number]
    assert {each.number: each.output_token_ids for each in left} == expected(left)


def test_a_salt_keeps_requests_apart_and_changes_no_token():
    runner = MockRunner()
    running = engine(runner)
    prompt = list(range(9))
    requests = [request(number, prompt, 3, salt=salt) for number, salt in enumerate(["a", "b", None, "a"])]
    for each in requests:
        assert finish(running, [each]) == {each.number: alone(prompt, 3)}
    assert [each.metrics.num_cached_tokens for each in requests] == [0, 0, 0, 8]


def test_the_cache_is_reset_only_while_nobody_owns_a_block():
    running = engine()
    one = request(0, list(range(9)))
    running.add(one)
    running.step()
    assert not running.reset_prefix_cache()
    assert running.stats().num_used_blocks == 3
    finish(running)
    assert running.stats().num_cached_blocks
    assert running.reset_prefix_cache()
    assert running.stats().num_cached_blocks == 0
    again = request(1, list(range(9)))
    finish(running, [again])
    assert again.metrics.num_cached_tokens == 0


# --- how a request ends


@BOTH
def test_an_end_token_ends_the_request_and_nothing_after_it_is_reported(async_scheduling):
    said = alone([1, 2], 8)
    for index in range(8):
        runner = MockRunner()
        running = engine(runner, async_scheduling=async_scheduling)
        eos = request(0, [1, 2], max_tokens=8, ends=[said[index]])
        length = said.index(said[index]) + 1
        assert finish(running, [eos]) == {0: said[:length]}
        assert eos.finish_reason == "stop"
        assert eos.stop_reason is None
        assert eos.metrics.num_generated_tokens == running.stats().generated_tokens == length
        surplus = async_scheduling and length < 8  # the step after the end has begun before the end is known
        assert runner.computed == 2 + length - 1 + surplus


@BOTH
def test_what_comes_after_an_end_found_late_uses_the_cache_rightly(async_scheduling):
    """The step after the end still writes to a block that is free by then, or the next request's."""
    said = alone([1, 2], 8)
    running = engine(num_blocks=3, async_scheduling=async_scheduling)
    requests = [request(number, [1, 2], max_tokens=8, ends=[said[3]]) for number in range(4)]
    requests.append(request(4, [*[1, 2], *said[:4]], max_tokens=5))
    found = finish(running, requests)
    assert found == {**dict.fromkeys(range(4), said[: said.index(said[3]) + 1]), 4: alone([1, 2, *said[:4]], 5)}


def test_a_stop_token_of_the_users_is_named_as_the_reason():
    said = alone([1, 2], 8)
    stopped = request(0, [1, 2], max_tokens=8, stop_token_ids=[said[3]])
    finish(engine(), [stopped])
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == said[3]


@BOTH
def test_an_end_token_within_min_tokens_does_not_end_the_request(async_scheduling):
    said = alone([1, 3], 6)
    assert len(set(said)) == 6
    for end, length in [(said[2], 6), (said[3], 4)]:
        held = request(0, [1, 3], max_tokens=6, ends=[end], min_tokens=3)
        assert finish(engine(async_scheduling=async_scheduling), [held]) == {0: said[:length]}


def test_every_moment_of_a_request_is_noted_in_order():
    one = request(0, [1, 2], max_tokens=3)
    finish(engine(), [one])
    metrics = one.metrics
    moments = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    ]
    assert moments == sorted(moments)
    assert metrics.num_generated_tokens == 3


def test_a_request_that_can_never_fit_is_refused_and_leaves_the_engine_as_it_was():
    running = engine(num_blocks=2)
    with pytest.raises(ValueError, match=r"KV cache of 8 tokens \(2 blocks of 4\), but 6 \+ 5 tokens need 3 blocks"):
        running.add(request(0, range(6)))
    assert finish(running, [request(1, [1], max_tokens=2)]) == {1: alone([1], 2)}


def test_an_engine_with_nothing_to_do_may_still_have_a_step_on_its_way():
    running = engine()
    one = request(0, [1, 2], max_tokens=8)
    running.add(one)
    running.step()
    running.end(one)
    assert not running.has_work
    assert running.reset_prefix_cache()
    found = finish(running, [request(1, [1, 2], max_tokens=8), request(2, [3], max_tokens=8)])
    assert found == {1: alone([1, 2], 8), 2: alone([3], 8)}
    assert one.output_token_ids == []


@BOTH
def test_giving_the_last_request_up_again_and_again_loses_nothing(async_scheduling):
    running = engine(num_blocks=4, seats=1, async_scheduling=async_scheduling)
    for number, steps in enumerate([1, 2, 3, 1, 0, 2]):
        given_up = request(number, [number, 2, 3, 4, 5], max_tokens=8)
        running.add(given_up)
        for _ in range(steps):
            running.step()
        running.end(given_up)
        said = alone(given_up.prompt_token_ids, 8)
        assert given_up.output_token_ids == said[: len(given_up.output_token_ids)]
        check_idle(running)
    assert finish(running, [request(9, [1, 2])]) == {9: alone([1, 2], 5)}


# --- what the next token may be


@BOTH
@pytest.mark.parametrize("num_blocks", [5, 50])
def test_a_guide_sees_every_token_before_the_next_is_chosen(num_blocks, async_scheduling):
    guided = [request(number, [number, 8, 9], 6, guide=MockGuide()) for number in range(3)]
    free = [request(number, [number, 8, 9], 6) for number in range(3, 6)]
    finish(engine(num_blocks=num_blocks, async_scheduling=async_scheduling), [*guided, *free])
    for each in guided:
        assert each.output_token_ids == alone_with_guide(each.prompt_token_ids, 6)
    assert {each.number: each.output_token_ids for each in free} == expected(free)


def guided_to(last: Sequence[int]) -> list[int]:
    """A prompt whose guided text comes to one of these tokens before its eighth."""
    texts = {number: alone_with_guide([number], 8) for number in range(200)}
    return next([number] for number, text in texts.items() if text[-1] in last and len(text) < 8)


@BOTH
def test_a_guide_that_cannot_go_on_ends_its_request_and_no_other(async_scheduling):
    dead_end = guided_to([VOCAB - 3, VOCAB - 2])
    guided, free = request(0, dead_end, 8, guide=MockGuide()), request(1, [5], 8)
    finish(engine(async_scheduling=async_scheduling), [guided, free])
    assert guided.finish_reason == "error"
    assert guided.error == "the text must rise, but cannot go on"
    assert guided.output_token_ids == alone_with_guide(dead_end, 8)
    assert free.output_token_ids == alone([5], 8)


@BOTH
def test_a_guide_whose_text_is_complete_ends_its_request(async_scheduling):
    prompt = guided_to([VOCAB - 1])
    guided = request(0, prompt, 8, guide=MockGuide())
    assert finish(engine(async_scheduling=async_scheduling), [guided]) == {0: alone_with_guide(prompt, 8)}
    assert (guided.finish_reason, guided.stop_reason, guided.error) == ("stop", None, None)


@BOTH
def test_a_bad_word_of_several_tokens_waits_for_its_tokens_too(async_scheduling):
    launched = []
    runner = MockRunner(before_launch=lambda step: launched.append([e.request.num_in_flight for e in step]))
    running, one = engine(runner, async_scheduling=async_scheduling), request(0, [1, 2], 4)
    one.bad_words = ((1, 2),)
    assert finish(running, [one]) == {0: alone([1, 2], 4)}
    assert launched == [[0]] * 4


class ScoringRunner(MockRunner):
    """Gives every token and every prompt token a score."""

    def collect(self, launched: Any) -> StepResult:
        result = super().collect(launched)
        result.scores = [scores(token) for token in result.tokens]
        result.prompt_scores = [
            {position: scores(position) for position in range(entry.start + 1, entry.start + entry.count)}
            for entry in launched.step
        ]
        return result


def scores(token: int) -> TokenScores:
    return TokenScores(token, -1.0, 1, [], [])


@BOTH
def test_scores_come_with_their_tokens_and_none_with_an_error(async_scheduling):
    bad = ScoringRunner(bad_rows=lambda entry: entry.request.number == 1 and entry.start > 3)
    requests = [request(0, [1, 2, 3], 4, ends=[alone([1, 2, 3], 4)[2]]), request(1, [4, 5, 6], 4)]
    finish(engine(bad, async_scheduling=async_scheduling), requests)
    for each in requests:
        assert [score.token_id for score in each.scores] == each.output_token_ids
        assert sorted(each.prompt_scores) == [1, 2]
    assert requests[1].finish_reason == "error"


# --- what goes wrong


def failing(number: int) -> Callable[[Sequence[Scheduled]], None]:
    """Steps that run this request fail as a whole."""

    def fail(step: Sequence[Scheduled]) -> None:
        if any(entry.request.number == number for entry in step):
            raise RuntimeError("out of memory")

    return fail


@BOTH
@pytest.mark.parametrize("loses_cache", [False, True])
@pytest.mark.parametrize("moment", ["before_launch", "before_collect"])
def test_a_failing_step_ends_its_requests_with_the_message_and_the_others_go_on(moment, loses_cache, async_scheduling):
    runner = MockRunner(loses_cache=loses_cache)
    setattr(runner, moment, failing(1))
    running = engine(runner, seats=2, async_scheduling=async_scheduling)
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(4))]
    found = finish(running, requests)
    for failed in requests[:2]:
        assert failed.finish_reason == "error"
        assert failed.error == "RuntimeError: out of memory"
        assert failed.metrics.finished_time is not None
        assert found[failed.number] == []
    assert {number: found[number] for number in (2, 3)} == expected(requests[2:])
    assert all(each.finish_reason == "length" for each in requests[2:])


@pytest.mark.parametrize("loses_cache", [False, True])
@pytest.mark.parametrize("moment", ["before_launch", "before_collect"])
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(6, 12))
def test_a_step_that_fails_while_another_is_on_its_way_takes_no_stranger_along(moment, loses_cache, seed, num_blocks):
    dice, failed = random.Random(seed), list[set[int]]()

    def fail(step: Sequence[Scheduled]) -> None:
        if dice.random() < 0.15:
            failed.append({entry.request.number for entry in step})
            raise RuntimeError("out of memory")

    runner = MockRunner(loses_cache=loses_cache)
    setattr(runner, moment, fail)
    requests = [request(number, prompt, 8) for number, prompt in enumerate(prompts(6, seed))]
    finish(engine(runner, num_blocks=num_blocks, seats=3, budget=5), requests)
    for each in requests:
        said = alone(each.prompt_token_ids, 8)
        if each.finish_reason == "error":
            assert each.number in set().union(*failed)
            assert each.output_token_ids == said[: len(each.output_token_ids)]
        else:
            assert each.output_token_ids == said


def test_a_request_that_was_preempted_and_then_fails_does_not_run_again():
    """Its token is on its way while it has to give way; then that step fails."""
    calls = []

    def fail(step: Sequence[Scheduled]) -> None:
        calls.append([entry.request.number for entry in step])
        if len(calls) == 1:
            raise RuntimeError("out of memory")

    running = engine(MockRunner(before_collect=fail), num_blocks=3)
    requests = [request(0, [1, 2, 3, 4], 4), request(1, [5, 6, 7, 8], 4), request(2, [9, 9, 9, 9], 4)]
    finish(running, requests)
    assert calls == [[0, 1, 2]]
    assert [each.finish_reason for each in requests] == ["error"] * 3
    assert all(each.output_token_ids == [] for each in requests)
    assert requests[2].metrics.preemptions == 1


def test_nothing_that_a_failed_step_may_have_spoilt_is_given_to_others():
    runner, requests = MockRunner(), [request(number, range(11)) for number in range(2)]

    def spoil(step: Sequence[Scheduled]) -> None:
        if step[0].request is requests[0]:
            runner.run_queue()
            runner.slots = dict.fromkeys(runner.slots)
            raise RuntimeError("out of memory")

    runner.before_collect = spoil
    running = engine(runner)
    finish(running, requests[:1])
    assert requests[0].finish_reason == "error"
    assert finish(running, requests[1:]) == expected(requests[1:])


def test_an_engine_that_always_fails_still_comes_to_an_end():
    def fail(step: Sequence[Scheduled]) -> None:
        raise ValueError("never")

    requests = [request(number, prompt) for number, prompt in enumerate(prompts(5))]
    assert not any(finish(engine(MockRunner(before_launch=fail), seats=2), requests).values())
    assert {each.error for each in requests} == {"ValueError: never"}


@BOTH
def test_a_row_that_is_not_finite_ends_with_an_error_and_its_neighbours_do_not_change(async_scheduling):
    bad = MockRunner(bad_rows=lambda entry: entry.request.number == 1 and entry.start > 12)
    requests = [request(number, [*range(10), number]) for number in range(4)]
    found = finish(engine(bad, async_scheduling=async_scheduling), requests)
    assert requests[1].finish_reason == "error"
    assert requests[1].error == "the model's logits are not finite (NaN or infinity)"
    assert found.pop(1) == alone(requests[1].prompt_token_ids, 5)[:3]
    assert found == expected([requests[0], *requests[2:]])


@BOTH
def test_a_prompt_that_is_not_finite_halfway_ends_at_once(async_scheduling):
    bad = MockRunner(bad_rows=lambda entry: entry.request.number == 0)
    requests = [request(0, range(20)), request(1, [1, 2])]
    found = finish(engine(bad, budget=4, async_scheduling=async_scheduling), requests)
    assert requests[0].finish_reason == "error"
    assert found == {0: [], 1: alone([1, 2], 5)}


@BOTH
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("bad_start", [0, 8, 11])
def test_blocks_that_are_not_finite_are_not_given_to_others(bad_start, given_up, async_scheduling):
    """Not even if the request has left them by the time that its step is found to be bad."""
    runner = MockRunner(bad_rows=lambda entry: entry.request.number == 0 and entry.start >= bad_start)
    running = engine(runner, async_scheduling=async_scheduling, budget=8)
    bad, good = request(0, range(11), 8), request(1, range(11), 8)
    running.add(bad)
    while running.has_work:
        running.step()
        if given_up and bad.num_computed > bad_start:
            running.end(bad)
            running.step()
    assert bad.finish_reason == ("abort" if given_up and async_scheduling else "error")
    assert finish(running, [good]) == {1: alone(range(11), 8)}
    assert good.metrics.num_cached_tokens == 0


def test_nor_are_those_of_a_request_that_was_preempted_meanwhile():
    running = engine(MockRunner(bad_rows=lambda entry: entry.request.number == 1), num_blocks=3)
    old, bad, good = request(0, [1, 2, 3, 4], 4), request(1, range(5, 13), 4), request(2, range(5, 13), 4)
    finish(running, [old, bad])
    assert (bad.finish_reason, bad.metrics.preemptions) == ("error", 1)
    assert finish(running, [good]) == {2: alone(range(5, 13), 4)}
    assert old.output_token_ids == alone([1, 2, 3, 4], 4)


def test_each_ended_request_is_reported_exactly_once():
    running = engine(MockRunner(before_launch=failing(2)), seats=2)
    for number, prompt in enumerate(prompts(5)):
        running.add(request(number, prompt, max_tokens=3))
    ended = []
    while running.has_work:
        ended += [changed.number for changed in running.step() if changed.status is Status.FINISHED]
    assert sorted(ended) == [0, 1, 2, 3, 4]


@BOTH
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_giving_a_request_up_frees_its_blocks_and_leaves_the_others_alone(steps, async_scheduling):
    running = engine(budget=6, async_scheduling=async_scheduling, caching=False)
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(4))]
    for each in requests:
        running.add(each)
    for _ in range(steps):
        running.step()
    used, mine = running.blocks.num_used, len(running.blocks.table(1))
    running.end(requests[1])
    running.blocks.check_integrity()
    assert running.blocks.num_used == used - mine
    assert running.blocks.table(1) == []
    assert requests[1].finish_reason == "abort"
    assert requests[1].metrics.finished_time is not None
    finish(running)
    left = [requests[number] for number in (0, 2, 3)]
    assert {each.number: each.output_token_ids for each in left} == expected(left)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(6, 20))
def test_whoever_is_given_up_at_any_moment_changes_nothing_for_the_others(seed, async_scheduling, num_blocks):
    dice = random.Random(seed)
    running = engine(num_blocks=num_blocks, seats=3, budget=6, async_scheduling=async_scheduling)
    requests = [request(number, prompt, 8) for number, prompt in enumerate(prompts(8, seed))]
    for each in requests:
        running.add(each)
    while running.has_work:
        running.step()
        if dice.random() < 0.3:
            running.end(dice.choice(requests))
        running.blocks.check_integrity()
    check_idle(running)
    for each in requests:
        said = alone(each.prompt_token_ids, 8)
        assert each.output_token_ids == said[: len(each.output_token_ids)]
        assert each.finish_reason == "abort" or len(each.output_token_ids) == 8


def test_ending_a_finished_request_again_keeps_its_reason():
    one = request(0, [1, 2], max_tokens=2)
    running = engine()
    finish(running, [one])
    running.end(one)
    assert one.finish_reason == "length"
    assert running.blocks.num_used == 0


# --- what is cut short


class Interruption:
    """Raises KeyboardInterrupt the n-th time that any of the moments it watches is reached."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, *ignored: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(*args: Any) -> Any:
            self()
            found = method(*args)
            self()
            return found

        return interrupted


def interruptible(moment: int, **options: Any) -> tuple[Engine, MockRunner]:
    """An engine interrupted once: before or after a launch or a collect, or around the scheduler's own work."""
    interrupt = Interruption(moment)
    runner = MockRunner(before_launch=interrupt, after_launch=interrupt, loses_cache=options.pop("loses_cache"))
    running = engine(runner, **options)
    runner.collect = interrupt.around(runner.collect)  # type: ignore[method-assign]
    running.scheduler.schedule = interrupt.around(running.scheduler.schedule)  # type: ignore[method-assign]
    running.scheduler.update = interrupt.around(running.scheduler.update)  # type: ignore[method-assign]
    return running, runner


def run_interrupted(running: Engine) -> bool:
    """Run to the end, whatever happens; whether it was interrupted."""
    was_interrupted = False
    while running.has_work:
        try:
            running.step()
        except KeyboardInterrupt:
            was_interrupted = True
            running.recover()
        running.blocks.check_integrity()
    check_idle(running)
    return was_interrupted


@pytest.mark.parametrize(("loses_cache", "num_blocks"), [(False, 9), (True, 9), (False, 5)])
@BOTH
def test_an_interrupted_step_is_computed_again_and_changes_no_token(loses_cache, num_blocks, async_scheduling):
    moment, interrupted = 1, True
    while interrupted:
        running, _ = interruptible(
            moment, loses_cache=loses_cache, async_scheduling=async_scheduling, num_blocks=num_blocks, seats=3, budget=6
        )
        first = request(0, [1, 2, 3, 4, 5], 6, ends=[alone([1, 2, 3, 4, 5], 6)[4]])
        requests = [
            first,
            request(1, [1, 2, 3, 4, 5], 6, first_sibling=first),
            request(2, [1, 2, 9], 6, guide=MockGuide()),
            request(3, [1, 2, 3, 4, 5, 6, 7], 6),
            request(4, [1, 2, 3, 4, 5, 6, 7], 6),
        ]
        for each in requests:
            running.add(each)
        interrupted = run_interrupted(running)
        assert first.output_token_ids == alone([1, 2, 3, 4, 5], 6)[:5]
        assert requests[2].output_token_ids == alone_with_guide([1, 2, 9], 6)
        rest = [requests[1], *requests[3:]]
        assert {each.number: each.output_token_ids for each in rest} == expected(rest)
        moment += 1
    assert moment > 50


@BOTH
def test_an_interrupted_caller_may_give_its_requests_up_before_the_engine_recovers(async_scheduling):
    for moment in range(1, 40):
        running, _ = interruptible(
            moment, loses_cache=False, async_scheduling=async_scheduling, num_blocks=9, seats=3, budget=6
        )
        mine, other = request(0, [1, 2, 3, 4, 5], 6), request(1, [1, 2, 3, 4, 5, 6], 6)
        running.add(mine)
        running.add(other)
        try:
            while running.has_work:
                running.step()
        except KeyboardInterrupt:
            running.end(mine)
            running.recover()
        again = request(2, other.prompt_token_ids, 6)
        finish(running, [again])
        assert other.output_token_ids == again.output_token_ids == alone(other.prompt_token_ids, 6)


def test_recovering_when_nothing_was_cut_short_changes_nothing():
    running = engine()
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(3))]
    for each in requests:
        running.add(each)
    running.step()
    running.recover()
    assert [each.metrics.preemptions for each in requests] == [0, 0, 0]
    finish(running)
    assert {each.number: each.output_token_ids for each in requests} == expected(requests)


def test_a_token_on_its_way_to_a_request_that_had_to_give_way_is_drawn_again_after_an_interrupt():
    runner = MockRunner()
    running = engine(runner, num_blocks=3)
    requests = [request(number, [number, 2, 3, 4], 4) for number in range(3)]
    for each in requests:
        running.add(each)
    running.step()
    runner.before_launch = Interruption(1)
    with pytest.raises(KeyboardInterrupt):
        running.step()
    assert requests[2].status is Status.WAITING
    running.recover()
    finish(running)
    assert {each.number: each.output_token_ids for each in requests} == expected(requests)


def test_a_request_that_ended_in_the_step_cut_short_has_ended():
    running = engine(async_scheduling=False)
    one, other = request(0, [1, 2], 2), request(1, [3, 4], 3)
    running.add(one)
    running.add(other)
    running.step()
    end = running.end

    def interrupted(request: Request) -> None:
        running.end = end  # type: ignore[method-assign]
        raise KeyboardInterrupt

    running.end = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        running.step()
    running.recover()
    assert one.output_token_ids == alone([1, 2], 2)
    assert list(running.scheduler.waiting) == [other]
    finish(running)
    assert other.output_token_ids == alone([3, 4], 3)


# --- numbers


def test_the_numbers_of_a_run_are_right():
    runner = MockRunner()
    running = engine(runner, num_blocks=10, budget=8)
    prompt = list(range(9))
    running.add(request(0, prompt, 3))
    running.add(request(1, [9, 9], 3))
    running.add(request(2, [8, 8], 3))
    running.step()
    stats = running.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    assert (stats.num_blocks, stats.num_used_blocks, stats.block_size) == (10, 3, 4)
    assert stats.tokens_per_rank == (8,)
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (1, 8, 0)
    assert (stats.prefix_queries, stats.prefix_hits) == (9, 0)
    finish(running)
    finish(running, [request(3, prompt, 1)])
    stats = running.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.tokens_per_rank == (0,)
    assert stats.prompt_tokens == 9 + 2 + 2 + 1
    assert stats.generated_tokens == 3 + 3 + 3 + 1
    assert (stats.prefix_queries, stats.prefix_hits) == (9 + 2 + 2 + 9, 8)
    assert stats.num_cached_blocks == 3 + 1 + 1 + 1
    assert stats.preemptions == 0
    assert stats.steps == runner.steps
    assert stats.seconds >= 0.0
    runner.compile_seconds, running.counters.seconds = 0.25, 1.0
    assert (running.stats().compile_seconds, running.stats().seconds) == (0.25, 0.75)


def test_cached_tokens_are_those_of_the_first_time_a_request_ran():
    running = engine(num_blocks=4, budget=64)
    old, young = request(0, [1, 2, 3], 9), request(1, [4, 5, 6, 7, 8], 9)
    finish(running, [old, young])
    assert young.metrics.preemptions
    assert young.metrics.num_cached_tokens == 0
    assert running.stats().preemptions == young.metrics.preemptions


# --- many


def soak(count: int, seed: int) -> None:
    """Requests that begin alike stream through a small pool; some are given up, some wait for others."""
    dice = random.Random(seed)
    running = engine(
        num_blocks=40,
        seats=8,
        budget=24,
        least_copied=2,
        prefill_budget=PrefillBudget(tokens=8, cost_per_position=0.01),
    )
    stems = [[dice.randrange(VOCAB) for _ in range(dice.randint(2, 24))] for _ in range(12)]
    requests = [drawn(number, stems, dice) for number in range(count)]
    coming, given_up = requests[::-1], set(dice.sample(range(count), count // 10))
    while coming or running.has_work:
        while coming and len(running.scheduler.waiting) < 8:
            running.add(coming.pop())
        for changed in running.step():
            if changed.number in given_up and dice.random() < 0.3:
                running.end(changed)
    check_idle(running)
    check_soak(running, requests, given_up)


def drawn(number: int, stems: list[list[int]], dice: random.Random) -> Request:
    stem = dice.choice(stems)
    prompt = stem[: dice.randint(1, len(stem))] + [dice.randrange(VOCAB) for _ in range(dice.randint(0, 6))]
    ends = [dice.randrange(VOCAB)] if dice.random() < 0.5 else []
    salt = "salt" if dice.random() < 0.1 else None
    return request(number, prompt, dice.randint(1, 24), ends, salt=salt, priority=dice.choice([0, 0, 0, 1]))


def check_soak(running: Engine, requests: Sequence[Request], given_up: set[int]) -> None:
    for each in requests:
        said = alone(each.prompt_token_ids, each.max_tokens)
        end = next((index for index, token in enumerate(said) if token in each.end_token_ids), len(said) - 1)
        if each.finish_reason == "abort":
            assert each.number in given_up
            assert each.output_token_ids == said[: len(each.output_token_ids)]
        else:
            assert each.output_token_ids == said[: end + 1]
    stats, count = running.stats(), len(requests)
    preempted = sum(each.metrics.preemptions > 0 for each in requests)
    assert count * 0.01 < preempted < count * 0.2
    assert stats.prefix_hits > stats.prefix_queries / 10


def test_a_stream_of_requests_leaves_nothing_behind():
    soak(300, seed=0)


@pytest.mark.slow
def test_a_long_stream_of_requests_leaves_nothing_behind():
    soak(5000, seed=1)
