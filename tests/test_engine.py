import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine import Engine
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.outputs import RequestMetrics
from dcpjax.request import Request, Status
from dcpjax.sampling_params import SamplingParams
from dcpjax.scheduler import Scheduled

VOCAB = 50
GEOMETRY = CacheGeometry(block_size=4)


@dataclass
class MockRunner:
    """Remembers each token in the slot of the block it was given; the next one follows from all it finds there."""

    geometry: CacheGeometry = GEOMETRY
    slots: dict[int, int] = field(default_factory=dict)
    loses_cache: bool = False
    before: Callable[[Sequence[Scheduled]], None] = lambda step: None
    bad_rows: Callable[[Scheduled], bool] = lambda entry: False
    steps: int = 0

    def run(self, step: Sequence[Scheduled]) -> tuple[np.ndarray, np.ndarray]:
        self.steps += 1
        self.before(step)
        finite = np.array([not self.bad_rows(entry) for entry in step])
        return np.array([self.next_token(entry) for entry in step], np.int32), finite

    def next_token(self, entry: Scheduled) -> int:
        stop = entry.start + entry.count
        for position, token in enumerate(entry.request.tokens(entry.start, stop), entry.start):
            self.slots[self.slot(entry, position)] = token
        return follow([self.slots[self.slot(entry, position)] for position in range(stop)])

    def slot(self, entry: Scheduled, position: int) -> int:
        block, offset = divmod(position, self.geometry.block_size)
        return entry.block_table[block] * self.geometry.block_size + offset

    def restore_cache(self) -> bool:
        if self.loses_cache:
            self.slots.clear()
        return self.loses_cache


