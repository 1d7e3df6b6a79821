import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from dcpjax.sampling.argmax import argmax, blocked_argmax, plain_argmax
from dcpjax.sampling.known_tokens import BLOCK, KnownIds, KnownTokens

VOCAB = 3 * BLOCK + 5
ROWS = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)

FORMS = [jax.jit(plain_argmax), jax.jit(blocked_argmax), jax.jit(argmax)]


@given(st.integers(0, 2**32 - 1), st.integers(1, VOCAB), st.sampled_from([0.0, 0.5, 4.0]))
def test_every_form_finds_the_first_of_the_largest_logits(seed, vocab_size, step):
    logits = np.random.default_rng(seed).normal(size=(3, vocab_size)).astype(np.float32)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    for form in FORMS:
        found = form(logits)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, logits.argmax(axis=1))


@pytest.mark.parametrize("places", [[0], [VOCAB - 1], [BLOCK - 1, BLOCK], [5, 7, 2 * BLOCK]], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_form_finds_the_same_index_where_logits_are_not_finite(places, value):
    logits = np.stack([ROWS[0], np.full(VOCAB, value, np.float32), np.full(VOCAB, -np.inf, np.float32)])
    logits[[0, 2], np.array(places)[:, None]] = value
    for form in FORMS:
        np.testing.assert_array_equal(form(logits), logits.argmax(axis=1))


def ids(known: np.ndarray) -> KnownIds:
    return KnownTokens.on(SingleDeviceSharding(jax.devices()[0]), known).ids


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, VOCAB), st.sampled_from([0.0, 0.03, 0.5]))
def test_every_form_finds_the_first_of_the_largest_logits_that_count(seed, first, last, share):
    """Those from `last` on do not count, and a share of the others; the first blocks hold the largest."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=(3, VOCAB)) * 2).astype(np.float32)
    logits[:, : first * BLOCK] += 1
    known = (random.random(VOCAB) >= share) & (np.arange(VOCAB) < last)
    expected = np.where(known, logits, -np.inf).argmax(axis=1)
    for form in FORMS if known.any() else ():
        np.testing.assert_array_equal(form(logits, ids(known)), expected)


def test_indices_that_do_not_count_cost_no_pass_over_the_logits():
    """No value as large as the logits is made for them: they are left out inside the search."""
    many = np.zeros((32, 64 * BLOCK), np.float32)

    def temporary(*known: KnownIds) -> int:
        return jax.jit(argmax).lower(many, *known).compile().memory_analysis().temp_size_in_bytes

    assert temporary(ids(np.arange(many.shape[1]) < 4000)) < temporary() + many.nbytes / 8


def lowered(platform: str) -> str:
    return jax.jit(argmax).trace(ROWS).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "blocked"), [("cpu", True), ("cuda", False), ("rocm", False), ("tpu", False)])
def test_only_programs_for_cpu_search_in_blocks(platform, blocked):
    program = lowered(platform)
    assert (f"tensor<4x4x{BLOCK}xf32>" in program) is blocked
    assert ("stablehlo.pad" in program) is blocked
    assert (f"across dimensions = [1] : (tensor<4x{VOCAB}xf32>" in program) is not blocked


def test_the_compiled_program_for_cpu_is_the_blocked_search_alone():
    def operations(form: jax.stages.Wrapped) -> list[str]:
        return re.findall(r" ([a-z][a-z-]*)\(", form.lower(ROWS).compile().as_text() or "")

    assert operations(jax.jit(argmax)) == operations(jax.jit(blocked_argmax)) != operations(jax.jit(plain_argmax))
