"""Building blocks of a decoder: matrix product, norm, table lookup.

The residual stream and all statistics are float32; weights keep their dtype.
"""

from functools import partial as bind
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.kernels.cpu import product_calls
from dcpjax.models.matmul import matmul
from dcpjax.sharding.platform import on_cpu


class NormedInput(NamedTuple):
    """The input of attention or feed-forward: the residual stream and the norm that it goes through first.

    The norm is not computed yet, because kernels for matrix products compute it while they read the stream.
    """

    residual: jax.Array  # [T, M] float32
    weight: jax.Array  # [M]
    eps: float

    def normed(self) -> jax.Array:
        """[T, M] float32."""
        return rms_norm(self.residual, self.weight, self.eps)


def dot(
    x: jax.Array | NormedInput,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    single_cpu: bool = False,
) -> jax.Array:
    """x [T, in] float32, weight [out, in] -> [T, out] float32, plus bias [out] and `residual` [T, out].

    `single_cpu`: the only device is a CPU, for which there are kernels.
    """
    if single_cpu and bias is None and product_calls.suits(_rows(x), weight):
        return fused_dots(x, weight, residual=residual)[0]
    (y,) = dots(x, weight, single_cpu=single_cpu)
    y = add_bias(y, bias)
    return y if residual is None else residual + y


def dots(x: jax.Array | NormedInput, *weights: jax.Array, single_cpu: bool = False) -> list[jax.Array]:
    """`dot` with each of the weights, by one call of a kernel if there is one."""
    if single_cpu and product_calls.suits(_rows(x), *weights):
        return fused_dots(x, *weights)
    x = x.normed() if isinstance(x, NormedInput) else x
    return [_xla_dot(x, weight) for weight in weights]


def _rows(x: jax.Array | NormedInput) -> int:
    return (x.residual if isinstance(x, NormedInput) else x).shape[0]


def fused_dots(x: jax.Array | NormedInput, *weights: jax.Array, **options: Any) -> list[jax.Array]:
    """`product_calls.fused_dots` with the norm of a `NormedInput`."""
    if isinstance(x, NormedInput) and x.weight.dtype != weights[0].dtype:
        x = x.normed()
    if isinstance(x, NormedInput):
        return product_calls.fused_dots(x.residual, *weights, norm=(x.weight, x.eps), **options)
    return product_calls.fused_dots(x.astype(jnp.float32), *weights, **options)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y [T, out], bias [out] or None -> [T, out]."""
    return y if bias is None else y + bias.astype(jnp.float32)[None, :]


def _xla_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in], weight [out, in] -> [T, out] float32, as a plain XLA operation."""
    x, product = x.astype(weight.dtype), bind(matmul, axes=(1, 1))
    if x.shape[0] == 1 and weight.dtype == jnp.bfloat16:
        return on_cpu(_dot_of_two_rows, product, x, weight)
    return product(x, weight)


def _dot_of_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [1, in], weight [out, in], both bfloat16 -> [1, out] float32, computed with a second row of zeros.

    XLA's CPU backend has a fast bfloat16 product for two rows and more, but not for one.
    """
    return matmul(jnp.pad(x, ((0, 1), (0, 0))), weight, (1, 1))[:1]


def head_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """One matrix per head: x [T, H, in], weight [H, in, out] -> [T, H, out] float32."""
    return matmul(x.astype(weight.dtype).swapaxes(0, 1), weight, (2, 1), batched=True).swapaxes(0, 1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in float32."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [T] of table [V, M] as float32 [T, M]. Padding ids (-1) read row 0."""
    ids, take = jnp.maximum(ids, 0), bind(jnp.take, axis=0)
    rows = on_cpu(_take_by_bits, take, table, ids) if table.dtype == jnp.bfloat16 else take(table, ids)
    return rows.astype(jnp.float32)


def _take_by_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a bfloat16 table, read as integers: XLA's CPU backend would convert the whole table to float32 first."""
    bits = jnp.take(jax.lax.bitcast_convert_type(table, jnp.uint16), ids, axis=0)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
