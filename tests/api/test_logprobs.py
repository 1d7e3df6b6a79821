from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from dcpjax.api.logprobs import Logprob, to_logprobs
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Request
from dcpjax.sampling.known_tokens import KnownTokens
from dcpjax.sampling.sampler import SamplingBatch, sample
from dcpjax.sampling.scoring import score, shared_num_logprobs

VOCAB = 12
SEEDS = st.integers(0, 2**32 - 1)

scored = jax.jit(score, static_argnames="num_logprobs")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, from the definition."""
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def random_logits(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3.0, size=(rows, VOCAB)).astype(np.float32)


def request(params: SamplingParams, seed: int) -> Request:
    return Request(number=0, prompt_token_ids=[3], params=params, max_tokens=100, seed=seed, output_token_ids=[3, 4])


# --- on the device


@given(SEEDS, st.sampled_from([0, 1, 4, -1]))
def test_scores_are_those_of_the_definition(seed, count):
    logits = random_logits(seed)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, 4).astype(np.int32)
    found, expected = scored(logits, tokens, count), log_softmax(logits)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : VOCAB if count == -1 else count]
    np.testing.assert_allclose(found.chosen, expected[range(4), tokens], atol=1e-5)
    np.testing.assert_array_equal(found.rank, (logits >= logits[range(4), tokens][:, None]).sum(1))
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_equally_likely_tokens_share_the_worst_of_their_ranks():
    logits = np.array([[1.0, 3.0, 3.0, 2.0, 3.0]] * 4, np.float32)
    found = scored(logits, np.array([4, 1, 3, 0], np.int32), 4)
    np.testing.assert_array_equal(found.rank, [3, 3, 4, 5])
    np.testing.assert_array_equal(found.top_ids, [[1, 2, 4, 3]] * 4)


def test_prompt_scores_ignore_padding_and_score_row_i_for_target_i():
    logits = random_logits(3)
    found = scored(logits, np.array([5, 0, 11, -1], np.int32), num_logprobs=1)
    np.testing.assert_allclose(found.chosen[:3], log_softmax(logits)[range(3), [5, 0, 11]], atol=1e-5)
    np.testing.assert_array_equal(found.top_ids[:, 0], logits.argmax(1))
    assert np.isfinite(found.chosen).all()


CHANGES = [
    {"temperature": 0.2, "top_k": 2},
    {"temperature": 0, "logit_bias": {3: 40.0}},
    {"temperature": 0, "allowed_token_ids": [1, 2]},
    {"temperature": 0, "presence_penalty": 2.0},
]


@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_sampled_tokens_are_scored_by_the_logits_as_they_came(options):
    logits = random_logits(4, rows=2)
    params = SamplingParams(logprobs=3, **options)
    batch = SamplingBatch.build([request(params, 1), request(params, 2)], 2, VOCAB)  # type: ignore[list-item]
    sampled, _ = jax.jit(sample)(logits, np.zeros(2, np.int32), batch)
    assert sampled.logprobs is not None
    expected, tokens = log_softmax(logits), np.asarray(sampled.tokens)
    np.testing.assert_allclose(sampled.logprobs.chosen, expected[range(2), tokens], atol=1e-5)
    np.testing.assert_array_equal(sampled.logprobs.top_ids, np.argsort(-logits, axis=1)[:, :4])


def test_ids_that_no_token_has_count_for_probabilities_alone():
    logits, known = random_logits(5), np.ones(VOCAB, bool)
    known[[int(logits[0].argmax()), 3]] = False
    tokens = np.full(4, int(np.flatnonzero(known)[0]), np.int32)
    found, expected = (
        scored(logits, tokens, -1, KnownTokens.on(SingleDeviceSharding(jax.devices()[0]), known).ids),
        log_softmax(logits),
    )
    np.testing.assert_allclose(found.chosen, expected[range(4), tokens], atol=1e-5)
    np.testing.assert_array_equal(found.rank, ((logits >= logits[range(4), tokens][:, None]) & known).sum(1))
    np.testing.assert_array_equal(found.top_ids[:, :-2], np.argsort(np.where(known, -logits, np.inf), 1)[:, :-2])
    np.testing.assert_array_equal(found.top[:, -2:], -np.inf)


def test_the_number_of_scores_is_one_of_few():
    shared = partial(shared_num_logprobs, vocab_size=100)
    assert [shared([count]) for count in (None, 0, 1, 2, 4, 5, 16, 20, 64)] == [None, 0, 1, 4, 4, 16, 16, 64, 64]
    assert [shared([65]), shared([-1]), shared([200])] == [-1, -1, -1]
    assert shared([None, 3, 0]) == 4
    assert shared([None, 3, -1]) == -1
    assert shared([]) is None


# --- on the host


def as_dict(chosen_id: int, count: int, **more) -> dict[int, Logprob]:
    top_ids, top = [7, 2, 9, 4], [-0.5, -1.5, -2.5, -3.5]
    chosen, rank = {7: (-0.5, 1), 9: (-2.5, 3), 11: (-9.0, 8)}[chosen_id]
    return to_logprobs(chosen_id, chosen, rank, top_ids, top, count, **more)


def test_the_chosen_token_comes_first_and_then_the_likeliest():
    assert as_dict(11, 2) == {11: Logprob(-9.0, 8), 7: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)}
    assert list(as_dict(11, 2)) == [11, 7, 2]


def test_a_chosen_token_among_the_likeliest_is_not_given_twice():
    assert list(as_dict(9, 3)) == [9, 7, 2]
    assert as_dict(9, 3)[9] == Logprob(-2.5, 3)


def test_no_likeliest_tokens_leave_the_chosen_one():
    assert as_dict(11, 0) == {11: Logprob(-9.0, 8)}


def test_minus_one_gives_all_there_are():
    assert list(as_dict(7, -1)) == [7, 2, 9, 4]


def test_of_equally_likely_tokens_each_has_the_rank_of_its_place():
    logits = np.array([[3.0, 3.0, 1.0, 0.0, 0.0]], np.float32)
    found = scored(logits, np.array([0], np.int32), 1)
    top_ids, top = np.asarray(found.top_ids[0]).tolist(), np.asarray(found.top[0]).tolist()
    entries = to_logprobs(0, found.chosen[0], found.rank[0], top_ids, top, 1)
    assert entries[0].rank == 1


def test_entries_are_plain_numbers_and_text_comes_from_the_caller():
    for token, entry in as_dict(11, 2, spell=lambda token: (f"<{token}>", bytes([token]))).items():
        assert (type(token), type(entry.logprob), type(entry.rank)) == (int, float, int)
        assert (entry.decoded_token, entry.token_bytes) == (f"<{token}>", bytes([token]))
    assert (as_dict(11, 2)[11].decoded_token, as_dict(11, 2)[11].token_bytes) == (None, None)
