from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.outputs import RequestMetrics
from dcpjax.request import Request
from dcpjax.sampling import SamplingBatch, sample
from dcpjax.sampling_params import SamplingParams

VOCAB, DRAWS = 12, 20_000
LOGITS = np.array([2.1, -0.3, 1.7, 0.4, -4.0, 1.2, 0.9, -1.1, 3.0, 0.1, -0.6, 2.6], np.float32)
SEEDS = st.integers(0, 2**32 - 1)

draw = jax.jit(sample)


def request(params: SamplingParams, seed: int = 0, generated: int = 0, ends: Sequence[int] = ()) -> Request:
    ends = frozenset([*ends, *params.stop_tokens])
    return Request(0, [1], params, 16, seed, ends, RequestMetrics(0.0), output_token_ids=[0] * generated)


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0)


def tokens(logits: np.ndarray, requests: Sequence[Request], rows: int | None = None) -> list[int]:
    """Next tokens of these requests, in a step of `rows` rows."""
    rows = len(requests) if rows is None else rows
    padded = np.zeros((rows, logits.shape[1]), np.float32)
    padded[: len(logits)] = logits
    return np.asarray(draw(padded, SamplingBatch.build(requests, rows))[0])[: len(requests)].tolist()


# --- greedy


@given(SEEDS)
def test_temperature_zero_takes_the_most_likely_token(seed):
    logits = np.random.default_rng(seed).normal(size=(4, VOCAB)).astype(np.float32)
    assert tokens(logits, [request(greedy())] * 4) == logits.argmax(1).tolist()


def test_of_equally_likely_tokens_greedy_takes_the_first():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, [3, 7]] = 1.0
    assert tokens(logits, [request(greedy())] * 4) == [3] * 4


def test_rows_past_the_last_request_are_greedy():
    options = SamplingBatch.build([request(SamplingParams(top_k=3))], 4)
    np.testing.assert_array_equal(options.temperature, [1, 0, 0, 0])
    np.testing.assert_array_equal(options.top_k, [3, 0, 0, 0])


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_keeping_only_the_best_token_is_greedy(options):
    requests = [request(SamplingParams(**options), seed) for seed in range(4)]
    assert tokens(np.stack([LOGITS] * 4), requests) == [int(LOGITS.argmax())] * 4


@pytest.mark.parametrize("temperature", [1e-30, pytest.param(1e-37), 1e-39, 1e-300])
def test_a_vanishing_temperature_is_greedy(temperature):
    requests = [request(SamplingParams(temperature=temperature), seed) for seed in range(4)]
    assert tokens(np.stack([30 * LOGITS] * 4), requests) == [int(LOGITS.argmax())] * 4


# --- the distribution


def reference(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """float64 probabilities [V], one token after another: temperature, min_p, top_k, top_p."""
    scaled = LOGITS.astype(np.float64) / temperature
    chances = np.exp(scaled - scaled.max())
    chances[chances < min_p * chances.max()] = 0.0
    order = np.argsort(-chances)
    if top_k > 0:
        chances[order[top_k:]] = 0.0
    chances /= chances.sum()
    reached, kept = 0.0, []
    for token in order:
        if reached < top_p:
            kept.append(token)
        reached += chances[token]
    chances[np.setdiff1d(order, kept)] = 0.0
    return chances / chances.sum()


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 100},
    {"top_k": -1, "top_p": 0.35},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.1},
]


def counts(options: dict[str, float], first: int, seed: int = 1) -> np.ndarray:
    """How often each token is drawn in `DRAWS` steps of one request, from step `first` on."""
    one = SamplingBatch.build([request(SamplingParams(**options), seed)], 1)
    many = jax.tree.map(lambda column: np.repeat(column, DRAWS, axis=0), one)
    many = replace(many, generated=np.arange(first, first + DRAWS, dtype=np.int32))
    drawn, finite = draw(np.broadcast_to(LOGITS, (DRAWS, VOCAB)), many)
    assert np.asarray(finite).all()
    return np.bincount(np.asarray(drawn), minlength=VOCAB)


