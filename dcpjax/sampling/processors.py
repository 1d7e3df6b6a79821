"""Logits processors: logit bias, penalties, bans, temperature, and truncation by min-p, top-k and top-p.

No processor sorts a row: on a CPU, XLA takes 10 ms to sort 49,152 numbers. Top-k and top-p look at the few best
tokens first; where these are too few, they find their threshold by bisection in 1 ms.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.sampling.sampler_arrays import Bias, Penalties, Truncation

CANDIDATES = 256  # best tokens in which top-k and top-p look first; finding them takes 0.2 ms of a row of 49,152
LARGEST = np.finfo(np.float32).max
FLOAT_BITS = 31  # of a float32 without its sign
KEEP_ALL = np.int32(2**31 - 1)  # a threshold above the bits of every gap


def apply_allowed_tokens(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """logits [B, V] with -inf for every token whose bit in allowed [B, ceil(V / 32)] uint32 is 0."""
    return jnp.where(_unpack_bits(allowed, logits.shape[1]), logits, -jnp.inf)


def apply_known_tokens(logits: jax.Array, known: jax.Array) -> jax.Array:
    """logits [B, V] with -inf for every id that is not in known [V] bool."""
    return jnp.where(known[None, :], logits, -jnp.inf)


def apply_bans(logits: jax.Array, banned: jax.Array) -> jax.Array:
    """logits [B, V] with -inf at each row's ids banned [B, n], padded with -1."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, _padding_past_end(banned, logits.shape[1])].set(-jnp.inf, mode="drop")


def apply_bias(logits: jax.Array, bias: Bias) -> jax.Array:
    """logits [B, V] plus each row's bias values at its bias ids."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, _padding_past_end(bias.ids, logits.shape[1])].add(bias.values, mode="drop")


def apply_penalties(logits: jax.Array, penalties: Penalties, newest: jax.Array) -> jax.Array:
    """Penalties for repetition (Keskar et al. 2019), of prompt and generated tokens, and for frequency and presence,
    of generated tokens alone.

    newest [B] int32 is the last generated token; it counts in rows whose newest token the host does not know yet.
    """
    vocab_size, rows = logits.shape[1], jnp.arange(logits.shape[0])
    newest = jnp.where(penalties.in_flight, newest, -1)
    output_ids = _padding_past_end(penalties.output_ids, vocab_size)
    counts = jnp.zeros(logits.shape, jnp.int32)
    counts = counts.at[rows[:, None], output_ids].add(penalties.output_counts, mode="drop")
    counts = counts.at[rows, _padding_past_end(newest, vocab_size)].add(1, mode="drop")
    repetition = penalties.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalized = jnp.where((counts > 0) | _unpack_bits(penalties.prompt, vocab_size), repeated, logits)
    penalized -= penalties.frequency[:, None] * counts.astype(jnp.float32)
    penalized -= penalties.presence[:, None] * (counts > 0).astype(jnp.float32)
    return _within_range(penalized, logits)


def apply_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits [B, V] divided by each row's temperature [B]; 0 leaves a row as it is."""
    return _within_range(logits / jnp.where(temperature > 0, temperature, 1.0)[:, None], logits)


def apply_truncation(logits: jax.Array, truncation: Truncation) -> jax.Array:
    """logits [B, V] with -inf for the tokens that min-p, then top-k, then top-p drop.

    Each step sees only the tokens that the step before kept. Of equally likely tokens at the edge of top-k or top-p,
    those with the smallest ids are kept.

    The steps work on each token's gap [B, V], the best logit minus its own: 0 for the best token, inf for a dropped
    one. exp(-gap) is the token's probability over that of the best.
    """
    gap = jnp.max(logits, axis=-1, keepdims=True) - logits
    if truncation.min_p is not None:
        gap = _min_p(gap, truncation.min_p)
    if truncation.top_k is not None:
        gap = _top_k(gap, truncation.top_k)
    if truncation.top_p is not None:
        gap = _top_p(gap, truncation.top_p)
    return jnp.where(jnp.isfinite(gap), logits, -jnp.inf)


def _min_p(gap: jax.Array, min_p: jax.Array) -> jax.Array:
    """Keep the tokens at least min_p [B] times as likely as the best; 0 keeps all."""
    positive = jnp.where(min_p > 0, min_p, 1.0)
    largest = jnp.where(min_p > 0, -jnp.log(positive), jnp.inf)
    return jnp.where(gap <= largest[:, None], gap, jnp.inf)


