import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.blocks import BlockManager
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.outputs import RequestMetrics
from dcpjax.request import Request, Status
from dcpjax.sampling_params import SamplingParams
from dcpjax.scheduler import Scheduled, Scheduler

BLOCK = 4


def scheduler(num_blocks: int = 100, max_num_seqs: int = 8, max_num_batched_tokens: int = 16) -> Scheduler:
    geometry = CacheGeometry(block_size=BLOCK)
    return Scheduler(BlockManager(num_blocks), geometry, max_num_seqs, max_num_batched_tokens)


def request(number: int, prompt: int, max_tokens: int = 4) -> Request:
    ids = list(range(prompt))
    return Request(number, ids, SamplingParams(), max_tokens, 0, frozenset(), RequestMetrics(0.0))


def add(plan: Scheduler, *prompts: int, max_tokens: int = 4) -> list[Request]:
    made = [request(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
    for each in made:
        plan.add(each)
    return made


def advance(plan: Scheduler) -> list[Scheduled]:
    """One step as the engine takes it: a token for each entry that samples, finished requests released."""
    step = plan.schedule()
    plan.update(step)
    for entry in step:
        if entry.samples:
            entry.request.output_token_ids.append(0)
            if len(entry.request.output_token_ids) == entry.request.max_tokens:
                entry.request.finish("length")
                plan.release(entry.request)
    check(plan)
    return step


def check(plan: Scheduler) -> None:
    """What holds between any two steps."""
    plan.blocks.check_integrity()
    assert len(plan.running) <= plan.max_num_seqs
    assert plan.blocks.num_used == sum(len(plan.blocks.table(each.number)) for each in plan.running)
    assert all(each.status is Status.RUNNING for each in plan.running)
    assert all(each.status is Status.WAITING and each.num_computed == 0 for each in plan.waiting)
    waiting = [each.number for each in plan.waiting]
    assert waiting == sorted(waiting)
    assert not plan.running or not waiting or max(each.number for each in plan.running) < waiting[0]


def shown(step: Sequence[Scheduled]) -> list[tuple[int, int, int]]:
    return [(entry.request.number, entry.start, entry.count) for entry in step]


def test_prompts_share_the_token_budget_in_order_of_arrival():
    plan = scheduler(max_num_batched_tokens=16)
    add(plan, 6, 7, 8)
    assert shown(advance(plan)) == [(0, 0, 6), (1, 0, 7), (2, 0, 3)]


def test_a_long_prompt_runs_in_chunks_and_samples_only_after_the_last():
    plan = scheduler(max_num_batched_tokens=4)
    (long,) = add(plan, 10)
    for chunk, generated in [((0, 0, 4), 0), ((0, 4, 4), 0), ((0, 8, 2), 1), ((0, 10, 1), 2)]:
        assert shown(advance(plan)) == [chunk]
        assert len(long.output_token_ids) == generated


def test_decodes_go_first_and_prompts_take_what_is_left():
    plan = scheduler(max_num_batched_tokens=8)
    add(plan, 3, 2)
    advance(plan)
    plan.add(request(2, 20))
    assert shown(advance(plan)) == [(0, 3, 1), (1, 2, 1), (2, 0, 6)]
    assert shown(advance(plan)) == [(0, 4, 1), (1, 3, 1), (2, 6, 6)]


@pytest.mark.parametrize(
    "prompts",
    [
        (1, 1, 4),
        (15, 9, 2),
        pytest.param((5, 3)),
        pytest.param((4, 1, 1)),
    ],
)
def test_entries_of_one_token_come_before_all_longer_ones(prompts):
    """The device lays decodes out first, one tile each: `batch.build` asks for this order."""
    plan = scheduler(max_num_batched_tokens=6)
    add(plan, *prompts)
    while plan.has_work:
        counts = [entry.count for entry in advance(plan)]
        assert counts == sorted(counts, key=lambda count: count > 1)


def test_never_more_requests_run_than_there_are_seats():
    plan = scheduler(max_num_seqs=2)
    add(plan, 2, 2, 2, max_tokens=2)
    assert shown(advance(plan)) == [(0, 0, 2), (1, 0, 2)]
    assert shown(advance(plan)) == [(0, 2, 1), (1, 2, 1)]
    assert shown(advance(plan)) == [(2, 0, 2)]


def test_a_request_gets_blocks_for_all_its_tokens_as_it_grows():
    plan = scheduler()
    (growing,) = add(plan, 3, max_tokens=6)
    tables = []
    for _ in range(6):
        tables.append(len(plan.blocks.table(0)))
        advance(plan)
    assert tables == [0, 1, 1, 2, 2, 2]
    assert plan.blocks.num_used == 0
    assert growing.status is Status.FINISHED


def test_the_youngest_gives_its_blocks_back_when_the_pool_is_full():
    plan = scheduler(num_blocks=3)
    old, middle, young = add(plan, 4, 4, 4)
    advance(plan)
    assert shown(advance(plan)) == [(0, 4, 1)]  # its second block was the youngest's; then the middle's gave way
    assert plan.running == [old]
    assert list(plan.waiting) == [middle, young]
    assert [each.metrics.preemptions for each in (old, middle, young)] == [0, 1, 1]


def test_a_preempted_request_keeps_its_output_and_is_computed_again_from_the_start():
    plan = scheduler(num_blocks=3)
    old, young = add(plan, 4, 6, max_tokens=3)
    advance(plan)
    assert shown(advance(plan)) == [(0, 4, 1)]
    assert young.status is Status.WAITING
    assert young.output_token_ids == [0]
    advance(plan)
    assert old.status is Status.FINISHED
    assert shown(advance(plan)) == [(1, 0, 7)]  # six of the prompt and the one it had generated


def test_a_request_that_is_itself_the_youngest_gives_way_to_its_elders():
    plan = scheduler(num_blocks=3)
    old, young = add(plan, 6, 4)
    advance(plan)
    assert shown(advance(plan)) == [(0, 6, 1)]
    assert list(plan.waiting) == [young]
    assert plan.running == [old]


def test_a_preempted_request_has_no_part_in_the_step_that_preempts_it():
    """The elder has two tokens pending, so it is planned after the younger, whose entry must go again."""
    plan = scheduler(num_blocks=3)
    elder, younger = add(plan, 4, 4)
    advance(plan)
    elder.output_token_ids.append(0)
    assert shown(plan.schedule()) == [(0, 4, 2)]
    assert list(plan.waiting) == [younger]


def test_preempted_requests_come_back_in_their_order_before_newer_ones():
    plan = scheduler(num_blocks=6)
    add(plan, 2, 2, 2, 2)
    advance(plan)
    plan.add(request(4, 2))
    plan.preempt_all()
    check(plan)
    assert [entry.request.number for entry in advance(plan)] == [0, 1, 2, 3, 4]


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one():
    plan = scheduler(num_blocks=4, max_num_batched_tokens=16)
    add(plan, 8, 12, 1)
    assert shown(advance(plan)) == [(0, 0, 8)]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    plan = scheduler(num_blocks=3)
    sentence = (
        "prompt and max_tokens must fit the KV cache of 12 tokens (3 blocks of 4), but 10 + 3 tokens need 4 blocks; "
        "raise kv_cache_memory_bytes or shorten the request"
    )
    with pytest.raises(ValueError) as refusal:
        plan.add(request(0, 10, max_tokens=3))
    assert str(refusal.value) == sentence
    assert not plan.has_work


def test_a_request_that_just_fits_runs_to_its_end():
    plan = scheduler(num_blocks=3)
    (exact,) = add(plan, 9, max_tokens=3)
    while plan.has_work:
        assert advance(plan)
    assert len(exact.output_token_ids) == 3
    assert exact.metrics.preemptions == 0


@pytest.mark.parametrize("place", ["waiting", "running"])
def test_released_requests_leave_no_trace(place):
    plan = scheduler(max_num_seqs=1)
    running, waiting = add(plan, 4, 4)
    advance(plan)
    gone, left = (running, waiting) if place == "running" else (waiting, running)
    plan.release(gone)
    plan.release(gone)  # once more does no harm
    check(plan)
    assert [*plan.running, *plan.waiting] == [left]


def simulate(seed: int) -> None:
    """Requests of random sizes arriving at random moments, some given up, on a pool that is often too small."""
    dice = random.Random(seed)
    plan = scheduler(dice.randint(3, 12), dice.randint(1, 5), dice.randint(1, 12))
    capacity = plan.blocks.num_blocks * BLOCK
    everyone: list[Request] = []
    steps = computed = 0
    while len(everyone) < 8 or plan.has_work:
        if len(everyone) < 8 and (not plan.has_work or dice.random() < 0.3):
            prompt = dice.randint(1, capacity - 1)
            everyone.append(request(len(everyone), prompt, dice.randint(1, min(12, capacity - prompt))))
            plan.add(everyone[-1])
        if dice.random() < 0.02:
            given_up = dice.choice(everyone)
            if given_up.status is not Status.FINISHED:
                given_up.finish("abort")
                plan.release(given_up)
                continue
        step = advance(plan)
        assert step, "nothing was scheduled although work is waiting"
        assert sum(entry.count for entry in step) <= plan.max_num_batched_tokens
        assert len({entry.request.number for entry in step}) == len(step)
        assert step[0].request.number <= min((each.number for each in plan.waiting), default=8)
        steps, computed = steps + 1, computed + sum(entry.count for entry in step)
        assert steps < 3000, "someone starves"
    assert plan.blocks.num_used == 0
    for each in everyone:
        assert each.finish_reason == "abort" or len(each.output_token_ids) == each.max_tokens


@given(st.integers(0, 2**32 - 1))
def test_every_mixture_of_requests_runs_to_its_end(seed):
    simulate(seed)