def assert_follows(found: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square; the limit is the Wilson-Hilferty approximation for one in a million."""
    possible = expected > 0
    assert len(found) == VOCAB
    assert not found[~possible].any()
    wanted = expected[possible] * found.sum()
    freedom = possible.sum() - 1
    if freedom:
        spread = 2 / (9 * freedom)
        assert ((found[possible] - wanted) ** 2 / wanted).sum() < freedom * (1 - spread + 4.75 * spread**0.5) ** 3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_follow_the_reference_distribution(options):
    assert_follows(counts(options, first=0), reference(**options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 2**63 - 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_hundred_thousand_draws_follow_the_reference_distribution(options, seed):
    found = sum(counts(options, first, seed) for first in range(0, 5 * DRAWS, DRAWS))
    assert_follows(found, reference(**options))


def test_the_chi_square_notices_a_small_tilt():
    tilted = reference(temperature=1.1)
    with pytest.raises(AssertionError):
        assert_follows(counts({}, first=0), tilted)


# --- what a draw depends on


def test_a_seeded_draw_does_not_depend_on_row_neighbours_or_batch_size():
    mine = request(SamplingParams(), seed=1234, generated=5)
    alone = tokens(LOGITS[None], [mine], rows=4)[0]
    random = np.random.default_rng(3)
    for size in (4, 8):
        for row in range(size):
            neighbours = [request(SamplingParams(temperature=2.0), seed) for seed in range(size)]
            neighbours[row] = mine
            logits = random.normal(size=(size, VOCAB)).astype(np.float32)
            logits[row] = LOGITS
            assert tokens(logits, neighbours)[row] == alone


NEIGHBOURS = [
    {"top_k": 2},
    {"top_p": 0.5},
    {"min_p": 0.3},
    {"temperature": 0.0},
    {"stop_token_ids": [1], "min_tokens": 9},
]


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=str)
def test_a_seeded_draw_does_not_depend_on_what_neighbours_ask_for(neighbour):
    other = request(SamplingParams(**neighbour), seed=77)
    for seed in range(30):
        mine = request(SamplingParams(temperature=1.5), seed=seed, generated=seed % 3)
        plain = tokens(np.stack([LOGITS] * 4), [mine] * 4)
        mixed = tokens(np.stack([LOGITS] * 4), [other, mine, other, mine])
        assert [mixed[1], mixed[3]] == plain[:2]


def test_each_row_gets_what_its_own_options_ask_for():
    options = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3, "temperature": 5.0}, {"temperature": 1.0}]
    allowed = [reference(top_k=1), reference(top_k=1), reference(**options[2]), reference()]
    for generated in range(50):
        requests = [request(SamplingParams(**each), seed=9, generated=generated) for each in options]
        for token, chances in zip(tokens(np.stack([LOGITS] * 4), requests), allowed, strict=True):
            assert chances[token] > 0


def test_draws_of_different_seeds_and_steps_differ():
    rows = np.zeros((8, 1000), np.float32)
    by_seed = tokens(rows, [request(SamplingParams(), seed) for seed in (0, 1, 2**31, 2**32, 2**33, 2**63 - 1, -1, -2)])
    by_step = tokens(rows, [request(SamplingParams(), 0, generated) for generated in range(8)])
    assert len(set(by_seed)) > 5
    assert len(set(by_step)) > 5
    assert by_seed[0] == by_step[0]


# --- banned, bad and padded


def test_end_tokens_are_not_sampled_before_min_tokens():
    best = np.argsort(-LOGITS)
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[int(best[1])])
    requests = [request(params, generated=generated, ends=[int(best[0])]) for generated in range(4)]
    assert tokens(np.stack([LOGITS] * 4), requests) == [best[2], best[2], best[0], best[0]]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}], ids=str)
def test_banned_tokens_are_never_drawn(options):
    banned = [int(token) for token in np.argsort(-LOGITS)[:6]]
    params = SamplingParams(min_tokens=16, stop_token_ids=banned, **options)
    drawn = {
        token
        for step in range(10)
        for token in tokens(np.stack([LOGITS] * 4), [request(params, seed, step) for seed in range(4)])
    }
    assert len(drawn) > 1
    assert not drawn & set(banned)


def test_banning_for_one_row_leaves_the_others_alone():
    best = int(LOGITS.argmax())
    banning = request(SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[best]))
    drawn = tokens(np.stack([LOGITS] * 4), [request(greedy()), banning, request(greedy()), banning])
    assert [token == best for token in drawn] == [True, False, True, False]


def test_end_tokens_beyond_the_vocabulary_are_harmless():
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[VOCAB, 10**6])
    assert tokens(np.stack([LOGITS] * 4), [request(params)] * 4) == [int(LOGITS.argmax())] * 4


BAD_ROWS = {
    "one NaN": np.where(np.arange(VOCAB) == 4, np.nan, LOGITS),
    "all NaN": np.full(VOCAB, np.nan),
    "infinity": np.where(np.arange(VOCAB) == 4, np.inf, LOGITS),
    "nothing possible": np.full(VOCAB, -np.inf),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}], ids=str)
def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_the_same(bad, options):
    requests = [request(SamplingParams(**options), seed) for seed in range(4)]
    clean, poisoned = np.stack([LOGITS] * 4), np.stack([LOGITS, BAD_ROWS[bad].astype(np.float32), LOGITS, LOGITS])
    good, all_finite = draw(clean, SamplingBatch.build(requests, 4))
    found, finite = draw(poisoned, SamplingBatch.build(requests, 4))
    np.testing.assert_array_equal(all_finite, [True] * 4)
    np.testing.assert_array_equal(finite, [True, False, True, True])
    assert [found[row] for row in (0, 2, 3)] == [good[row] for row in (0, 2, 3)]


@given(SEEDS, st.sampled_from([{}, {"temperature": 50.0}, {"top_k": 10**9}, {"top_k": 11, "top_p": 0.999}]))
def test_only_ids_of_the_vocabulary_are_sampled(seed, options):
    requests = [request(SamplingParams(**options), seed + row) for row in range(4)]
    logits = np.random.default_rng(seed).normal(size=(4, VOCAB)).astype(np.float32)
    assert all(0 <= token < VOCAB for token in tokens(logits, requests))


def test_the_banned_list_comes_in_few_widths():
    def width(count: int) -> int:
        params = SamplingParams(min_tokens=1, stop_token_ids=range(count))
        return SamplingBatch.build([request(params), request(greedy())], 2).banned.shape[1]

    assert [width(count) for count in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 16]


def test_the_whole_seed_reaches_the_device():
    options = SamplingBatch.build([request(greedy(), seed) for seed in (5, 2**40 + 3, -1)], 4)
    np.testing.assert_array_equal(options.seed, [[0, 5], [256, 3], [2**32 - 1, 2**32 - 1], [0, 0]])
