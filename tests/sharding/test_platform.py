"""Workarounds of XLA's CPU backend are in programs for CPUs only, and compute what the plain forms compute."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.models import layers, rotary, routed_experts
from dcpjax.models.attention import softmax
from dcpjax.models.config import RopeConfig
from dcpjax.sharding import merge
from dcpjax.sharding.platform import on_cpu

OTHERS = ("tpu", "cuda")


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def fold(q: jax.Array, k: jax.Array, v: jax.Array) -> softmax.SoftmaxState:
    mask = jnp.ones((q.shape[1], k.shape[2]), bool)
    return softmax.fold(softmax.empty_state(q.shape[:3], v.shape[2]), q, k, v, mask)


def angles(positions: jax.Array) -> rotary.Rotary:
    return rotary.shared_rotary(positions, 8, RopeConfig(theta=10000.0))


# a function that calls `on_cpu`, its arguments, what only programs for CPUs hold, what only other programs hold
Case = tuple[Callable[..., Any], tuple[jax.Array, ...], str, str | None]
CASES: dict[str, Case] = {
    "maximum of scores": (fold, (array(2, 1, 3, 8), array(2, 8, 64), array(2, 64, 8)), "stablehlo.slice", None),
    "sum over ranks": (merge._sum_over_ranks, (array(4, 3, 8),), "stablehlo.slice", "stablehlo.reduce"),
    "an expert's matrix": (
        routed_experts._matrix,
        (array(4, 16, 8, dtype=jnp.bfloat16), jnp.int32(2)),
        "stablehlo.optimization_barrier",
        None,
    ),
    "rows of the embedding": (
        layers.lookup,
        (array(32, 8, dtype=jnp.bfloat16), jnp.array([3, -1, 5])),
        "stablehlo.bitcast_convert",
        None,
    ),
    "product of one row": (
        layers._xla_dot,
        (array(1, 16), array(8, 16, dtype=jnp.bfloat16)),
        "stablehlo.pad",
        None,
    ),
    "angles": (angles, (jnp.arange(5),), 'inlineable = "false"', "stablehlo.optimization_barrier"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def lowered(run: Callable[..., Any], operands: tuple[jax.Array, ...], platform: str) -> str:
    return jax.jit(run).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def test_programs_for_cpus_hold_the_workaround(case):
    run, operands, workaround, plain = case
    text = lowered(run, operands, "cpu")
    assert workaround in text
    assert plain is None or plain not in text


@pytest.mark.parametrize("platform", OTHERS)
def test_programs_for_other_platforms_hold_the_plain_form(case, platform):
    run, operands, workaround, plain = case
    text = lowered(run, operands, platform)
    assert workaround not in text
    assert plain is None or plain in text


def test_both_forms_compute_the_same(case, monkeypatch):
    run, operands, *_ = case
    found = jax.jit(run)(*operands)
    for module in (softmax, merge, routed_experts, layers, rotary):
        monkeypatch.setattr(module, "on_cpu", lambda workaround, plain, *operands: plain(*operands))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, 1e-6, 1e-6), found, run(*operands))


def test_the_compiled_program_has_no_branch():
    run = jax.jit(lambda x: on_cpu(jnp.sin, jnp.cos, x))
    program = run.lower(array(4)).compile().as_text()
    assert "sine" in program
    assert "conditional" not in program
    np.testing.assert_array_equal(run(array(4)), jax.jit(jnp.sin)(array(4)))
