"""The CPU kernels for products against the product that XLA makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import sample

from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.product import TERMS
from dcpjax.models.kernels.cpu.product_calls import MOST_ROWS, fused_dots, suits, suits_matrix_units
from dcpjax.models.layers import NormedInput, dot, dots

matrix_units = pytest.mark.skipif(not support.matrix_units(), reason="the CPU has no matrix units")


def drawn(rows: int, terms: int, columns: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(rows)
    x, weight = random.normal(size=(rows, terms)), random.normal(size=(columns, terms))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    """The float64 product of rounded numbers."""
    return np.asarray(x.astype(weight.dtype), np.float64) @ np.asarray(weight, np.float64).T


@pytest.fixture(params=["vector units", pytest.param("matrix units", marks=matrix_units)])
def either(request, monkeypatch) -> None:
    """Without matrix units, and with them if there are any."""
    if request.param == "vector units":
        without_matrix_units(monkeypatch)


def without_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "matrix_units", lambda: False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", sample([1, 2, 3, 4, 7, 8, 13, 40], 1, 7, 8, 40))
@pytest.mark.parametrize("columns", [(1,), (12, 95, 3), (24, 32), (200,)])
@pytest.mark.parametrize("terms", [96, TERMS + 48])
def test_vector_units_equal_the_float64_product_of_rounded_numbers(rows, columns, terms, dtype, monkeypatch):
    without_matrix_units(monkeypatch)
    x, _ = drawn(rows, terms, 1, dtype)
    weights = [drawn(count, terms, count, dtype)[1] for count in columns]
    for found, weight in zip(jax.jit(fused_dots)(x, *weights), weights, strict=True):
        np.testing.assert_allclose(found, exact(x, weight), rtol=1e-5, atol=1e-5 if terms == 96 else 5e-5)


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


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(1, 96, jnp.bfloat16), (40, 96, jnp.bfloat16), (13, 16, jnp.float32)]
)
def test_kernels_norm_gate_and_add_as_xla_does(rows, width, dtype):
    x, gate = drawn(rows, 64, width, dtype)
    up, down = drawn(rows + 1, 64, width, dtype)[1], drawn(rows + 2, width, 64, dtype)[1]
    gate, up, down = gate / 8, up / 8, down / 8
    normed = NormedInput(3 * x, jnp.linspace(0.5, 2, 64, dtype=dtype), 0.1)
    risen, raised = dots(normed, gate, up)
    expected = 3 * x + dot(jax.nn.silu(risen) * raised, down)
    found = fused_dots(3 * x, gate, up, down, norm=(normed.weight, 0.1), gated=True, residual=3 * x)[0]
    # a sum that is rounded to its neighbour in bfloat16 moves the result
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 if dtype == jnp.bfloat16 else 2e-5)
    assert np.median(np.abs(found - expected)) < 1e-5


def test_a_norm_of_another_dtype_is_no_kernels_business():
    x, weight = drawn(3, 64, 40, jnp.bfloat16)
    normed = NormedInput(x, jnp.linspace(0.5, 2, 64, dtype=jnp.float32), 0.1)
    found, expected = dots(normed, weight, single_cpu=True)[0], dots(normed, weight)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either")
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
    bias, residual = jnp.arange(40, dtype=dtype), jnp.ones((3, 40))

    def text(single_cpu: bool) -> str:
        return jax.jit(lambda x, w: dot(x, w, bias, single_cpu=single_cpu)).lower(x, weight).as_text()

    assert "dcpjax_product" in text(True)
    assert "dcpjax_product" not in text(False)
    for options in ({"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        found, expected = dot(x, weight, single_cpu=True, **options), dot(x, weight, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_not_a_number_and_infinity_go_through(dtype):
    x, weight = drawn(2, 32, 16, dtype)
    x = x.at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf)
    bits = jnp.asarray([[0x7FFFFFFF], [0xFFFFFFFF]], jnp.uint32)  # NaN of all ones: rounding must not carry it away
    unusual = jnp.broadcast_to(jax.lax.bitcast_convert_type(bits, jnp.float32), (2, 32))
    (found,), (none,) = fused_dots(x, weight), fused_dots(unusual, weight)
    assert np.isnan(found[0]).all()
    assert np.isinf(found[1]).all()
    assert np.isnan(none).all()


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_rows_result_does_not_depend_on_the_other_rows(dtype):
    x, weight = drawn(40, 2 * TERMS + 32, 33, dtype)
    (together,) = fused_dots(x, weight)
    for count in (1, 2, 3, 8, 11):
        for row in range(0, 40 - count, 5):
            np.testing.assert_array_equal(fused_dots(x[row : row + count], weight)[0], together[row : row + count])


def test_what_the_kernels_cannot_take_stays_with_xla(monkeypatch):
    _, weight = drawn(4, 64, 16, jnp.float32)
    bfloat16 = weight.astype(jnp.bfloat16)
    assert suits(4, weight)
    assert not suits(4, weight.astype(jnp.float16))
    assert not suits(4, weight, bfloat16)
    assert suits(MOST_ROWS, weight)
    assert not suits(MOST_ROWS + 1, weight)
    assert suits(MOST_ROWS + 1, bfloat16)
    assert not suits(4, jnp.zeros((8, 40)))
    assert suits_matrix_units(bfloat16) == support.matrix_units()
    assert not suits_matrix_units(weight)
    assert not suits_matrix_units(bfloat16, bfloat16[:15])
    assert not suits_matrix_units(bfloat16[:, :48])
    monkeypatch.setattr(support, "available", lambda: False)
    support.matrix_units.cache_clear()
    assert not suits(4, weight)
    assert not suits_matrix_units(bfloat16)
    support.matrix_units.cache_clear()
