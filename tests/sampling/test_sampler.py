from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dcpjax.api.bitmask import pack
from dcpjax.api.checks import LARGEST_FLOAT32, LEAST_FLOAT32
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Request
from dcpjax.sampling.known_tokens import KnownTokens
from dcpjax.sampling.processors import CANDIDATES, apply_penalties, apply_truncation
from dcpjax.sampling.sampler import SamplingBatch, sample
from dcpjax.sampling.sampler_arrays import Truncation

VOCAB, DRAWS, SEATS = 12, 5000, 8
LOGITS = np.array([2.1, -0.3, 1.7, 0.4, -4.0, 1.2, 0.9, -1.1, 3.0, 0.1, -0.6, 2.6], np.float32)
PROMPT, OUTPUT = [2, 8, 8, 4], [8, 0, 11, 8, 8]
SEEDS = st.integers(0, 2**32 - 1)

draw = jax.jit(sample)


class Allows:
    """A guide that allows the same tokens at every step."""

    def __init__(self, tokens: Sequence[int], vocab: int = VOCAB) -> None:
        self.words = np.zeros(-(-vocab // 32), np.uint32)
        packed = np.frombuffer(pack(tokens), np.uint32)
        self.words[: len(packed)] = packed

    def mask(self) -> np.ndarray:
        return self.words


def request(
    params: SamplingParams, seed: int = 0, generated: int = 0, ends: Sequence[int] = (), **state: Any
) -> Request:
    default = {"prompt_token_ids": PROMPT, "output_token_ids": [0] * generated}
    end_token_ids = frozenset([*ends, *params.stop_tokens])
    return Request(
        number=0,
        params=params,
        max_tokens=100,
        seed=seed,
        end_token_ids=end_token_ids,
        **default | state,
    )


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def build(requests: Sequence[Any], rows: int | None = None, vocab: int = VOCAB) -> SamplingBatch:
    return SamplingBatch.build(requests, len(requests) if rows is None else rows, vocab)


def tokens(logits: np.ndarray, requests: Sequence[Any], rows: int | None = None, latest: Any = None) -> list[int]:
    """Next tokens of these requests, in a step of `rows` rows."""
    options = build(requests, rows, logits.shape[1])
    padded = np.zeros((len(options.seat), logits.shape[1]), np.float32)
    padded[: len(logits)] = logits
    latest = np.zeros(SEATS, np.int32) if latest is None else latest
    return np.asarray(draw(padded, latest, options)[0].tokens)[: len(requests)].tolist()


def alike(count: int = 4) -> np.ndarray:
    return np.stack([LOGITS] * count)


# --- greedy


@given(SEEDS)
def test_temperature_zero_takes_the_most_likely_token(seed):
    logits = np.random.default_rng(seed).normal(size=(4, VOCAB)).astype(np.float32)
    assert tokens(logits, [request(greedy())] * 4) == logits.argmax(1).tolist()


def test_of_equally_likely_tokens_greedy_takes_the_first():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, [3, 7]] = 1.0
    assert tokens(logits, [request(greedy())] * 4) == [3] * 4


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-300}, {"min_p": 1.0}, {"temperature": 1e-4}]
)
def test_keeping_only_the_best_token_is_greedy(options):
    requests = [request(SamplingParams(**options), seed) for seed in range(4)]
    assert tokens(alike(), requests) == [int(LOGITS.argmax())] * 4


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-39, 1e-300])
def test_a_vanishing_temperature_is_greedy(temperature):
    requests = [request(SamplingParams(temperature=temperature), seed) for seed in range(4)]
    assert tokens(30 * alike(), requests) == [int(LOGITS.argmax())] * 4


# --- the distribution


