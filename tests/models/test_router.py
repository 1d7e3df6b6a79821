"""The router against the papers' formulas, one token and one expert at a time in float64."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_models import PLAIN_EXPERTS

from dcpjax.models.config import MoEConfig
from dcpjax.models.router import route

KINDS = {
    "softmax greedy": PLAIN_EXPERTS,
    "softmax normalised": replace(PLAIN_EXPERTS, normalise=True),
    "softmax scaled": replace(PLAIN_EXPERTS, scale=1.6, experts_per_token=1),
    "group-limited greedy": replace(PLAIN_EXPERTS, groups=5, groups_per_token=2, scale=16.0),
    "sigmoid without groups": replace(
        PLAIN_EXPERTS, scoring="sigmoid", correction_bias=True, normalise=True, scale=2.827
    ),
    "sigmoid with groups": replace(
        PLAIN_EXPERTS,
        experts=12,
        experts_per_token=4,
        scoring="sigmoid",
        correction_bias=True,
        groups=4,
        groups_per_token=2,
        normalise=True,
        scale=2.5,
    ),
    "sigmoid not normalised": replace(
        PLAIN_EXPERTS, scoring="sigmoid", correction_bias=True, groups=2, groups_per_token=1
    ),
}
TIE = 1e-5


def oracle(logits: np.ndarray, bias: np.ndarray | None, moe: MoEConfig) -> tuple[dict[int, float], float]:
    """One token: expert -> weight, and the least distance by which a choice was made."""
    if moe.scoring == "softmax":
        powers = np.exp(logits - logits.max())
        affinity = powers / powers.sum()
    else:
        affinity = 1 / (1 + np.exp(-logits))
    selection = affinity if bias is None else affinity + bias
    members = np.split(np.arange(moe.experts), moe.groups)
    best = 2 if moe.scoring == "sigmoid" else 1
    worth = np.array([np.sort(selection[group])[-best:].sum() for group in members])
    groups, group_gap = largest(worth, moe.groups_per_token)
    allowed = np.concatenate([members[group] for group in groups])
    places, gap = largest(selection[allowed], moe.experts_per_token)
    chosen = allowed[places]
    total = affinity[chosen].sum() if moe.normalise else 1.0
    return {int(expert): affinity[expert] / total * moe.scale for expert in chosen}, min(gap, group_gap)


def largest(values: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    order = np.argsort(-values)
    gap = np.inf if count == len(values) else values[order[count - 1]] - values[order[count]]
    return order[:count], float(gap)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0.1, 5.0))
def test_experts_and_weights_are_those_of_the_papers(kind, seed, spread):
    moe, generator = KINDS[kind], np.random.default_rng(seed)
    logits = generator.normal(0, spread, (4, moe.experts)).astype(np.float32)
    bias = generator.normal(0, 0.3, moe.experts).astype(np.float32) if moe.correction_bias else None
    expected = [oracle(row.astype(np.float64), bias, moe) for row in logits]
    assume(min(gap for _, gap in expected) > TIE)
    ids, weights = (np.asarray(part) for part in route(jax.numpy.asarray(logits), bias, moe))
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    for row, (choice, _) in enumerate(expected):
        assert set(ids[row].tolist()) == choice.keys()
        np.testing.assert_allclose(weights[row], [choice[int(expert)] for expert in ids[row]], rtol=2e-5)


def test_the_bias_selects_and_the_unbiased_scores_weigh():
    moe = replace(KINDS["sigmoid without groups"], experts=4, experts_per_token=2, scale=1.0)
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    ids, weights = route(jax.numpy.asarray(logits), np.array([0, -5, 0, 5], np.float32), moe)
    assert ids.tolist() == [[3, 0]]  # by score plus bias; the score alone would take 0 and 1
    scores = 1 / (1 + np.exp(-logits[0, [3, 0]]))
    np.testing.assert_allclose(np.asarray(weights)[0], scores / scores.sum(), rtol=1e-6)


def test_a_group_beats_a_better_expert_by_its_two_best():
    moe = replace(KINDS["sigmoid with groups"], experts=4, experts_per_token=1, groups=2, groups_per_token=1)
    logits = np.array([[3.0, -6.0, 1.0, 1.0]], np.float32)
    ids, _ = route(jax.numpy.asarray(logits), np.zeros(4, np.float32), moe)
    assert ids.tolist() == [[2]]
    ids, _ = route(jax.numpy.asarray(logits), None, replace(moe, scoring="softmax", correction_bias=False))
    assert ids.tolist() == [[0]]  # softmax: a group is as good as its best expert


def test_equal_scores_go_to_the_first_experts():
    ids, _ = route(jax.numpy.zeros((1, 10)), None, PLAIN_EXPERTS)
    assert ids.tolist() == [[0, 1, 2]]