def _top_k(gap: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keep the top_k [B] best tokens; 0 keeps all."""
    needed = jnp.where(top_k > 0, top_k.astype(jnp.float32), jnp.inf)
    return _keep_best(gap, jnp.ones_like(gap), needed)


def _top_p(gap: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the fewest best tokens whose probabilities sum to top_p [B]; 1 keeps all."""
    probability = jnp.exp(-gap)  # not normalised
    needed = jnp.where(top_p < 1, top_p * jnp.sum(probability, axis=-1), jnp.inf)
    return _keep_best(gap, probability, needed)


def _keep_best(gap: jax.Array, weight: jax.Array, needed: jax.Array) -> jax.Array:
    """Keep the fewest best tokens whose weights [B, V] sum to needed [B] (inf keeps all); the others' gap becomes inf.

    This is top-k with weights of 1 and needed = k, and top-p with probabilities as weights and needed = p.
    """
    bits = _ordered_bits(gap)
    threshold = _threshold(gap, weight, needed)[:, None]
    at_edge = bits == threshold

    def drop_surplus_ties(keep: jax.Array) -> jax.Array:
        """Of the equally likely tokens at the edge, drop those that come after `needed` is reached."""
        earlier_ties = jnp.cumsum(at_edge, axis=-1, dtype=jnp.int32) - at_edge.astype(jnp.int32)
        reached = _weight_below(bits, weight, threshold) + earlier_ties.astype(jnp.float32) * weight
        return keep & ~(at_edge & (earlier_ties > 0) & (reached >= needed[:, None]))

    has_ties = jnp.any(jnp.sum(at_edge & jnp.isfinite(gap), axis=-1, dtype=jnp.int32) > 1)
    keep = jax.lax.cond(has_ties, drop_surplus_ties, lambda keep: keep, bits <= threshold)
    return jnp.where(keep, gap, jnp.inf)


def _threshold(gap: jax.Array, weight: jax.Array, needed: jax.Array) -> jax.Array:
    """Ordered bits [B] of the largest gap that is kept.

    Usually the token at the edge is one of the `CANDIDATES` best; a row that needs more tokens bisects. Which of the
    two gives a row's threshold does not depend on the other rows: they add weights in another order, so their results
    could differ in the last bit.
    """
    best_gaps, best_ids = jax.lax.top_k(-gap, min(CANDIDATES, gap.shape[1]))
    best_weights = jnp.take_along_axis(weight, best_ids, axis=-1)
    reached = jnp.cumsum(best_weights, axis=-1)
    count = jnp.sum(reached - best_weights < needed[:, None], axis=-1, keepdims=True, dtype=jnp.int32)
    found = _ordered_bits(-jnp.take_along_axis(best_gaps, jnp.maximum(count - 1, 0), axis=-1))[:, 0]
    found = jnp.where(jnp.isinf(needed), KEEP_ALL, found)
    enough = jnp.isinf(needed) | (reached[:, -1] >= needed)
    return jax.lax.cond(
        jnp.all(enough),
        lambda: found,
        lambda: jnp.where(enough, found, _bisect_threshold(_ordered_bits(gap), weight, needed)),
    )


def _bisect_threshold(bits: jax.Array, weight: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest threshold [B], found bit by bit, such that the weights below it do not reach `needed`."""

    def set_bit(step: jax.Array, threshold: jax.Array) -> jax.Array:
        larger = threshold | (1 << (FLOAT_BITS - 1 - step))
        return jnp.where(_weight_below(bits, weight, larger[:, None])[:, 0] < needed, larger, threshold)

    return jax.lax.fori_loop(0, FLOAT_BITS, set_bit, jnp.zeros(bits.shape[0], jnp.int32))


def _weight_below(bits: jax.Array, weight: jax.Array, threshold: jax.Array) -> jax.Array:
    """[B, 1]: the summed weight of the tokens whose gap is below threshold [B, 1]."""
    return jnp.sum(jnp.where(bits < threshold, weight, 0.0), axis=-1, keepdims=True)


def _ordered_bits(gap: jax.Array) -> jax.Array:
    """The bit patterns of non-negative float32 values as int32, which have the same order as the values."""
    return jax.lax.bitcast_convert_type(jnp.abs(gap), jnp.int32)


def _within_range(result: jax.Array, logits: jax.Array) -> jax.Array:
    """`result` [B, V] of arithmetic on `logits`: -inf exactly where `logits` is, finite elsewhere.

    A banned token stays banned (-inf divided by a large temperature can be NaN, since XLA multiplies by a reciprocal
    that is rounded to 0), and what overflows is not taken for banned.
    """
    return jnp.where(logits == -jnp.inf, -jnp.inf, jnp.clip(result, -LARGEST, LARGEST))


def _unpack_bits(packed: jax.Array, vocab_size: int) -> jax.Array:
    """packed [B, ceil(V / 32)] uint32 -> [B, V] bool."""
    bits = packed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    return (bits & 1).reshape(packed.shape[0], -1)[:, :vocab_size] == 1


def _padding_past_end(ids: jax.Array, vocab_size: int) -> jax.Array:
    """ids with -1 (padding) replaced by V: a scatter with mode="drop" drops V, but takes -1 for the last token."""
    return jnp.where(ids >= 0, ids, vocab_size)