def reference(params: SamplingParams) -> np.ndarray:
    """float64 probabilities [V] after PROMPT and OUTPUT, one token after another, straight from the definitions."""
    logits = LOGITS.astype(np.float64)
    for token in range(VOCAB):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -np.inf
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in PROMPT + OUTPUT:
            repeats = params.repetition_penalty
            logits[token] = logits[token] / repeats if logits[token] > 0 else logits[token] * repeats
        logits[token] -= params.frequency_penalty * OUTPUT.count(token)
        logits[token] -= params.presence_penalty * (token in OUTPUT)
    chances = np.exp((logits - logits.max()) / params.temperature)
    chances[chances < params.min_p * chances.max()] = 0.0
    order = np.argsort(-chances)
    if params.top_k > 0:
        chances[order[params.top_k :]] = 0.0
    chances /= chances.sum()
    reached, kept = 0.0, []
    for token in order:
        if reached < params.top_p:
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
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.4, "presence_penalty": -0.9, "temperature": 1.3},
    {"logit_bias": {4: 6.0, 8: -2.0, "0": -100}},
    {"allowed_token_ids": [1, 3, 4, 8]},
    {"allowed_token_ids": [1, 3, 4, 8, 9, 10], "logit_bias": {4: 4.0, 0: 50.0}, "top_k": 4, "top_p": 0.95},
    {"allowed_token_ids": [1, 3], "top_k": 5},
]


@cache
def counts(first: int, seed: int) -> np.ndarray:
    """How often each token is drawn with each of OPTIONS in `DRAWS` steps, from step `first` on: one wide batch."""
    once = build([request(SamplingParams(**options), seed, output_token_ids=OUTPUT) for options in OPTIONS])
    many = jax.tree.map(lambda column: np.repeat(column, DRAWS, axis=0), once)
    steps = np.tile(np.arange(first, first + DRAWS, dtype=np.int32), len(OPTIONS))
    many = replace(many, draw=replace(many.draw, generated=steps))
    sampled, _ = draw(np.broadcast_to(LOGITS, (len(steps), VOCAB)), np.zeros(SEATS, np.int32), many)
    assert np.asarray(sampled.finite).all()
    return np.stack([np.bincount(row, minlength=VOCAB) for row in np.asarray(sampled.tokens).reshape(-1, DRAWS)])


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
    assert_follows(counts(0, 1)[OPTIONS.index(options)], reference(SamplingParams(**options)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 2**63 - 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_hundred_thousand_draws_follow_the_reference_distribution(options, seed):
    found = sum(counts(first, seed)[OPTIONS.index(options)] for first in range(0, 20 * DRAWS, DRAWS))
    assert_follows(found, reference(SamplingParams(**options)))


@pytest.mark.parametrize("tilt", [{"temperature": 1.2}, {"presence_penalty": 0.3}, {"logit_bias": {8: 0.25}}], ids=str)
def test_the_chi_square_notices_a_small_tilt(tilt):
    with pytest.raises(AssertionError):
        assert_follows(counts(0, 1)[OPTIONS.index({})], reference(SamplingParams(**tilt)))


# --- truncation


def kept(logits: np.ndarray, **parts: Sequence[float]) -> np.ndarray:
    """Which tokens [B, V] truncation keeps."""
    dtypes = {"min_p": np.float32, "top_k": np.int32, "top_p": np.float32}
    options = Truncation(
        **{name: np.asarray(parts[name], kind) if name in parts else None for name, kind in dtypes.items()}
    )
    return np.isfinite(jax.jit(apply_truncation)(logits, options))


@given(SEEDS, st.integers(1, 60), st.sampled_from([0.0, 0.5, 4.0]))
def test_top_k_keeps_the_first_k_of_a_stable_sort_however_many_are_equal(seed, count, step):
    logits = np.random.default_rng(seed).normal(size=(3, 50)).astype(np.float32)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    order = np.argsort(-logits, axis=1, kind="stable")
    expected = np.zeros_like(logits, bool)
    np.put_along_axis(expected, order[:, :count], True, axis=1)
    expected[2] = True
    np.testing.assert_array_equal(kept(logits, top_k=[count, count, 0]), expected)


@given(SEEDS, st.floats(0.001, 0.999), st.sampled_from([0.0, 0.5, 4.0]))
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(seed, share, step):
    logits = np.random.default_rng(seed).normal(size=(3, 50)).astype(np.float32)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    chances = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(1, keepdims=True)
    found = kept(logits, top_p=[share, share, 1.0])
    assert found[2].all()
    for row in range(2):
        order = np.argsort(-logits[row], kind="stable")
        size = found[row].sum()
        assert size >= 1
        assert found[row][order[:size]].all()
        assert chances[row][order[:size]].sum() > share - 1e-5
        assert chances[row][order[: size - 1]].sum() < share + 1e-5


def wide(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, 20_000)).astype(np.float32)


def test_a_wide_row_is_truncated_as_exactly_as_a_narrow_one():
    logits, sizes = wide(1), [1, CANDIDATES, CANDIDATES + 1, 19_999]
    found = kept(logits, top_k=sizes)
    np.testing.assert_array_equal(found.sum(1), sizes)
    assert all(logits[row][found[row]].min() > logits[row][~found[row]].max() for row in range(4))


def test_top_p_of_a_wide_row_keeps_what_the_definition_says():
    logits, shares = wide(2) * np.float32([[9.0], [5.0], [1.0], [0.1]]), [0.5, 0.9, 0.9, 0.5]
    found = kept(logits, top_p=shares)
    ranked = -np.sort(-logits.astype(np.float64), axis=1)
    chances = np.exp(ranked) / np.exp(ranked).sum(1, keepdims=True)
    sizes = (np.cumsum(chances, axis=1) - chances < np.array(shares)[:, None]).sum(1)
    assert (sizes < CANDIDATES).tolist() == [True, True, False, False]
    np.testing.assert_allclose(found.sum(1), sizes, rtol=1e-3)


def test_truncation_does_not_depend_on_what_the_neighbours_need():
    logits = wide(3) * np.float32(4.0)
    near = kept(logits, top_p=[0.8, 0.8, 0.8, 0.8])
    far = kept(logits, top_p=[0.8, 0.999999, 0.8, 0.999999])
    assert near.sum(1).max() < CANDIDATES < far[[1, 3]].sum(1).min()
    np.testing.assert_array_equal(near[[0, 2]], far[[0, 2]])


def test_each_limit_takes_only_from_what_the_limits_before_it_keep():
    logits = np.array([[5.0, 4.0, 3.0, 2.0, 1.0, -np.inf]], np.float32)
    np.testing.assert_array_equal(kept(logits, top_k=[9]), [[True] * 5 + [False]])
    np.testing.assert_array_equal(kept(logits, min_p=[0.1], top_k=[4]), [[True] * 3 + [False] * 3])
    np.testing.assert_array_equal(kept(logits, top_k=[2], top_p=[0.74]), [[True, True] + [False] * 4])
    np.testing.assert_array_equal(kept(logits, top_k=[2], top_p=[0.72]), [[True] + [False] * 5])


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
    {"logit_bias": {3: 5.0}},
    {"allowed_token_ids": [3, 5]},
    {"presence_penalty": 1.0, "repetition_penalty": 2.0},
    {"logprobs": 3},
]


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=str)
def test_a_seeded_draw_does_not_depend_on_what_neighbours_ask_for(neighbour):
    other = request(SamplingParams(**neighbour), seed=77)
    for seed in range(30):
        mine = request(SamplingParams(temperature=1.5), seed=seed, generated=seed % 3)
        plain = tokens(alike(), [mine] * 4)
        mixed = tokens(alike(), [other, mine, other, mine])
        assert [mixed[1], mixed[3]] == [plain[1], plain[3]]


