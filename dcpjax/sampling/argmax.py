"""The index of the largest logit of each row."""

import jax
import jax.numpy as jnp

from dcpjax.sampling.known_tokens import BLOCK, KnownIds
from dcpjax.sharding.platform import on_cpu


def argmax(logits: jax.Array, known: KnownIds | None = None) -> jax.Array:
    """logits [B, V] -> [B] int32: the index of the largest, the first of equal ones.

    A program compiled for CPU searches in two steps (see `blocked_argmax`), any other one runs `jnp.argmax`.

    Args:
        known: the indices that count; None: all.
    """
    if known is None:
        return on_cpu(blocked_argmax, plain_argmax, logits)
    return on_cpu(blocked_argmax, plain_argmax, logits, known)


def plain_argmax(logits: jax.Array, known: KnownIds | None = None) -> jax.Array:
    if known is not None:
        logits = jnp.where(known.mask[None], logits, -jnp.inf)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def blocked_argmax(logits: jax.Array, known: KnownIds | None = None) -> jax.Array:
    """The same index as `plain_argmax`: finds the block with the largest logit, then the logit inside the block.

    XLA's CPU backend vectorises a maximum, but neither an argmax nor the operations it fuses into one: with the Gumbel
    noise of 32 rows fused into it, a plain argmax takes four times as long. For the same reason indices that do not
    count are not masked before the search: the few blocks that hold some are searched once more.
    """
    rows, vocab_size = logits.shape
    padding = 0, -vocab_size % BLOCK
    blocks = jnp.pad(logits, ((0, 0), padding), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    counted = None if known is None else jnp.pad(known.mask, padding).reshape(-1, BLOCK)
    largest = jnp.max(blocks, axis=-1)
    if known is not None and counted is not None:
        mixed = jnp.where(counted[known.mixed][None], blocks[:, known.mixed], -jnp.inf)
        largest = jnp.where(jnp.any(counted, axis=-1)[None], largest, -jnp.inf)
        largest = largest.at[:, known.mixed].set(jnp.max(mixed, axis=-1))
    block = jnp.argmax(largest, axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    if counted is not None:
        inside = jnp.where(counted[block], inside, -jnp.inf)
    return (block * BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)
