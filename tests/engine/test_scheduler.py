import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.blocks import BlockManager
from dcpjax.engine.request import Request, Status
from dcpjax.engine.scheduler import SCORED_CHUNK, PrefillBudget, Scheduled, Scheduler, StepLimits
from dcpjax.models.kv_cache import CacheGeometry

BLOCK = 4
STRANGER = 99  # owns blocks in some tests, without being a request


def scheduler(
    num_blocks: int = 100,
    seats: int = 8,
    budget: int = 16,
    *,
    geometry: CacheGeometry | None = None,
    prefill_budget: PrefillBudget | None = None,
    caching: bool = True,
    least_copied: int = 1,
) -> Scheduler:
    limits = StepLimits(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefill_budget=prefill_budget,
        enable_prefix_caching=caching,
        least_copied=least_copied,
    )
    return Scheduler(BlockManager(num_blocks), geometry or CacheGeometry(block_size=BLOCK), limits)


def request(
    number: int,
    prompt: int | Sequence[int],
    max_tokens: int = 4,
    priority: int = 0,
    first_sibling: Request | None = None,
    **params,
) -> Request:
    """A length stands for a prompt that no other request shares."""
    ids = [1000 * (number + 1) + position for position in range(prompt)] if isinstance(prompt, int) else list(prompt)
    made = Request(number=number, prompt_token_ids=ids, params=SamplingParams(**params), max_tokens=max_tokens)
    made.priority, made.first_sibling = priority, first_sibling
    return made