def everyone(seed: int) -> tuple[np.ndarray, list[Request]]:
    """Logits and a request for every kind of option."""
    requests = [request(SamplingParams(**one), seed + row, seat=row % SEATS) for row, one in enumerate(NEIGHBOURS)]
    return np.random.default_rng(seed).normal(size=(len(requests), VOCAB)).astype(np.float32), requests


def test_a_seeded_draw_does_not_depend_on_the_order_or_on_everything_at_once():
    for seed in range(0, 100, 10):
        logits, requests = everyone(seed)
        together = tokens(logits, requests)
        alone = [tokens(logits[[row]], [one], rows=4)[0] for row, one in enumerate(requests)]
        backwards = tokens(logits[::-1], requests[::-1])
        assert together == alone == backwards[::-1]


def test_a_seeded_draw_does_not_depend_on_the_mesh():
    logits, requests = everyone(7)
    options, latest = build(requests), np.arange(SEATS, dtype=np.int32)
    one = draw(logits, latest, options)
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec())
    eight = draw(*jax.device_put((logits, latest, options), everywhere))
    assert len(eight[0].tokens.sharding.device_set) == 8
    jax.tree.map(np.testing.assert_array_equal, one, eight)


def test_each_row_gets_what_its_own_options_ask_for():
    options = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3, "temperature": 5.0}, {"allowed_token_ids": [1, 4]}]
    possible = [{8}, {8}, set(np.flatnonzero(reference(SamplingParams(**options[2])))), {1, 4}]
    for generated in range(50):
        requests = [request(SamplingParams(**each), seed=9, generated=generated) for each in options]
        for token, some in zip(tokens(alike(), requests), possible, strict=True):
            assert token in some


