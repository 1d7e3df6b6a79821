"""Building blocks of a decoder: matrix product, norm, rotary embedding, table lookup.

The residual stream and all statistics are float32; weights keep their dtype. Knows nothing about meshes.
"""

from functools import partial as bind
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.kernels.cpu import product_calls
from dcpjax.models.matmul import matmul
from dcpjax.sharding.platform import on_cpu


class Normed(NamedTuple):
    """The residual stream as a branch reads it, normed. Kernels norm while they read."""

    stream: jax.Array  # [N, M] float32
    weight: jax.Array  # [M]
    eps: float

    def array(self) -> jax.Array:
        """[N, M] float32."""
        return rms_norm(self.stream, self.weight, self.eps)


def dot(
    x: jax.Array | Normed,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    onto: jax.Array | None = None,
    single_cpu: bool = False,
) -> jax.Array:
    """x [N, I] float32, weight [O, I] -> [N, O] float32, with a bias [O], added to `onto` [N, O].

    `single_cpu`: the only device is a CPU, for which there are kernels.
    """
    if single_cpu and bias is None and product_calls.suits(_rows(x), weight):
        return fused_dots(x, weight, onto=onto)[0]
    (y,) = dots(x, weight, single_cpu=single_cpu)
    y = add_bias(y, bias)
    return y if onto is None else onto + y


def dots(x: jax.Array | Normed, *weights: jax.Array, single_cpu: bool = False) -> list[jax.Array]:
    """`dot` with each of some weights, in one call where a kernel takes them together."""
    if single_cpu and product_calls.suits(_rows(x), *weights):
        return fused_dots(x, *weights)
    x = x.array() if isinstance(x, Normed) else x
    return [_xla_dot(x, weight) for weight in weights]


def _rows(x: jax.Array | Normed) -> int:
    return (x.stream if isinstance(x, Normed) else x).shape[0]


def fused_dots(x: jax.Array | Normed, *weights: jax.Array, **options: Any) -> list[jax.Array]:
    """`product_calls.fused_dots`, which norms what is `Normed`."""
    if isinstance(x, Normed) and x.weight.dtype != weights[0].dtype:
        x = x.array()
    if isinstance(x, Normed):
        return product_calls.fused_dots(x.stream, *weights, norm=(x.weight, x.eps), **options)
    return product_calls.fused_dots(x.astype(jnp.float32), *weights, **options)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y [N, O], bias [O] or None -> [N, O]."""
    return y if bias is None else y + bias.astype(jnp.float32)[None, :]


def _xla_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`dot` without kernels of ours: x [T, in], weight [out, in] -> [T, out] float32."""
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
    """Rows `ids` [N] of table [V, M] as float32 [N, M]. Padding ids (-1) read row 0."""
    ids, take = jnp.maximum(ids, 0), bind(jnp.take, axis=0)
    rows = on_cpu(_take_by_bits, take, table, ids) if table.dtype == jnp.bfloat16 else take(table, ids)
    return rows.astype(jnp.float32)


def _take_by_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a bfloat16 table, read as integers: XLA's CPU backend would convert the whole table to float32 first."""
    bits = jnp.take(jax.lax.bitcast_convert_type(table, jnp.uint16), ids, axis=0)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
