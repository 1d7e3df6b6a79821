"""Log-probabilities on the device, of the model's own logits: before bias, penalties and temperature."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from dcpjax.sampling.bucket_size import bucket_size
from dcpjax.sampling.known_tokens import KnownIds
from dcpjax.sharding import struct


@struct.dataclass
class Logprobs:
    """Log-probabilities of T tokens, and of the most likely tokens at the same positions."""

    # [T] float32: log-probability of the token itself
    chosen: jax.Array
    # [T] int32: how many tokens are at least as likely as the token itself; 1 is the best
    rank: jax.Array
    # [T, num_logprobs] int32: token ids, most likely first
    top_ids: jax.Array
    # [T, num_logprobs] float32: their log-probabilities
    top: jax.Array


@struct.dataclass
class NamedScores:
    """Log-probabilities of tokens that the user named, of each row of a step."""

    # [B, n] float32: in the order in which they were named; padding holds anything
    logprobs: jax.Array
    # [B, n] int32: how many tokens are at least as likely
    rank: jax.Array


def shared_num_logprobs(requested: Iterable[int | None], vocab_size: int) -> int | None:
    """One num_logprobs that is enough for all requests: None, 0, 1, 4, 16 ..., or -1 for the whole vocabulary.

    Bucketed, because each value compiles a program of its own.
    """
    counts = [count for count in requested if count is not None]
    if not counts:
        return None
    largest = vocab_size if -1 in counts else max(counts)
    bucketed = bucket_size(largest, smallest=1)
    return -1 if bucketed >= vocab_size else bucketed


def score(logits: jax.Array, tokens: jax.Array, num_logprobs: int, known: KnownIds | None = None) -> Logprobs:
    """logits [T, V] float32, tokens [T] int32 (-1 for padding) -> log-probabilities of them and of the most likely.

    Probabilities are the model's own, over all V. Ids that are not `known` do not count in ranks; where they are
    among the most likely, because too few others are left, their log-probability is -inf.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)
    listed = logprobs if known is None else jnp.where(known.mask[None], logprobs, -jnp.inf)
    rank = jnp.sum(listed >= chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(listed, logits.shape[1] if num_logprobs == -1 else num_logprobs)
    return Logprobs(chosen[:, 0], rank, top_ids, top)


def score_named(logits: jax.Array, ids: jax.Array, known: KnownIds | None = None) -> NamedScores:
    """logits [B, V] float32, ids [B, n] int32 (-1 for padding) -> log-probabilities and ranks of these tokens."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    found = jnp.take_along_axis(logprobs, jnp.maximum(ids, 0), axis=-1)
    listed = logprobs if known is None else jnp.where(known.mask[None], logprobs, -jnp.inf)
    rank = jnp.sum(listed[:, None, :] >= found[:, :, None], axis=-1, dtype=jnp.int32)
    return NamedScores(found, rank)
