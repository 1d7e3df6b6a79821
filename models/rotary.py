"""Rotary position embedding (Su et al. 2021): the angles of a step, and how checkpoints scale their frequencies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from dcpjax.models.config_rope import RopeConfig
from dcpjax.sharding import struct
from dcpjax.sharding.platform import on_cpu


@struct.dataclass
class Rotary:
    """Angles of one step, shared by all layers."""

    # [T, 1, D/2] float32: cosine of position * frequency, broadcast over heads
    cos: jax.Array
    # [T, 1, D/2] float32
    sin: jax.Array


def shared_rotary(positions: jax.Array, head_dim: int, config: RopeConfig) -> Rotary:
    """`rotary`, computed once: XLA would compute the angles anew in every layer, on CPU for every head.

    An optimization barrier prevents that. XLA's CPU backend removes barriers before it fuses operations, but does
    not inline this call.
    """

    def called(positions: jax.Array) -> Rotary:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(rotary, static_argnums=(1, 2))(positions, head_dim, config)

    def behind_barrier(positions: jax.Array) -> Rotary:
        return jax.lax.optimization_barrier(rotary(positions, head_dim, config))

    return on_cpu(called, behind_barrier, positions)


def rotary(positions: jax.Array, head_dim: int, config: RopeConfig) -> Rotary:
    """Angles for positions [T]. Frequencies are rounded to float32 before the product, as transformers does."""
    frequencies = jnp.asarray(rope_frequencies(head_dim, config))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return Rotary(jnp.cos(angles) * config.angle_scale, jnp.sin(angles) * config.angle_scale)


def rotate(x: jax.Array, angles: Rotary) -> jax.Array:
    """Apply the rotary embedding to x [T, H, D]: dimensions i and i + D/2 are a pair."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin], axis=-1
    )


def split_pairs(x: jax.Array) -> jax.Array:
    """Reorder the last axis from pairs (0, 1), (2, 3) ... to the pairs of `rotate`: all first members, then all second.

    Queries and keys are reordered in the same way, which does not change their products.
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
    """Llama 3.1's scaling: long wavelengths are multiplied by `factor`, short ones kept, a linear ramp between."""
    wavelengths = 2 * math.pi / frequencies
    original, low, high = (
        config.original_max_position_embeddings,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    keep = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * frequencies / config.factor + keep * frequencies).astype(np.float32)


def _yarn_frequencies(frequencies: np.ndarray, dim: int, config: RopeConfig) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2): high frequencies kept, low ones divided by `factor`, a ramp between."""

    def pair_of(rotations: float) -> float:
        """The (fractional) index of the pair that makes this many rotations within the original length."""
        length = config.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # where the bounds have changed places, the ramp is turned as well, as in transformers
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (high - low or 0.001)
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    scaled = (frequencies / np.float32(config.factor)).astype(np.float32)
    return (scaled * (1 - keep) + frequencies * keep).astype(np.float32)