def test_draws_of_different_seeds_and_steps_differ():
    rows = np.zeros((8, 1000), np.float32)
    by_seed = tokens(rows, [request(SamplingParams(), seed) for seed in (0, 1, 2**31, 2**32, 2**33, 2**63 - 1, -1, -2)])
    by_step = tokens(rows, [request(SamplingParams(), 0, generated) for generated in range(8)])
    assert len(set(by_seed)) > 5
    assert len(set(by_step)) > 5
    assert by_seed[0] == by_step[0]


def test_a_token_in_flight_counts_as_generated():
    known = [request(SamplingParams(), seed, generated=4) for seed in range(4)]
    flying = [request(SamplingParams(), seed, generated=3, num_in_flight=1) for seed in range(4)]
    before = [request(SamplingParams(), seed, generated=3) for seed in range(4)]
    assert tokens(alike(), known) == tokens(alike(), flying) != tokens(alike(), before)


def test_the_whole_seed_reaches_the_device():
    options = build([request(SamplingParams(), seed) for seed in (5, 2**40 + 3, -1)], 4)
    np.testing.assert_array_equal(options.draw.seed, [[0, 5], [256, 3], [2**32 - 1, 2**32 - 1], [0, 0]])


# --- penalties


def penalized(params: SamplingParams) -> np.ndarray:
    """float64 logits [V] after PROMPT and OUTPUT."""
    logits = LOGITS.astype(np.float64)
    for token in set(PROMPT + OUTPUT):
        repeats = params.repetition_penalty
        logits[token] = logits[token] / repeats if logits[token] > 0 else logits[token] * repeats
    for token in set(OUTPUT):
        logits[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    return logits


@given(st.floats(0.2, 3.0), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), st.sampled_from([0, 1]))
def test_greedy_takes_the_best_token_after_all_penalties(repetition, frequency, presence, in_flight):
    params = greedy(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    output, latest = OUTPUT[: len(OUTPUT) - in_flight], np.full(SEATS, OUTPUT[-1], np.int32)
    mine = request(params, output_token_ids=output, num_in_flight=in_flight, seat=3)
    [found] = tokens(LOGITS[None], [mine], rows=4, latest=latest)
    ranked = penalized(params)
    assert ranked[found] >= ranked.max() - 1e-5


PENALTIES = [{"repetition_penalty": 1.7}, {"frequency_penalty": 0.9}, {"presence_penalty": -1.1}]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_penalized_logits_are_those_of_the_formula(options):
    params = SamplingParams(**options)
    batch = build([request(params, output_token_ids=OUTPUT)])
    [found] = jax.jit(apply_penalties)(LOGITS[None], batch.penalties, np.zeros(1, np.int32))
    np.testing.assert_allclose(found, penalized(params), rtol=0, atol=1e-6)
    assert not np.allclose(found, LOGITS, atol=0.1)


def test_the_token_in_flight_is_penalized_though_the_host_does_not_know_it():
    params = greedy(presence_penalty=2.0)
    best = int(LOGITS.argmax())
    latest = np.array([5, best, 5, 5, 5, 5, 5, 5], np.int32)
    flying = request(params, output_token_ids=[], num_in_flight=1, seat=1)
    landed = request(params, output_token_ids=[], seat=1)
    elsewhere = request(params, output_token_ids=[], num_in_flight=1, seat=0)
    found = tokens(alike(3), [flying, landed, elsewhere], rows=4, latest=latest)
    assert found == [int(np.argsort(-LOGITS)[1]), best, best]


def test_counts_are_kept_from_step_to_step():
    params = greedy(frequency_penalty=0.5)
    mine = request(params, output_token_ids=[])
    for _ in range(30):
        fresh = request(params, output_token_ids=list(mine.output_token_ids))
        [token] = tokens(LOGITS[None], [mine], rows=4)
        assert [token] == tokens(LOGITS[None], [fresh], rows=4)
        mine.output_token_ids.append(token)
    assert dict(zip(mine.token_counts.tokens, mine.token_counts.counts, strict=True)) == {
        token: mine.output_token_ids[:-1].count(token) for token in set(mine.output_token_ids[:-1])
    }


# --- masks and bans


def test_end_tokens_are_not_sampled_before_min_tokens():
    best = np.argsort(-LOGITS)
    params = greedy(min_tokens=2, stop_token_ids=[int(best[1])])
    requests = [request(params, generated=generated, ends=[int(best[0])]) for generated in range(4)]
    assert tokens(alike(), requests) == [best[2], best[2], best[0], best[0]]


def test_min_tokens_counts_the_token_in_flight():
    best = np.argsort(-LOGITS)
    params = greedy(min_tokens=2, stop_token_ids=[int(best[0])])
    requests = [request(params, generated=generated, num_in_flight=1) for generated in (0, 1)]
    assert tokens(alike(2), requests, rows=4) == [best[1], best[0]]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}], ids=str)
