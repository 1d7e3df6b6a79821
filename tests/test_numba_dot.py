"""The CPU kernels for products against the product that XLA makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.models import numba_here
from dcpjax.models.layers import Normed, dot, dots, rms_norm
from dcpjax.models.numba_dot import few_rows_dot, fused_dots, suits, suits_matrix_units

matrix_units = pytest.mark.skipif(not numba_here.matrix_units(), reason="the CPU has no matrix units")


def drawn(rows: int, terms: int, columns: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(rows)
    x, weight = random.normal(size=(rows, terms)), random.normal(size=(columns, terms))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    """The float64 product of rounded numbers."""
    return np.asarray(x.astype(weight.dtype), np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 13, 32])
@pytest.mark.parametrize("columns", [1, 32, 95])
def test_the_kernel_of_few_rows_equals_the_float64_product_of_rounded_numbers(rows, columns, dtype):
    x, weight = drawn(rows, 96, columns, dtype)
    np.testing.assert_allclose(jax.jit(few_rows_dot)(x, weight), exact(x, weight), rtol=1e-5, atol=1e-5)


@matrix_units
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 80, 130])
@pytest.mark.parametrize("columns", [(16,), (32, 17), (576, 95, 31)])
@pytest.mark.parametrize("terms", [32, 96])
def test_matrix_units_equal_the_float64_product_of_rounded_numbers(rows, columns, terms):
    x, _ = drawn(rows, terms, 1, jnp.bfloat16)
    weights = [drawn(count, terms, count, jnp.bfloat16)[1] for count in columns]
    for found, weight in zip(jax.jit(fused_dots)(x, *weights), weights, strict=True):
        np.testing.assert_allclose(found, exact(x, weight), rtol=1e-5, atol=2e-5)


@matrix_units
def test_rows_of_more_than_one_panel_equal_the_float64_product():
    x, weight = drawn(1100, 576, 40, jnp.bfloat16)
    np.testing.assert_allclose(fused_dots(x, weight)[0], exact(x, weight), rtol=1e-5, atol=5e-5)


@matrix_units
@pytest.mark.parametrize("rows", [1, 40])
def test_matrix_units_norm_gate_and_add_as_xla_does(rows):
    x, gate = drawn(rows, 64, 96, jnp.bfloat16)
    up, down = drawn(rows + 1, 64, 96, jnp.bfloat16)[1], drawn(rows + 2, 96, 64, jnp.bfloat16)[1]
    gate, up, down = gate / 8, up / 8, down / 8
    normed = Normed(3 * x, jnp.linspace(0.5, 2, 64, dtype=jnp.bfloat16), 0.1)
    risen, raised = dots(normed, gate, up)
    expected = 3 * x + dot(jax.nn.silu(risen) * raised, down)
    found = fused_dots(3 * x, gate, up, down, norm=(normed.weight, 0.1), gated=True, onto=3 * x)[0]
    # a sum that is rounded to its neighbour in bfloat16 moves the result
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    assert np.median(np.abs(found - expected)) < 1e-5
    np.testing.assert_allclose(rms_norm(*normed), normed.array())


@matrix_units
def test_silu_goes_through_at_both_ends():
    x = jnp.asarray([[-200.0], [-90.0], [-1.0], [0.0], [1.0], [90.0], [200.0]]) * jnp.eye(1, 32)
    one = jnp.zeros((32, 32), jnp.bfloat16).at[:, 0].set(1.0)
    again = jnp.eye(32, dtype=jnp.bfloat16)
    found = fused_dots(x, one, one, again, gated=True)[0][:, 0]
    number = x[:, 0].astype(jnp.bfloat16).astype(jnp.float32)
    expected = (jax.nn.silu(number) * number).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dot_uses_kernels_on_a_lone_cpu_alone_and_adds_bias_and_stream(dtype):
    x, weight = drawn(3, 64, 40, dtype)
    bias, onto = jnp.arange(40, dtype=dtype), jnp.ones((3, 40))

    def text(lone_cpu: bool) -> str:
        return jax.jit(lambda x, w: dot(x, w, bias, lone_cpu=lone_cpu)).lower(x, weight).as_text()

    assert "dcpjax_product" in text(True)
    assert "dcpjax_product" not in text(False)
    for options in ({"bias": bias}, {"onto": onto}, {"bias": bias, "onto": onto}):
        found, expected = dot(x, weight, lone_cpu=True, **options), dot(x, weight, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_not_a_number_and_infinity_go_through():
    x, weight = drawn(2, 32, 16, jnp.float32)
    x = x.at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf)
    bits = jnp.asarray([[0x7FFFFFFF], [0xFFFFFFFF]], jnp.uint32)  # NaN of all ones: rounding must not carry it away
    unusual = jnp.broadcast_to(jax.lax.bitcast_convert_type(bits, jnp.float32), (2, 32))
    products = [few_rows_dot(x, weight)]
    if numba_here.matrix_units():
        products += fused_dots(x, weight.astype(jnp.bfloat16))
        assert np.isnan(fused_dots(unusual, weight.astype(jnp.bfloat16))[0]).all()
    for found in products:
        assert np.isnan(found[0]).all()
        assert np.isinf(found[1]).all()


def test_a_rows_result_does_not_depend_on_the_other_rows():
    x, weight = drawn(40, 96, 33, jnp.bfloat16)
    kernels = [lambda x: few_rows_dot(x[:8], weight)]
    if numba_here.matrix_units():
        kernels.append(lambda x: fused_dots(x, weight)[0])
    for kernel in kernels:
        together = kernel(x)
        for row in range(len(together)):
            np.testing.assert_array_equal(kernel(x[row : row + 1])[0], together[row])


def test_what_the_kernels_cannot_take_stays_with_xla(monkeypatch):
    x, weight = drawn(4, 64, 16, jnp.float32)
    bfloat16 = weight.astype(jnp.bfloat16)
    assert suits(x, weight)
    assert not suits(x, weight.astype(jnp.float16))
    assert suits(jnp.zeros((32, 64)), weight)
    assert not suits(jnp.zeros((33, 64)), weight)
    assert not suits(jnp.zeros((9, 64)), bfloat16)
    assert not suits(jnp.zeros((4, 40)), jnp.zeros((8, 40)))
    assert suits_matrix_units(bfloat16) == numba_here.matrix_units()
    assert not suits_matrix_units(weight)
    assert not suits_matrix_units(bfloat16, bfloat16[:15])
    assert not suits_matrix_units(bfloat16[:, :48])
    monkeypatch.setattr(numba_here, "available", lambda: False)
    numba_here.matrix_units.cache_clear()
    assert not suits(x, weight)
    assert not suits_matrix_units(bfloat16)
    numba_here.matrix_units.cache_clear()