def add(plan: Scheduler, *prompts: int | Sequence[int], max_tokens: int = 4) -> list[Request]:
    made = [request(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
    for each in made:
        plan.add(each)
    return made


def advance(plan: Scheduler) -> list[Scheduled]:
    """One step as the engine takes it: a token for each entry that samples, finished requests released."""
    step = plan.schedule()
    plan.update(step)
    for entry in step:
        entry.request.metrics.first_scheduled_time = 1.0
        if entry.samples:
            entry.request.num_in_flight -= 1
            entry.request.output_token_ids.append(0)
            if len(entry.request.output_token_ids) == entry.request.max_tokens:
                entry.request.finish("length")
                plan.release(entry.request)
    check(plan)
    return step


def finish(plan: Scheduler) -> None:
    while plan.has_work:
        assert advance(plan)
    assert plan.blocks.num_used == 0


def check(plan: Scheduler) -> None:
    """What holds between any two steps."""
    plan.blocks.check_integrity()
    seats = [each.seat for each in plan.running]
    assert sorted(seats + plan._seats) == list(range(plan.limits.max_num_seqs))
    owners = [STRANGER, *(each.number for each in plan.running)]
    owned = {block for number in owners for block in plan.blocks.table(number)}
    assert plan.blocks.num_used == len(owned)
    assert all(each.status is Status.RUNNING for each in plan.running)
    assert all(each.status is Status.WAITING and each.num_computed == 0 and each.seat == -1 for each in plan.waiting)
    assert [each.order for each in plan.waiting] == sorted(each.order for each in plan.waiting)


def shown(step: Sequence[Scheduled]) -> list[tuple[int, int, int]]:
    return [(entry.request.number, entry.start, entry.count) for entry in step]


def test_prompts_share_the_token_budget_in_order_of_arrival():
    plan = scheduler(budget=16)
    add(plan, 6, 7, 8)
    assert shown(advance(plan)) == [(0, 0, 6), (1, 0, 7), (2, 0, 3)]


def test_a_long_prompt_runs_in_chunks_and_samples_only_after_the_last():
    plan = scheduler(budget=4)
    (long,) = add(plan, 10)
    for chunk, generated in [((0, 0, 4), 0), ((0, 4, 4), 0), ((0, 8, 2), 1), ((0, 10, 1), 2)]:
        assert shown(advance(plan)) == [chunk]
        assert len(long.output_token_ids) == generated


def test_decodes_go_first_and_prompts_take_what_is_left():
    plan = scheduler(budget=8)
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
    plan = scheduler(budget=6)
    add(plan, *prompts)
    while plan.has_work:
        counts = [entry.count for entry in advance(plan)]
        assert counts == sorted(counts, key=lambda count: count > 1)


def test_never_more_requests_run_than_there_are_seats():
    plan = scheduler(seats=2)
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


def test_a_preempted_request_keeps_its_output_and_without_a_cache_is_computed_again_from_the_start():
    plan = scheduler(num_blocks=3, caching=False)
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
    plan = scheduler(num_blocks=4, budget=16)
    add(plan, 8, 12, 1)
    assert shown(advance(plan)) == [(0, 0, 8)]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    plan = scheduler(num_blocks=3)
    sentence = (
        "prompt and max_tokens must fit the KV cache of 12 tokens (3 blocks of 4), but 11 + 3 tokens need 4 blocks; "
        "raise kv_cache_memory_bytes or shorten the request"
    )
    with pytest.raises(ValueError) as refusal:
        plan.add(request(0, 11, max_tokens=3))
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
    plan = scheduler(seats=1)
    running, waiting = add(plan, 4, 4)
    advance(plan)
    gone, left = (running, waiting) if place == "running" else (waiting, running)
    plan.release(gone)
    plan.release(gone)  # once more does no harm
    check(plan)
    assert [*plan.running, *plan.waiting] == [left]


# --- what the cache already holds


LONG = list(range(10))  # two blocks and a half


def cached(*prompts: Sequence[int], **options) -> Scheduler:
    """A scheduler through which these prompts have gone, one after another."""
    plan = scheduler(**options)
    for number, prompt in enumerate(prompts):
        plan.add(request(100 + number, prompt, max_tokens=1))
        finish(plan)
    return plan


@pytest.mark.parametrize(
    ("prompt", "blocks", "copied"),
    [
        (LONG, 2, 1),  # the last token runs in any case
        (LONG[:8], 1, 3),
        (LONG[:5], 1, 0),
        (LONG[:4], 0, 3),
        (LONG[:1], 0, 0),
        ([*LONG, 99, 98], 2, 2),
        ([*LONG[:7], 99, 98], 1, 3),
        ([99, *LONG], 0, 0),
    ],
)
def test_admission_reuses_whole_blocks_and_copies_the_beginning_of_the_next(prompt, blocks, copied):
    plan = cached(LONG)
    (hit,) = add(plan, prompt)
    (entry,) = plan.schedule()
    assert (entry.start, entry.count) == (4 * blocks + copied, len(prompt) - 4 * blocks - copied)
    assert entry.samples
    assert (entry.copy is not None) == bool(copied)
    if entry.copy is not None:
        source, target = entry.copy
        assert target == plan.blocks.table(0)[blocks]
        assert source not in plan.blocks.table(0)[:blocks]
    assert hit.metrics.num_cached_tokens == entry.start
    assert (plan.counters.prefix_queries, plan.counters.prefix_hits) == (len(LONG) + len(prompt), entry.start)


def test_requests_that_begin_alike_share_blocks_and_are_counted_once():
    plan = scheduler(budget=100)
    plan.add(request(0, LONG))
    advance(plan)
    plan.add(request(1, [*LONG[:8], 7, 7]))
    assert shown(advance(plan)) == [(0, 10, 1), (1, 8, 2)]
    assert plan.blocks.table(0)[:2] == plan.blocks.table(1)[:2]
    assert plan.blocks.num_used == 4
    assert plan.tokens_per_rank() == (8 + 3 + 2,)
    plan.blocks.check_integrity()


def test_a_request_fits_as_soon_as_the_blocks_it_does_not_share_are_free():
    plan = scheduler(num_blocks=5)
    plan.add(request(0, [*LONG, 1], max_tokens=2))
    advance(plan)
    assert plan.blocks.num_free == 2
    stranger, relative = request(1, 11), request(2, [*LONG[:8], 7, 7, 7, 7])
    plan.add(stranger)
    assert shown(plan.schedule()) == [(0, 11, 1)]
    plan.release(stranger)
    plan.add(relative)
    assert [entry.request.number for entry in plan.schedule()] == [0, 2]
    assert plan.blocks.num_free == 1


def test_a_copied_block_may_be_overwritten_by_the_request_that_copies_it():
    plan = cached(LONG, num_blocks=3)
    plan.add(request(0, [0, 1, 9, 9, 9, 9, 9, 9, 9], max_tokens=3))
    (entry,) = plan.schedule()
    assert entry.copy is not None
    assert entry.copy[0] in plan.blocks.table(0)
    assert entry.start == 2
    plan.blocks.check_integrity()


def test_a_copy_that_was_never_made_is_not_said_to_be_there():
    plan = cached(LONG, num_blocks=6)
    plan.add(request(0, [0, 1, 2, 9, 9]))
    (entry,) = plan.schedule()
    assert entry.copy is not None
    plan.preempt_all()  # before the step was started
    assert plan.blocks.content(entry.copy[1]) is None


def test_salted_requests_share_only_among_themselves():
    plan = cached(LONG)
    for number, (salt, start) in enumerate([("a", 0), ("b", 0), ("a", 9), (None, 9)]):
        salted = request(number, LONG, max_tokens=1)
        salted.cache_salt = salt
        plan.add(salted)
        assert shown(advance(plan)) == [(number, start, 10 - start)]


def test_nothing_is_shared_where_prefix_caching_is_off():
    plan = cached(LONG, caching=False)
    plan.add(request(0, LONG))
    assert shown(plan.schedule()) == [(0, 0, 10)]
    assert plan.blocks.num_cached == 0


def test_what_was_generated_is_found_too():
    plan = scheduler()
    (first,) = add(plan, LONG, max_tokens=4)
    finish(plan)
    plan.add(request(1, [*LONG, *first.output_token_ids, 5]))
    (entry,) = plan.schedule()
    assert entry.start == 13  # the last generated token was never computed


def test_a_preempted_request_finds_its_own_blocks_again():
    plan = scheduler(num_blocks=5)
    old, young = add(plan, 8, 8, max_tokens=5)
    advance(plan)
    assert shown(advance(plan)) == [(0, 8, 1)]
    assert young.status is Status.WAITING
    while old.status is not Status.FINISHED:
        advance(plan)
    assert shown(advance(plan)) == [(1, 8, 1)]
    assert young.metrics.preemptions == 1
    assert young.metrics.num_cached_tokens == 0  # its own blocks are no news


def test_a_request_preempted_halfway_through_its_prompt_finds_all_that_had_run():
    plan = scheduler(budget=6)
    add(plan, LONG)
    advance(plan)
    plan.preempt_all()
    assert shown(advance(plan)) == [(0, 6, 4)]


def test_cached_tokens_are_not_counted_as_computed():
    plan = cached(LONG)
    add(plan, LONG, max_tokens=1)
    finish(plan)
    assert plan.counters.prompt_tokens == 10 + 1


# --- completions of one prompt


def siblings(plan: Scheduler, count: int = 3, prompt: Sequence[int] = LONG, **params) -> list[Request]:
    first = request(0, prompt, **params)
    made = [first, *(request(number, prompt, first_sibling=first, **params) for number in range(1, count))]
    for each in made:
        plan.add(each)
    return made


def test_completions_wait_for_their_prompt_and_then_share_it():
    plan = scheduler(budget=6)
    siblings(plan)
    assert shown(advance(plan)) == [(0, 0, 6)]
    assert shown(advance(plan)) == [(0, 6, 4)]
    assert shown(advance(plan)) == [(0, 10, 1), (1, 9, 1), (2, 9, 1)]
    assert len({tuple(plan.blocks.table(number)[:2]) for number in range(3)}) == 1
    assert len({plan.blocks.table(number)[2] for number in range(3)}) == 3


def test_those_that_wait_for_their_prompt_are_overtaken():
    plan = scheduler(budget=6)
    siblings(plan)
    advance(plan)
    plan.add(request(7, 3))
    assert shown(advance(plan)) == [(0, 6, 4), (7, 0, 2)]


@pytest.mark.parametrize("end", ["finished", "not cached"])
def test_completions_do_not_wait_in_vain(end):
    plan = scheduler(caching=end != "not cached")
    first, *_ = siblings(plan)
    if end == "finished":
        first.finish("abort")
        plan.release(first)
    assert 1 in [entry.request.number for entry in plan.schedule()]


def test_completions_do_not_wait_for_a_block_to_fill_after_their_prompt_ran_again():
    """The prompt runs for the second time together with what had been generated, so no step ends where it does."""
    plan = scheduler(least_copied=64)
    first, *_ = siblings(plan, prompt=LONG[:5])
    plan.blocks.allocate(STRANGER, plan.blocks.num_free - 2)  # nobody else can be admitted
    advance(plan)
    advance(plan)
    plan.preempt_all()
    plan.blocks.free(STRANGER)
    assert [entry.request.number for entry in advance(plan)] == [0]
    assert first.num_known == 8
    assert [entry.request.number for entry in advance(plan)] == [0, 1, 2]


def test_only_the_first_completion_scores_the_prompt_and_runs_all_of_it():
    plan = cached(LONG)
    siblings(plan, prompt_logprobs=1)
    assert shown(advance(plan)) == [(0, 0, 10)]
    assert shown(advance(plan)) == [(0, 10, 1), (1, 9, 1), (2, 9, 1)]


def test_a_scored_prompt_runs_in_chunks_of_its_own():
    plan = scheduler(200, budget=1000)
    plan.add(request(0, 2 * SCORED_CHUNK + 1, prompt_logprobs=0))
    plan.add(request(1, 300))
    assert [entry.count for entry in advance(plan)] == [SCORED_CHUNK, 300]
    assert shown(advance(plan)) == [(1, 300, 1), (0, SCORED_CHUNK, SCORED_CHUNK)]
    assert shown(advance(plan))[0] == (0, 2 * SCORED_CHUNK, 1)


# --- priorities


def test_lower_priorities_are_served_first_and_equals_in_order_of_arrival():
    plan = scheduler(seats=1)
    for number, priority in enumerate([5, 0, -3, 0]):
        plan.add(request(number, 2, max_tokens=1, priority=priority))
    assert [shown(advance(plan))[0][0] for _ in range(4)] == [2, 1, 3, 0]


def test_the_least_important_gives_way_even_if_it_is_the_oldest():
    plan = scheduler(num_blocks=3)
    for number, priority in enumerate([9, 0, 0]):
        plan.add(request(number, 4, priority=priority))
    advance(plan)
    step = advance(plan)
    assert shown(step) == [(1, 4, 1)]
    assert [each.number for each in plan.waiting] == [2, 0]


def test_nobody_is_admitted_in_a_step_that_preempted():
    plan = scheduler(num_blocks=4)
    add(plan, 4, 7, max_tokens=3)
    advance(plan)
    plan.add(request(2, 1, priority=-1, max_tokens=1))
    plan.blocks.allocate(STRANGER, plan.blocks.num_free)
    assert shown(advance(plan)) == [(0, 4, 1)]  # its second block was the younger one's
    assert [each.number for each in plan.waiting] == [2, 1]
    assert plan.blocks.num_free == 1
    assert [entry.request.number for entry in advance(plan)] == [0, 2]


# --- prompts beside decodes


def decoding(plan: Scheduler, count: int, max_tokens: int = 50) -> None:
    for number in range(count):
        plan.add(request(number, 1, max_tokens))
    advance(plan)


@pytest.mark.parametrize(
    ("decodes", "prompt_tokens"), [(1, 7), (4, 4), (5, 11), (8, 8), (9, 23), (0, 64)], ids=lambda value: str(value)
)
def test_prompts_fill_the_bucket_that_decodes_began_and_at_least_half_of_it(decodes, prompt_tokens):
    plan = scheduler(seats=20, budget=64, prefill_budget=PrefillBudget(tokens=8))
    decoding(plan, decodes)
    plan.add(request(90, 100))
    step = advance(plan)
    assert sum(entry.count for entry in step if entry.count > 1) == prompt_tokens
    assert len(step) == decodes + 1


def test_prompt_work_beside_decodes_shrinks_as_the_context_grows():
    plan = scheduler(budget=64, prefill_budget=PrefillBudget(tokens=16, cost_per_position=0.1))
    decoding(plan, 1)
    plan.add(request(1, 60))
    counts = [advance(plan)[-1].count for _ in range(6)]
    assert counts == [15, 6, 4, 4, 3, 3]


def test_two_prompts_share_the_work_and_the_second_waits_for_what_is_left():
    plan = scheduler(budget=64, prefill_budget=PrefillBudget(tokens=16))
    decoding(plan, 1)
    plan.add(request(1, 10))
    plan.add(request(2, 30))
    plan.add(request(3, 30))
    assert shown(advance(plan)) == [(0, 1, 1), (1, 0, 10), (2, 0, 5)]


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_one_prompt_advances_however_late_in_its_context(tokens):
    plan = scheduler(budget=64, prefill_budget=PrefillBudget(tokens=tokens, cost_per_position=100.0))
    decoding(plan, 1)
    plan.add(request(1, 30, max_tokens=1))
    plan.add(request(2, 30, max_tokens=1))
    advance(plan)
    (prompt,) = [each for each in plan.running if each.number == 1]
    while prompt.num_pending > 1:
        assert [entry.count for entry in advance(plan)] == [1, 1]


def test_a_request_that_waits_for_its_token_is_not_made_to_wait_for_a_long_prompt():
    """A guide has to see a token before the next: in between, the request has no part in the step."""
    plan = scheduler(budget=64, prefill_budget=PrefillBudget(tokens=8))
    decoding(plan, 1)
    (guided,) = plan.running
    guided.bad_words = ((1, 2),)
    guided.num_in_flight, guided.output_token_ids = 1, []
    plan.add(request(1, 60))
    assert shown(plan.schedule()) == [(1, 0, 8)]


def test_prompts_are_held_back_only_for_decodes_that_somebody_watches():
    for streamed, always, prompt_tokens in ((True, False, 7), (False, False, 63), (False, True, 7)):
        plan = scheduler(budget=64, prefill_budget=PrefillBudget(tokens=8, always=always))
        decoding(plan, 1)
        plan.running[0].streamed = streamed
        plan.add(request(90, 100))
        assert [entry.count for entry in advance(plan)] == [1, prompt_tokens]


def test_without_a_pace_prompts_take_all_that_decodes_leave():
    plan = scheduler(budget=64)
    decoding(plan, 3)
    plan.add(request(90, 100))
    assert [entry.count for entry in advance(plan)] == [1, 1, 1, 61]


# --- everything at once


def simulate(seed: int) -> None:
    """Requests of random sizes arriving at random moments, some given up, on a pool that is often too small."""
    dice = random.Random(seed)
    prefill_budget = dice.choice(
        [None, PrefillBudget(tokens=dice.randint(1, 8), cost_per_position=dice.choice([0.0, 0.05, 1.0]))]
    )
    geometry = dice.choice([CacheGeometry(block_size=BLOCK, dcp=2, interleave=interleave) for interleave in (1, 2)])
    plan = scheduler(
        dice.randint(3, 12),
        dice.randint(1, 5),
        dice.randint(1, 12),
        geometry=geometry,
        prefill_budget=prefill_budget,
        caching=dice.random() < 0.7,
        least_copied=dice.randint(1, 3),
    )
    capacity = plan.blocks.num_blocks * BLOCK
    everyone: list[Request] = []
    steps = 0
    while len(everyone) < 8 or plan.has_work:
        if len(everyone) < 8 and (not plan.has_work or dice.random() < 0.3):
            everyone.append(drawn(dice, everyone, capacity))
            plan.add(everyone[-1])
        if dice.random() < 0.02:
            given_up = dice.choice(everyone)
            if given_up.status is not Status.FINISHED:
                given_up.finish("abort")
                plan.release(given_up)
                continue
        check_step(plan, advance(plan))
        steps += 1
        assert steps < 3000, "someone starves"
    assert plan.blocks.num_used == 0
    for each in everyone:
        assert each.finish_reason == "abort" or len(each.output_token_ids) == each.max_tokens


def drawn(dice: random.Random, everyone: Sequence[Request], capacity: int) -> Request:
    """A prompt that is new, or begins like another, or is another completion of its prompt."""
    length, number = dice.randint(1, capacity - 1), len(everyone)
    prompt, first_sibling = [1000 * number + position for position in range(length)], None
    if everyone and dice.random() < 0.5:
        other = dice.choice(everyone)
        first_sibling = other if dice.random() < 0.5 and other.first_sibling is None else None
        prompt = (
            other.prompt_token_ids
            if first_sibling
            else (other.prompt_token_ids[: dice.randint(1, 8)] + prompt)[:length]
        )
    most = min(12, capacity - len(prompt))
    made = request(number, prompt, dice.randint(1, most), first_sibling=first_sibling)
    made.priority = first_sibling.priority if first_sibling else dice.choice([0, 0, 1])
    return made


def check_step(plan: Scheduler, step: Sequence[Scheduled]) -> None:
    assert step, "nothing was scheduled although work is waiting"
    assert sum(entry.count for entry in step) <= plan.limits.max_num_batched_tokens
    assert all(entry.count > 0 for entry in step)
    assert len({entry.request.number for entry in step}) == len(step)
    for queue in (plan.running, plan.waiting):
        assert list(queue) == sorted(queue, key=lambda each: each.order)
    counts = plan.tokens_per_rank()
    assert max(counts) - min(counts) <= plan.geometry.interleave * len(plan.running)


@given(st.integers(0, 2**32 - 1))
def test_every_mixture_of_requests_runs_to_its_end(seed):
    simulate(seed)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.0, 0.02, 0.3]))
