"""Choosing the next token on the device, per request, whatever mixture of options a batch holds.

The draw is a Gumbel-max (Gumbel 1954; Maddison et al. 2014) whose noise depends on the request's seed and on how
many tokens it has generated, on nothing else: not on its row, its neighbours or the mesh. Work that nobody in
the batch asked for is skipped at run time, without a new program.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dcpjax.request import Request

LEAST_TEMPERATURE = 1e-5  # below, dividing by it overflows: greedy, as in vLLM


@struct.dataclass
class SamplingBatch:
    """Options of R rows. Rows past the last request are greedy."""

    # [R] float32, host: 0 is greedy
    temperature: jax.Array
    # [R] int32, host: 0 keeps all
    top_k: jax.Array
    # [R] float32, host: 1 keeps all
    top_p: jax.Array
    # [R] float32, host: 0 keeps all
    min_p: jax.Array
    # [R, 2] uint32, host: the two halves of the request's seed
    seed: jax.Array
    # [R] int32, host: tokens the request has generated so far
    generated: jax.Array
    # [R, S] int32, host: tokens that may not be sampled yet (min_tokens), -1 for none
    banned: jax.Array

    @classmethod
    def build(cls, requests: Sequence[Request], rows: int) -> "SamplingBatch":
        temperature, top_p, min_p = (
            np.zeros(rows, np.float32),
            np.ones(rows, np.float32),
            np.zeros(rows, np.float32),
        )
        top_k, generated = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        seed = np.zeros((rows, 2), np.uint32)
        banned = np.full((rows, _banned_width(requests)), -1, np.int32)
        for row, request in enumerate(requests):
            params = request.params
            temperature[row] = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
            top_p[row], min_p[row] = params.top_p, params.min_p
            top_k[row] = max(0, min(params.top_k, 2**31 - 1))
            generated[row] = len(request.output_token_ids)
            seed[row] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
            if len(request.output_token_ids) < params.min_tokens:
                ends = sorted(request.end_token_ids)
                banned[row, : len(ends)] = ends
        return cls(temperature, top_k, top_p, min_p, seed, generated, banned)  # type: ignore[arg-type]


def _banned_width(requests: Sequence[Request]) -> int:
    """S: a power of two of at least 4, so that few programs exist."""
    most = max((len(request.end_token_ids) for request in requests if request.params.min_tokens), default=0)
    return max(4, 1 << (most - 1).bit_length()) if most else 4


def sample(logits: jax.Array, options: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """logits [R, V] float32 -> next tokens [R] int32, and whether each row's logits were finite [R] bool.

    Temperature first, then min_p, top_k and top_p over what remains, as in vLLM.
    """
    logits = jax.lax.cond(jnp.any(options.banned >= 0), _ban, lambda x, _: x, logits, options.banned)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))  # a NaN anywhere in the row makes its maximum NaN
    drawn = jax.lax.cond(
        jnp.any(options.temperature > 0), _draw, lambda logits, _: jnp.zeros_like(greedy), logits, options
    )
    return jnp.where(options.temperature > 0, drawn, greedy), finite


def _ban(logits: jax.Array, banned: jax.Array) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    columns = jnp.where(banned >= 0, banned, logits.shape[1])
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")


def _draw(logits: jax.Array, options: SamplingBatch) -> jax.Array:
    scaled = logits / jnp.where(options.temperature > 0, options.temperature, 1.0)[:, None]
    scaled = jnp.where(
        scaled < jnp.max(scaled, axis=-1, keepdims=True) + _log(options.min_p)[:, None], -jnp.inf, scaled
    )
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(options.seed, options.generated, logits.shape[1])
    sorts = jnp.any((options.top_k > 0) | (options.top_p < 1))
    return jax.lax.cond(sorts, _draw_sorted, _draw_plain, scaled, noise, options)


def _log(fraction: jax.Array) -> jax.Array:
    return jnp.where(fraction > 0, jnp.log(jnp.where(fraction > 0, fraction, 1.0)), -jnp.inf)


def _noise(seed: jax.Array, generated: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise [V] for one token of one request."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), generated)
    return jax.random.gumbel(key, (vocab,), jnp.float32)


def _draw_plain(scaled: jax.Array, noise: jax.Array, _: SamplingBatch) -> jax.Array:
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _draw_sorted(scaled: jax.Array, noise: jax.Array, options: SamplingBatch) -> jax.Array:
    """Cut to top_k, then top_p of what remains, in descending order; each id keeps its own noise."""
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    place = jnp.arange(scaled.shape[1])[None, :]
    limit = jnp.where(options.top_k > 0, options.top_k, scaled.shape[1])[:, None]
    ranked = jnp.where(place < limit, ranked, -jnp.inf)
    share = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    keep = (before < options.top_p[:, None]) | (options.top_p[:, None] >= 1) | (place == 0)
    ranked = jnp.where(keep, ranked, -jnp.inf)
    winner = jnp.argmax(ranked + jnp.take_along_axis(noise, order, axis=-1), axis=-1)
    return jnp.take_along_axis(order, winner[:, None], axis=-1)[:, 0].astype(jnp.int32)