def test_banned_tokens_are_never_drawn(options):
    banned = [int(token) for token in np.argsort(-LOGITS)[:6]]
    params = SamplingParams(min_tokens=16, stop_token_ids=banned, **options)
    drawn = {
        token for step in range(10) for token in tokens(alike(), [request(params, seed, step) for seed in range(4)])
    }
    assert len(drawn) > 1
    assert not drawn & set(banned)


KNOWN = np.array([True, True, True, False, True, True, True, True, False, True, True, False])  # the best three are not


ASKS = {
    "nothing": {},
    "allowed": {"params": {"allowed_token_ids": [2, 3, 8, 11]}},
    "guide": {"guide": Allows(range(VOCAB))},
    "bias": {"params": {"logit_bias": {8: 100.0}, "top_k": 3}},
    "ban": {"params": {"min_tokens": 3, "stop_token_ids": [2]}},
}


@pytest.mark.parametrize("ask", ASKS)
def test_ids_that_no_token_has_are_never_chosen(ask):
    state = {name: value for name, value in ASKS[ask].items() if name != "params"}
    params = ASKS[ask].get("params", {})
    known = KnownTokens.on(SingleDeviceSharding(jax.devices()[0]), KNOWN)
    for temperature in (0.0, 1.0, 1e38):
        mine = request(SamplingParams(temperature=temperature, **params), 4, **state)
        requests = [mine, request(SamplingParams(temperature=temperature), 5)]
        options = SamplingBatch.build(requests, 4, VOCAB, known)
        sampled, _ = draw(alike(), np.zeros(SEATS, np.int32), options)
        assert KNOWN[np.asarray(sampled.tokens)[:2]].all()
        assert options.known is known.ids, "it lies on the device: no step sends it"


def test_banning_for_one_row_leaves_the_others_alone():
    best = int(LOGITS.argmax())
    banning = request(greedy(min_tokens=3, stop_token_ids=[best]))
    drawn = tokens(alike(), [request(greedy()), banning, request(greedy()), banning])
    assert [token == best for token in drawn] == [True, False, True, False]


def test_end_tokens_beyond_the_vocabulary_are_harmless():
    params = greedy(min_tokens=3, stop_token_ids=[VOCAB, 10**6])
    assert tokens(alike(), [request(params)] * 4) == [int(LOGITS.argmax())] * 4


def test_a_bias_moves_a_token_by_its_number():
    second, best = (int(token) for token in np.argsort(LOGITS)[-2:])
    gap = float(LOGITS[best] - LOGITS[second])
    requests = [request(greedy(logit_bias={second: gap + more})) for more in (-0.01, 0.01)]
    assert tokens(alike(2), requests, rows=4) == [best, second]