def test_prompt_work_beside_decodes_stays_within_the_pace_unless_one_token_alone_exceeds_it(seed, tokens, per_position):
    dice, prefill_budget = random.Random(seed), PrefillBudget(tokens=tokens, cost_per_position=per_position)
    plan = scheduler(1000, 8, dice.randint(9, 64), prefill_budget=prefill_budget)
    decoding(plan, dice.randint(1, 4), max_tokens=500)
    for number in range(10, 14):
        plan.add(request(number, dice.randint(2, 40), max_tokens=1))
    while any(each.number >= 10 for each in [*plan.waiting, *plan.running]):
        singles = sum(each.num_pending == 1 for each in plan.running)
        step = advance(plan)
        chunks = [entry for entry in step if entry.request.number >= 10 and not is_last_token(entry)]
        work = sum(prefill_budget.work(entry.start, entry.count) for entry in chunks)
        assert work <= allowed(tokens, singles) or (len(chunks) == 1 and chunks[0].count == 1)
        assert chunks or all(each.num_pending <= 1 for each in plan.running), "no prompt advances"


def allowed(tokens: int, singles: int) -> int:
    """Prompt tokens beside so many entries of one: the rest of a bucket, at least half of it."""
    return next(size - singles for size in (tokens << doubled for doubled in range(9)) if size - singles >= size // 2)


def is_last_token(entry: Scheduled) -> bool:
    """What is left of a prompt if that is one token: it costs what a decode costs."""
    return entry.samples and entry.count == 1


@given(st.integers(0, 2**32 - 1), st.sampled_from([(8, 1), (8, 2), (4, 1), (2, 4)]))
def test_blocks_fill_the_ranks_evenly(seed, split):
    (dcp, interleave), dice = split, random.Random(seed)
    plan = scheduler(100, budget=64, geometry=CacheGeometry(block_size=16, dcp=dcp, interleave=interleave))
    add(plan, *(dice.randint(1, 40) for _ in range(6)), max_tokens=9)
    while plan.has_work:
        advance(plan)
        counts, tokens = plan.tokens_per_rank(), [each.num_computed for each in plan.running]
        assert sum(counts) == sum(tokens)
        assert len(counts) == dcp
        partial = sum(count % 16 > 0 for count in tokens)
        assert max(counts) - min(counts) <= interleave * partial


def test_a_step_that_also_decodes_is_no_larger_than_the_pace_says_and_one_that_does_not_is():
    prefill_budget = PrefillBudget(tokens=64, step_sizes=(8,))
    limits = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, prefill_budget=prefill_budget)
    plan = Scheduler(BlockManager(100), CacheGeometry(block_size=BLOCK), limits)
    add(plan, 3, 40)
    assert shown(advance(plan)) == [(0, 0, 3), (1, 0, 40)]  # nobody decodes yet
    plan.add(request(2, 50))
    assert shown(advance(plan)) == [(0, 3, 1), (1, 40, 1), (2, 0, 6)]


def test_a_step_that_also_decodes_is_as_large_as_its_prompt_can_fill():
    """A prompt advances by whole tiles of 4 until the last, and by one at least."""
    prefill_budget = PrefillBudget(tokens=32, cost_per_position=0.1, step_sizes=(9, 17), tile=4)
    plan = scheduler(budget=64, prefill_budget=prefill_budget)
    decoding(plan, 1)
    plan.add(request(1, 78))
    assert [advance(plan)[-1].count for _ in range(15)] == [16, 8, 8, *[4] * 11, 2]
