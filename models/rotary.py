"""Rotary position embedding (Su et al. 2021): the angles of a step, and how checkpoints stretch their frequencies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.xla_metadata import set_xla_metadata

from dcpjax.models.config import RopeConfig
from dcpjax.sharding.platform import on_cpu


@struct.dataclass
class Rotary:
    """Angles of one step, shared by all layers."""

    # [N, 1, D/2] float32: cosine of position * frequency, broadcast over heads
    cos: jax.Array
    # [N, 1, D/2] float32
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