def test_a_bad_word_is_banned_only_where_its_last_token_would_complete_it():
    best = int(LOGITS.argmax())
    words = ((7, 3, best), (best, 1))
    outputs = [[7, 3], [3, 7], [3], [], [0, 7, 3]]
    requests = [request(greedy(), output_token_ids=output, bad_words=words) for output in outputs]
    assert [token == best for token in tokens(alike(5), requests, rows=8)] == [False, True, True, True, False]


def test_a_bad_word_of_one_token_is_always_banned():
    best = int(LOGITS.argmax())
    requests = [request(greedy(), num_in_flight=in_flight, bad_words=((best,),)) for in_flight in (0, 1)]
    assert best not in tokens(alike(2), requests, rows=4)


def test_a_bad_word_of_several_tokens_needs_to_know_them():
    with pytest.raises(AssertionError):
        build([request(greedy(), num_in_flight=1, bad_words=((1, 2),))])


def test_a_guide_needs_to_have_seen_every_token():
    with pytest.raises(AssertionError):
        build([request(greedy(), num_in_flight=1, guide=Allows([1]))])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}], ids=str)
def test_a_row_takes_only_what_its_list_and_its_guide_both_allow(options):
    params = SamplingParams(allowed_token_ids=[1, 3, 5, 7], **options)
    for seed in range(5):
        both = request(params, seed, guide=Allows([0, 3, 8]))
        guided = request(SamplingParams(**options), seed, guide=Allows([4, 10]))
        found = tokens(alike(3), [both, guided, request(greedy())], rows=4)
        assert found[0] == 3
        assert found[1] in (4, 10)
        assert found[2] == int(LOGITS.argmax())


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 70])
def test_the_last_token_of_any_vocabulary_can_be_allowed(vocab):
    logits = np.zeros((2, vocab), np.float32)
    requests = [request(greedy(allowed_token_ids=[vocab - 1])), request(greedy(), guide=Allows([vocab - 1], vocab))]
    assert tokens(logits, requests) == [vocab - 1] * 2


EXTREMES = [
    {"temperature": 1e38},
    {"temperature": LARGEST_FLOAT32},
    {"temperature": 1e-5},
    {"repetition_penalty": LEAST_FLOAT32},
    {"repetition_penalty": LARGEST_FLOAT32},
    {"repetition_penalty": LEAST_FLOAT32, "temperature": LARGEST_FLOAT32, "logit_bias": {3: 100.0, 5: -100.0}},
    {"repetition_penalty": LEAST_FLOAT32, "temperature": 1e-5, "frequency_penalty": -2.0, "presence_penalty": 2.0},
    {"repetition_penalty": LARGEST_FLOAT32, "temperature": 0.0},
    {"repetition_penalty": LEAST_FLOAT32, "temperature": 0.0, "logit_bias": {3: 100.0}},
]
BANS = {
    "allowed": {"params": {"allowed_token_ids": [3, 5]}},
    "guide": {"guide": Allows([3, 5])},
    "min tokens": {"params": {"min_tokens": 9, "stop_token_ids": [*range(3), 4, *range(6, VOCAB)]}},
    "bad words": {"bad_words": tuple((token,) for token in range(VOCAB) if token not in (3, 5))},
}


@pytest.mark.parametrize("ban", BANS)
@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_p": 0.9, "min_p": 1e-40}], ids=str)
def test_no_number_however_extreme_undoes_a_ban(ban, more):
    """The prompt holds every token, and the output some: penalties apply to banned ones too."""
    params = BANS[ban].get("params", {})
    state = {name: value for name, value in BANS[ban].items() if name != "params"}
    for scale in (1.0, 1e30):
        requests = [
            request(SamplingParams(**params, **extreme, **more), seed, 0, prompt_token_ids=list(range(VOCAB)), **state)
            for extreme in EXTREMES
            for seed in range(2)
        ]
        logits = np.stack([LOGITS * np.float32(scale)] * len(requests))
        sampled, _ = draw(logits, np.zeros(SEATS, np.int32), build(requests))
        assert set(np.asarray(sampled.tokens).tolist()) <= {3, 5}
        assert np.asarray(sampled.possible).all()


