"""Building blocks of a decoder: matrix product, norm, rotary embedding, table lookup.

The residual stream and all statistics are float32; weights keep their dtype. Knows nothing about meshes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.xla_metadata import set_xla_metadata

from dcpjax.models import numba_dot
from dcpjax.models.config import RopeConfig


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
    lone_cpu: bool = False,
) -> jax.Array:
    """x [N, I] float32, weight [O, I] -> [N, O] float32, with a bias [O], added to `onto` [N, O].

    `lone_cpu`: the only device is a CPU, for which there are kernels.
    """
    if lone_cpu and bias is None and numba_dot.suits(_rows(x), weight):
        return fused_dots(x, weight, onto=onto)[0]
    (y,) = dots(x, weight, lone_cpu=lone_cpu)
    y = add_bias(y, bias)
    return y if onto is None else onto + y


def dots(x: jax.Array | Normed, *weights: jax.Array, lone_cpu: bool = False) -> list[jax.Array]:
    """`dot` with each of some weights, in one call where a kernel takes them together."""
    if lone_cpu and numba_dot.suits(_rows(x), *weights):
        return fused_dots(x, *weights)
    x = x.array() if isinstance(x, Normed) else x
    return [_xla_dot(x, weight) for weight in weights]


def _rows(x: jax.Array | Normed) -> int:
    return (x.stream if isinstance(x, Normed) else x).shape[0]


def fused_dots(x: jax.Array | Normed, *weights: jax.Array, **options: Any) -> list[jax.Array]:
    """`numba_dot.fused_dots`, which norms what is `Normed`."""
    if isinstance(x, Normed) and x.weight.dtype != weights[0].dtype:
        x = x.array()
    if isinstance(x, Normed):
        return numba_dot.fused_dots(x.stream, *weights, norm=(x.weight, x.eps), **options)
    return numba_dot.fused_dots(x.astype(jnp.float32), *weights, **options)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y [N, O], bias [O] or None -> [N, O]."""
    return y if bias is None else y + bias.astype(jnp.float32)[None, :]


def _xla_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`preferred_element_type` keeps bfloat16 products on the fused path: without it XLA's CPU backend widens the
    weight first. There a single bfloat16 row has no fast path at all, so it travels with a second row of zeros.
    """
    rows = x.shape[0]
    x = x.astype(weight.dtype)
    if rows == 1 and weight.dtype == jnp.bfloat16:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract_last, precision=precision, preferred_element_type=jnp.float32)[:rows]


def head_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """One matrix per head: x [N, H, I], weight [H, I, O] -> [N, H, O] float32. Heads lead, as XLA's CPU needs."""
    x = x.astype(weight.dtype).swapaxes(0, 1)
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    contract = (((2,), (1,)), ((0,), (0,)))
    y = jax.lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=jnp.float32)
    return y.swapaxes(0, 1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in float32."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [N] of table [V, M] as float32 [N, M]. Padding ids (-1) read row 0.

    A bfloat16 table is read through its bits: XLA's CPU backend would widen all of it first.
    """
    ids = jnp.maximum(ids, 0)
    if table.dtype == jnp.bfloat16:
        bits = jnp.take(jax.lax.bitcast_convert_type(table, jnp.uint16), ids, axis=0)
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    return jnp.take(table, ids, axis=0).astype(jnp.float32)


@struct.dataclass
class Rotary:
    """Angles of one step, shared by all layers."""

    # [N, 1, D/2] float32: cosine of position * frequency, broadcast over heads
    cos: jax.Array
    # [N, 1, D/2] float32
    sin: jax.Array


def shared_rotary(positions: jax.Array, head_dim: int, config: RopeConfig, platform: str) -> Rotary:
    """`rotary`, computed once: XLA would compute the angles anew in every layer, on CPU for every head.

    Its CPU backend takes an optimization barrier away before it fuses, but not a call.
    """
    if platform == "cpu":
        with set_xla_metadata(inlineable="false"):
            return jax.jit(rotary, static_argnums=(1, 2))(positions, head_dim, config)
    return jax.lax.optimization_barrier(rotary(positions, head_dim, config))


def rotary(positions: jax.Array, head_dim: int, config: RopeConfig) -> Rotary:
    """Angles for positions [N]. Frequencies are rounded to float32 before the product, as transformers does."""
    frequencies = jnp.asarray(rope_frequencies(head_dim, config))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return Rotary(jnp.cos(angles) * config.angle_scale, jnp.sin(angles) * config.angle_scale)


def rotate(x: jax.Array, angles: Rotary) -> jax.Array:
    """Apply the rotary embedding to x [N, H, D]: dimension i turns with dimension i + D/2."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin], axis=-1
    )


def split_pairs(x: jax.Array) -> jax.Array:
    """Interleaved pairs (0, 1), (2, 3) ... of the last axis -> first members, then second ones, as `rotate` wants.

    Queries and keys change alike, so their products stay what they are.
    """
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def rope_frequencies(head_dim: int, config: RopeConfig) -> np.ndarray:
    """float32 [D/2]: radians per position of each pair of dimensions."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(np.float32(config.theta), exponents)).astype(np.float32)
    match config.kind:
        case "linear":
            return (frequencies / config.factor).astype(np.float32)
        case "llama3":
            return _llama3_frequencies(frequencies, config)
        case "yarn":
            return _yarn_frequencies(frequencies, head_dim, config)
        case "factors":
            return (frequencies / np.asarray(config.factors, np.float32)).astype(np.float32)
    return frequencies


def _llama3_frequencies(frequencies: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Llama 3.1's stretch: long wavelengths slow down by `factor`, short ones stay, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    original, low, high = (
        config.original_max_position_embeddings,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    keep = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * frequencies / config.factor + keep * frequencies).astype(np.float32)


def _yarn_frequencies(frequencies: np.ndarray, dim: int, config: RopeConfig) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2): fast pairs stay, slow pairs stretch, a ramp between."""

    def pair_that_turns(times: float) -> float:
        """The pair, counted in dimensions, that turns this often within the original length."""
        length = config.original_max_position_embeddings
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (max(high - low, 0.001))
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    stretched = (frequencies / np.float32(config.factor)).astype(np.float32)
    return (stretched * (1 - keep) + frequencies * keep).astype(np.float32)
