"""Log-probabilities on the device, of the model's logits as they are: before bias, penalties and temperature."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import struct

from dcpjax.sampling.buckets import round_up


@struct.dataclass
class Logprobs:
    """How likely N tokens were, and which tokens were the K most likely in their places."""

    # [N] float32: log-probability of the token itself
    chosen: jax.Array
    # [N] int32: how many tokens are at least as likely as it; 1 is the best
    rank: jax.Array
    # [N, K] int32: most likely first
    top_ids: jax.Array
    # [N, K] float32
    top: jax.Array


def shared_count(asked: Iterable[int | None], vocab_size: int) -> int | None:
    """One K that serves all who ask, of few so that few programs exist: None, 0, 1, 4, 16 ..., or -1 for all."""
    counts = [count for count in asked if count is not None]
    if not counts:
        return None
    most = vocab_size if -1 in counts else max(counts)
    rounded = round_up(most, least=1)
    return -1 if rounded >= vocab_size else rounded


def score(logits: jax.Array, tokens: jax.Array, num_logprobs: int) -> Logprobs:
    """logits [N, V] float32, tokens [N] int32 (-1 for padding) -> their log-probabilities and the likeliest others."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)
    rank = jnp.sum(logprobs >= chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logprobs, logits.shape[1] if num_logprobs == -1 else num_logprobs)
    return Logprobs(chosen[:, 0], rank, top_ids, top)