def test_a_penalty_that_overflows_bans_nothing():
    """All tokens are repeated: dividing by the smallest number gives infinity, multiplying by the largest -infinity."""
    for penalty in (LEAST_FLOAT32, LARGEST_FLOAT32):
        params = SamplingParams(repetition_penalty=penalty, allowed_token_ids=[1, 4, 7])
        mine = request(params, prompt_token_ids=list(range(VOCAB)))
        batch = build([mine])
        [found] = jax.jit(apply_penalties)(LOGITS[None], batch.penalties, np.zeros(1, np.int32))
        assert np.isfinite(found).all()
        sampled, _ = draw(LOGITS[None], np.zeros(SEATS, np.int32), batch)
        assert np.asarray(sampled.possible).all()


NOTHING_LEFT = [
    request(greedy(allowed_token_ids=[4]), bad_words=((4,),)),
    request(SamplingParams(allowed_token_ids=[4], min_tokens=2, stop_token_ids=[4])),
    request(SamplingParams(allowed_token_ids=[4], top_p=0.5), guide=Allows([5])),
    request(SamplingParams(temperature=1e38), guide=Allows([4, 5]), bad_words=((4,), (5,))),
    request(greedy(min_tokens=2, stop_token_ids=range(VOCAB))),
    request(greedy(min_tokens=2, stop_token_ids=[4]), guide=Allows([4, 5]), bad_words=((5,),)),
]


@pytest.mark.parametrize("nothing", NOTHING_LEFT, ids=map(str, range(len(NOTHING_LEFT))))
def test_a_row_without_a_token_that_may_be_chosen_is_told_and_its_neighbours_are_the_same(nothing):
    neighbours = [request(SamplingParams(), seed=3), request(greedy(allowed_token_ids=[1, 3]))]
    expected = tokens(alike(2), neighbours, rows=4)
    sampled, _ = draw(alike(), np.zeros(SEATS, np.int32), build([neighbours[0], nothing, neighbours[1]], 4))
    np.testing.assert_array_equal(sampled.possible, [True, False, True, True])
    np.testing.assert_array_equal(sampled.finite, [True] * 4)
    assert [sampled.tokens[row] for row in (0, 2)] == expected


def test_where_nothing_is_banned_nobody_looks_whether_a_token_is_left():
    sampled, _ = draw(alike(), np.zeros(SEATS, np.int32), build([request(SamplingParams(logit_bias={3: 1}))] * 4))
    assert sampled.possible is None


def test_a_guide_that_allows_only_the_end_wins_over_min_tokens():
    mine = request(greedy(min_tokens=5, stop_token_ids=[4]), guide=Allows([4]))
    assert tokens(alike(2), [mine, request(greedy())], rows=4) == [4, int(LOGITS.argmax())]


# --- what is not finite


BAD_ROWS = {
    "one NaN": np.where(np.arange(VOCAB) == 4, np.nan, LOGITS),
    "all NaN": np.full(VOCAB, np.nan),
    "infinity": np.where(np.arange(VOCAB) == 4, np.inf, LOGITS),
    "nothing possible": np.full(VOCAB, -np.inf),
}
EVERYTHING = {"top_k": 3, "presence_penalty": 1.0, "logit_bias": {3: 1.0}, "allowed_token_ids": range(9)}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, EVERYTHING], ids=str)
def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_the_same(bad, options):
    requests = [request(SamplingParams(**options), seed) for seed in range(4)]
    latest = np.zeros(SEATS, np.int32)
    good, _ = draw(alike(), latest, build(requests))
    found, _ = draw(np.stack([LOGITS, BAD_ROWS[bad].astype(np.float32), LOGITS, LOGITS]), latest, build(requests))
    np.testing.assert_array_equal(good.finite, [True] * 4)
    np.testing.assert_array_equal(found.finite, [True, False, True, True])
    assert [found.tokens[row] for row in (0, 2, 3)] == [good.tokens[row] for row in (0, 2, 3)]


@given(SEEDS, st.sampled_from([{}, {"temperature": 50.0}, {"top_k": 10**12}, {"top_p": 0.999}]))
def test_only_ids_of_the_vocabulary_are_sampled(seed, options):
    requests = [request(SamplingParams(**options), seed + row) for row in range(4)]
    logits = np.random.default_rng(seed).normal(size=(4, VOCAB)).astype(np.float32)
    assert all(0 <= token < VOCAB for token in tokens(logits, requests))


