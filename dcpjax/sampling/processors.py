"""What changes logits before the draw: masks, biases, penalties and cuts, each on its own. Knows no requests.

Nothing here sorts a row: on a CPU, XLA sorts 49,152 numbers in 10 ms; a bisection for the same cut takes 1.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.sampling.sampler_arrays import Bias, Cut, Penalties

BLOCK = 64  # tokens; of 64 and 256 neither is faster
NEAR = 256  # tokens that hold most cuts; finding them takes 0.2 ms of a row, sorting it 10
FLOAT_BITS = 31  # of a float32 without its sign
ALL = np.int32(2**31 - 1)  # farther than everything


def allow(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Only tokens whose bit is set: allowed [R, W] uint32."""
    return jnp.where(_unpack(allowed, logits.shape[1]), logits, -jnp.inf)


def add(logits: jax.Array, bias: Bias) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, _or_beyond(bias.ids, logits.shape[1])].add(bias.values, mode="drop")


def penalize(logits: jax.Array, penalties: Penalties, newest: jax.Array) -> jax.Array:
    """Repetition (Keskar et al. 2019) of prompt and generated tokens; frequency and presence of generated ones.

    newest [R] int32: the token in flight, where there is one.
    """
    vocab, rows = logits.shape[1], jnp.arange(logits.shape[0])
    newest = jnp.where(penalties.in_flight, newest, -1)
    counts = jnp.zeros(logits.shape, jnp.int32)
    counts = counts.at[rows[:, None], _or_beyond(penalties.output_ids, vocab)].add(penalties.output_counts, mode="drop")
    counts = counts.at[rows, _or_beyond(newest, vocab)].add(1, mode="drop")
    repetition = penalties.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((counts > 0) | _unpack(penalties.prompt, vocab), repeated, logits)
    logits -= penalties.frequency[:, None] * counts.astype(jnp.float32)
    return logits - penalties.presence[:, None] * (counts > 0).astype(jnp.float32)


def cut(logits: jax.Array, options: Cut) -> jax.Array:
    """-inf for what is left out: by min_p, then top_k, then top_p of what remains.

    Of equally likely tokens at the edge of top_k or top_p, those with the smallest ids stay.
    """
    below = jnp.max(logits, axis=-1, keepdims=True) - logits  # how far below the likeliest; inf is left out
    if options.min_p is not None:
        least = jnp.where(options.min_p > 0, options.min_p, 1.0)
        most = jnp.where(options.min_p > 0, -jnp.log(least), jnp.inf)
        below = jnp.where(below <= most[:, None], below, jnp.inf)
    if options.top_k is not None:
        count = jnp.where(options.top_k > 0, options.top_k.astype(jnp.float32), jnp.inf)
        below = _nearest(below, jnp.ones_like(below), count)
    if options.top_p is not None:
        weight = jnp.exp(-below)
        mass = jnp.where(options.top_p < 1, options.top_p * jnp.sum(weight, axis=-1), jnp.inf)
        below = _nearest(below, weight, mass)
    return jnp.where(jnp.isfinite(below), logits, -jnp.inf)


def likeliest(logits: jax.Array) -> jax.Array:
    """The first of the largest logits of each row [R] int32.

    Over blocks, then inside the best one: XLA computes a maximum with vector instructions, but not where it stands,
    nor whatever is fused with that search; noise on 32 rows would take four times as long.
    """
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    block = jnp.argmax(jnp.max(padded, axis=-1), axis=-1)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _nearest(below: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """Keep the fewest nearest tokens whose weights reach need [R] (inf keeps all); inf in place of the others."""
    bits = _bits(below)
    limit = _limit(below, weight, need)[:, None]
    last = bits == limit

    def split(keep: jax.Array) -> jax.Array:
        before = jnp.cumsum(last, axis=-1, dtype=jnp.int32) - last.astype(jnp.int32)
        mass = _nearer(bits, weight, limit) + before.astype(jnp.float32) * weight
        return keep & ~(last & (before > 0) & (mass >= need[:, None]))

    crowded = jnp.any(jnp.sum(last & jnp.isfinite(below), axis=-1, dtype=jnp.int32) > 1)
    keep = jax.lax.cond(crowded, split, lambda keep: keep, bits <= limit)
    return jnp.where(keep, below, jnp.inf)


def _limit(below: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """Bits [R] of the distance of the last token that stays.

    Most often it is one of the few nearest; a row that needs more bisects. Each row's answer comes from the same
    one of the two whatever its neighbours need: sums in another order could differ in the last bit.
    """
    farness, nearest = jax.lax.top_k(-below, min(NEAR, below.shape[1]))
    weights = jnp.take_along_axis(weight, nearest, axis=-1)
    reached = jnp.cumsum(weights, axis=-1)
    count = jnp.sum(reached - weights < need[:, None], axis=-1, keepdims=True, dtype=jnp.int32)
    found = _bits(-jnp.take_along_axis(farness, jnp.maximum(count - 1, 0), axis=-1))[:, 0]
    found = jnp.where(jnp.isinf(need), ALL, found)
    enough = jnp.isinf(need) | (reached[:, -1] >= need)
    return jax.lax.cond(
        jnp.all(enough), lambda: found, lambda: jnp.where(enough, found, _bisect(_bits(below), weight, need))
    )


def _bisect(bits: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """Bit by bit the largest distance such that what is nearer does not reach `need`."""

    def narrow(step: jax.Array, limit: jax.Array) -> jax.Array:
        farther = limit | (1 << (FLOAT_BITS - 1 - step))
        return jnp.where(_nearer(bits, weight, farther[:, None])[:, 0] < need, farther, limit)

    return jax.lax.fori_loop(0, FLOAT_BITS, narrow, jnp.zeros(bits.shape[0], jnp.int32))


def _nearer(bits: jax.Array, weight: jax.Array, limit: jax.Array) -> jax.Array:
    """[R, 1]: the weight of what is nearer than limit [R, 1]."""
    return jnp.sum(jnp.where(bits < limit, weight, 0.0), axis=-1, keepdims=True)


def _bits(below: jax.Array) -> jax.Array:
    """Floats that are not negative order as their bits do."""
    return jax.lax.bitcast_convert_type(jnp.abs(below), jnp.int32)


def _unpack(words: jax.Array, vocab: int) -> jax.Array:
    """Bits [R, W] uint32 -> [R, V] bool."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    return (bits & 1).reshape(words.shape[0], -1)[:, :vocab] == 1


def _or_beyond(ids: jax.Array, vocab: int) -> jax.Array:
    """Padding becomes an id beyond the vocabulary: a scatter drops that, but takes -1 for the last."""
    return jnp.where(ids >= 0, ids, vocab)
