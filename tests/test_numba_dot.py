"""The CPU kernel for few rows against the product that XLA makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.models import numba_here
from dcpjax.models.layers import dot
from dcpjax.models.numba_dot import few_rows_dot, suits


def drawn(rows: int, terms: int, columns: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(rows)
    x, weight = random.normal(size=(rows, terms)), random.normal(size=(columns, terms))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 13, 32])
@pytest.mark.parametrize("columns", [1, 32, 95])
def test_the_kernel_equals_the_float64_product_of_rounded_numbers(rows, columns, dtype):
    x, weight = drawn(rows, 96, columns, dtype)
    rounded = np.asarray(x.astype(dtype), np.float64)
    expected = rounded @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(jax.jit(few_rows_dot)(x, weight), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dot_uses_it_on_a_lone_cpu_alone_and_adds_the_bias(dtype):
    x, weight = drawn(3, 64, 40, dtype)
    bias = jnp.arange(40, dtype=dtype)

    def text(lone_cpu: bool) -> str:
        return jax.jit(lambda x, w: dot(x, w, bias, lone_cpu=lone_cpu)).lower(x, weight).as_text()

    assert "dcpjax_product" in text(True)
    assert "dcpjax_product" not in text(False)
    found, expected = dot(x, weight, bias, lone_cpu=True), dot(x, weight, bias)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_not_a_number_and_infinity_go_through():
    x, weight = drawn(2, 32, 5, jnp.float32)
    found = few_rows_dot(x.at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf), weight)
    assert np.isnan(found[0]).all()
    assert np.isinf(found[1]).all()


def test_a_rows_result_does_not_depend_on_the_other_rows():
    x, weight = drawn(8, 96, 33, jnp.bfloat16)
    together = few_rows_dot(x, weight)
    for row in range(8):
        np.testing.assert_array_equal(few_rows_dot(x[row : row + 1], weight)[0], together[row])


def test_what_the_kernel_cannot_take_stays_with_xla(monkeypatch):
    x, weight = drawn(4, 64, 8, jnp.float32)
    assert suits(x, weight)
    assert not suits(x, weight.astype(jnp.float16))
    assert suits(jnp.zeros((32, 64)), weight)
    assert not suits(jnp.zeros((33, 64)), weight)
    assert not suits(jnp.zeros((9, 64)), weight.astype(jnp.bfloat16))
    assert not suits(jnp.zeros((4, 40)), jnp.zeros((8, 40)))
    monkeypatch.setattr(numba_here, "available", lambda: False)
    assert not suits(x, weight)