# --- seats


def test_each_seat_learns_its_newest_token_and_the_others_keep_theirs():
    logits = np.eye(4, VOCAB, k=3, dtype=np.float32)
    seats = [2, 0, 7]
    options = build([request(greedy(), seat=seat) for seat in seats], 4)
    sampled, latest = draw(logits, np.full(SEATS, 11, np.int32), options)
    np.testing.assert_array_equal(sampled.tokens[:3], [3, 4, 5])
    np.testing.assert_array_equal(latest, [4, 11, 3, 11, 11, 11, 11, 5])
    assert latest.dtype == sampled.tokens.dtype == np.int32


def test_rows_past_the_last_request_ask_for_nothing_and_leave_every_seat():
    options = build([request(greedy(), seat=1)], 4)
    _, latest = draw(alike(), np.full(SEATS, 11, np.int32), options)
    np.testing.assert_array_equal(options.seat, [1, -1, -1, -1])
    np.testing.assert_array_equal(latest, [11, 8] + [11] * 6)


# --- what the program holds


def parts(options: SamplingBatch) -> set[str]:
    named = {"draw", "truncation", "bias", "banned", "allowed", "penalties", "num_logprobs"}
    return {name for name in named if getattr(options, name) is not None}


PARTS = [
    (greedy(), set()),
    (greedy(top_k=5, top_p=0.5, min_p=0.1), set()),
    (SamplingParams(), {"draw"}),
    (SamplingParams(top_k=VOCAB), {"draw"}),
    (SamplingParams(top_k=3), {"draw", "truncation"}),
    (greedy(min_tokens=2), set()),
    (greedy(min_tokens=2, stop_token_ids=[3]), {"banned"}),
    (greedy(logit_bias={1: 1}), {"bias"}),
    (greedy(allowed_token_ids=[1]), {"allowed"}),
    (greedy(repetition_penalty=1.1), {"penalties"}),
    (greedy(logprobs=0), {"num_logprobs"}),
]


@pytest.mark.parametrize(
    ("params", "expected"), PARTS, ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None
)
def test_parts_that_nobody_asks_for_are_absent(params, expected):
    assert parts(build([request(greedy()), request(params)], 4)) == expected


def test_truncation_that_keeps_everything_is_not_in_the_program():
    assert build([request(SamplingParams(top_p=1 - 1e-9, min_p=1e-50, top_k=VOCAB))]).truncation is None


def test_truncation_holds_only_the_limits_in_use():
    found = build([request(SamplingParams(top_p=0.5)), request(greedy(top_k=3))]).truncation
    assert (found.min_p, found.top_k) == (None, None)
    np.testing.assert_array_equal(found.top_p, np.float32([0.5, 1.0]))


def compiled(params: SamplingParams) -> str:
    logits = np.zeros((1, 1000), np.float32)
    options = build([request(params)], vocab=1000)
    return draw.lower(logits, np.zeros(SEATS, np.int32), options).compile().as_text()


def test_an_all_greedy_program_has_no_sort_and_no_random_numbers():
    program = compiled(greedy())
    absent = [" sort(", "TopK", " xor(", " rng", " while(", " exponential("]
    assert not any(operation in program for operation in absent)


def test_a_program_that_truncates_and_draws_has_random_numbers_and_no_sort():
    program = compiled(SamplingParams(top_k=3, top_p=0.5, min_p=0.1))
    assert " xor(" in program
    assert "TopK" in program
    assert " sort(" not in program


def test_lists_come_in_few_widths():
    def width(count: int) -> int:
        bias = build([request(greedy(logit_bias=dict.fromkeys(range(count), 1.0))), request(greedy())], vocab=100).bias
        return 0 if bias is None else bias.ids.shape[1]

    def counted(count: int) -> int:
        mine = request(greedy(presence_penalty=1.0), output_token_ids=list(range(count)))
        return build([mine], vocab=1000).penalties.output_ids.shape[1]

    assert [width(count) for count in (0, 1, 4, 5, 16, 17)] == [0, 4, 4, 16, 16, 64]
    assert [counted(count) for count in (0, 1, 64, 65, 257)] == [64, 64, 64, 256, 1024]
