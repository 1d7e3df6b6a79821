import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.sampling.argmax import BLOCK, argmax, blocked_argmax, plain_argmax

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