def follow(tokens: Sequence[int]) -> int:
    """The model: any change in any token, or in their order, changes what comes next."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says when nobody else is there."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(follow(tokens))
    return tokens[len(prompt) :]


def engine(runner: MockRunner | None = None, num_blocks: int = 50, seats: int = 8, budget: int = 16) -> Engine:
    return Engine(runner or MockRunner(), num_blocks=num_blocks, max_num_seqs=seats, max_num_batched_tokens=budget)


def request(number: int, prompt: Sequence[int], max_tokens: int = 5, ends: Sequence[int] = (), **params) -> Request:
    options = SamplingParams(max_tokens=max_tokens, **params)
    ends = frozenset([*ends, *options.stop_tokens])
    return Request(number, list(prompt), options, max_tokens, 0, ends, RequestMetrics(0.0))


def prompts(count: int, seed: int = 0, most: int = 12) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(dice.randint(1, most))] for _ in range(count)]


def finish(running: Engine, requests: Sequence[Request] = ()) -> dict[int, list[int]]:
    """Add requests, run to the end, and collect what the engine reported, by request."""
    for each in requests:
        running.add(each)
    news: dict[int, list[int]] = {each.number: [] for each in requests}
    while running.has_work:
        for changed in running.step():
            news[changed.number] = list(changed.output_token_ids)
        running.blocks.check_integrity()
    assert running.blocks.num_used == 0
    return news


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4], list(range(21))])
def test_a_request_alone_gets_the_models_tokens(prompt):
    one = request(0, prompt, max_tokens=6)
    assert finish(engine(), [one]) == {0: alone(prompt, 6)}
    assert one.output_token_ids == alone(prompt, 6)
    assert one.finish_reason == "length"
    assert one.stop_reason is None


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(6, 1, 3), (6, 8, 5), (7, 4, 1), (9, 3, 16), (50, 8, 64)]),  # blocks, seats, budget
)
def test_results_do_not_depend_on_batching_chunking_or_preemption(seed, sizes):
    given_prompts = prompts(6, seed)
    requests = [request(number, prompt, max_tokens=8) for number, prompt in enumerate(given_prompts)]
    found = finish(engine(None, *sizes), requests)
    assert found == {number: alone(prompt, 8) for number, prompt in enumerate(given_prompts)}


def test_a_pool_so_small_that_every_younger_request_is_preempted_gives_the_same_tokens():
    given_prompts = [[number, 1, 2] for number in range(5)]
    requests = [request(number, prompt, max_tokens=16) for number, prompt in enumerate(given_prompts)]
    found = finish(engine(num_blocks=5), requests)
    assert found == {number: alone(prompt, 16) for number, prompt in enumerate(given_prompts)}
    assert requests[0].metrics.preemptions == 0
    assert all(each.metrics.preemptions for each in requests[1:])


def test_requests_that_arrive_later_join_the_running_ones():
    running, found = engine(), {}
    first, second = request(0, [1, 2, 3]), request(1, [4, 5])
    running.add(first)
    running.step()
    found = finish(running, [second])
    assert found[0] == alone([1, 2, 3], 5)
    assert found[1] == alone([4, 5], 5)


# --- how a request ends


def test_an_end_token_ends_the_request_and_is_reported():
    said = alone([1, 2], 8)
    eos = request(0, [1, 2], max_tokens=8, ends=[said[3]])
    assert finish(engine(), [eos]) == {0: said[: said.index(said[3]) + 1]}
    assert eos.finish_reason == "stop"
    assert eos.stop_reason is None


def test_a_stop_token_of_the_users_is_named_as_the_reason():
    said = alone([1, 2], 8)
    stopped = request(0, [1, 2], max_tokens=8, stop_token_ids=[said[3]])
    finish(engine(), [stopped])
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == said[3]


def test_an_end_token_within_min_tokens_does_not_end_the_request():
    said = alone([1, 2], 6)
    assert len(set(said)) == 6
    for end, length in [(said[2], 6), (said[3], 4)]:
        held = request(0, [1, 2], max_tokens=6, ends=[end], min_tokens=3)
        assert finish(engine(), [held]) == {0: said[:length]}


def test_every_moment_of_a_request_is_noted_in_order():
    one = request(0, [1, 2], max_tokens=3)
    finish(engine(), [one])
    metrics = one.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.time_to_first_token == metrics.first_token_time


def test_a_request_that_can_never_fit_is_refused_and_leaves_the_engine_as_it_was():
    running = engine(num_blocks=2)
    with pytest.raises(ValueError, match=r"KV cache of 8 tokens \(2 blocks of 4\), but 6 \+ 5 tokens need 3 blocks"):
        running.add(request(0, range(6)))
    assert finish(running, [request(1, [1], max_tokens=2)]) == {1: alone([1], 2)}


# --- what goes wrong


def raise_when(number: int) -> Callable[[Sequence[Scheduled]], None]:
    """The step that first runs this request fails as a whole."""

    def before(step: Sequence[Scheduled]) -> None:
        if any(entry.request.number == number for entry in step):
            raise RuntimeError("out of memory")

    return before


@pytest.mark.parametrize("loses_cache", [False, True])
def test_a_failing_step_ends_its_requests_with_the_message_and_the_others_go_on(loses_cache):
    runner = MockRunner(before=raise_when(1), loses_cache=loses_cache)
    running = engine(runner, seats=2)
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(4))]
    found = finish(running, requests)
    for failed in requests[:2]:
        assert failed.finish_reason == "error"
        assert failed.error == "RuntimeError: out of memory"
        assert found[failed.number] == []
    for number in (2, 3):
        assert found[number] == alone(requests[number].prompt_token_ids, 5)
        assert requests[number].finish_reason == "length"


@pytest.mark.parametrize("loses_cache", [False, True])
def test_recovery_computes_running_requests_again_only_if_the_cache_is_gone(loses_cache):
    runner = MockRunner(loses_cache=loses_cache)
    running = engine(runner)
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(3))]
    for each in requests:
        running.add(each)
    running.step()
    running.recover()
    assert [each.metrics.preemptions for each in requests] == [int(loses_cache)] * 3
    finish(running)
    assert [each.output_token_ids for each in requests] == [alone(each.prompt_token_ids, 5) for each in requests]


def test_an_engine_that_always_fails_still_comes_to_an_end():
    def before(step: Sequence[Scheduled]) -> None:
        raise ValueError("never")

    requests = [request(number, prompt) for number, prompt in enumerate(prompts(5))]
    assert not any(finish(engine(MockRunner(before=before), seats=2), requests).values())
    assert {each.error for each in requests} == {"ValueError: never"}


def test_a_row_that_is_not_finite_ends_with_an_error_and_its_neighbours_do_not_change():
    bad = MockRunner(bad_rows=lambda entry: entry.request.number == 1 and len(entry.request.output_token_ids) == 2)
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(4))]
    found = finish(engine(bad), requests)
    assert requests[1].finish_reason == "error"
    assert requests[1].error == "the model's logits are not finite (NaN or infinity)"
    assert found[1] == alone(requests[1].prompt_token_ids, 5)[:2]
    for number in (0, 2, 3):
        assert found[number] == alone(requests[number].prompt_token_ids, 5)


def test_a_prompt_that_is_not_finite_halfway_ends_at_once():
    bad = MockRunner(bad_rows=lambda entry: entry.request.number == 0)
    requests = [request(0, range(20)), request(1, [1, 2])]
    found = finish(engine(bad, budget=4), requests)
    assert requests[0].finish_reason == "error"
    assert found == {0: [], 1: alone([1, 2], 5)}


def test_each_ended_request_is_reported_exactly_once():
    runner = MockRunner(before=raise_when(2))
    running = engine(runner, seats=2)
    for number, prompt in enumerate(prompts(5)):
        running.add(request(number, prompt, max_tokens=3))
    ended = []
    while running.has_work:
        ended += [changed.number for changed in running.step() if changed.status is Status.FINISHED]
    assert sorted(ended) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_giving_a_request_up_frees_its_blocks_and_leaves_the_others_alone(steps):
    running = engine(budget=6)
    requests = [request(number, prompt) for number, prompt in enumerate(prompts(4))]
    for each in requests:
        running.add(each)
    for _ in range(steps):
        running.step()
    used = running.blocks.num_used
    mine = len(running.blocks.table(1))
    running.end(requests[1])
    running.blocks.check_integrity()
    assert running.blocks.num_used == used - mine
    assert running.blocks.table(1) == []
    assert requests[1].finish_reason == "abort"
    assert requests[1].metrics.finished_time is not None
    finish(running)
    for number in (0, 2, 3):
        assert requests[number].output_token_ids == alone(requests[number].prompt_token_ids, 5)


def test_ending_a_finished_request_again_keeps_its_reason():
    one = request(0, [1, 2], max_tokens=2)
    running = engine()
    finish(running, [one])
    running.end(one)
    assert one.finish_reason == "length"
    assert running.blocks.num_used == 0
