"""The running softmax of attention, in float32 with natural logarithms, on one device.

`partial` is attention of queries over one set of keys. `fold` takes one chunk of keys into a running softmax,
`finish` turns that into a partial. The reference for every kernel.
"""

from functools import partial as bind
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.matmul import matmul
from dcpjax.sharding.merge import Partial
from dcpjax.sharding.platform import on_cpu


def partial(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """Attention of queries over one set of keys, in float32, with the natural-log lse.

    q [N, H, D] (already scaled), k [S, K, D], v [S, K, Y], mask [N, S] -> out [N, H, Y], lse [N, H].
    Query head h reads KV head h // (H / K). A query that sees no key gets out 0 and lse -inf, whatever the
    masked keys and values hold.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 0, 2, 3)
    state = unseen(grouped.shape[:-1], v.shape[2])
    out, lse = finish(fold(state, grouped, k.transpose(1, 2, 0), v.transpose(1, 0, 2), mask))
    return Partial(out.transpose(1, 0, 2, 3).reshape(tokens, heads, -1), lse.transpose(1, 0, 2).reshape(tokens, heads))


class State(NamedTuple):
    """Running softmax: [K, Q, G] of one tile's Q tokens, or [N, K, G] of a whole step; G = H / K query heads."""

    out: jax.Array  # [..., D] float32, not yet divided by `total`
    top: jax.Array  # float32, largest score so far
    total: jax.Array  # float32, sum of exp(score - top)


def unseen(shape: tuple[int, ...], value_dim: int) -> State:
    """Before any key."""
    return State(jnp.zeros((*shape, value_dim)), jnp.full(shape, -jnp.inf), jnp.zeros(shape))


def fold(state: State, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> State:
    """Fold one chunk of keys into the running softmax (Milakov & Gimelshein 2018, algorithm 3).

    q [K, Q, G, D], k [K, D, S], v [K, S, Y] float32; mask [Q, S]. Masked scores and values are selected away,
    not multiplied: 0 * NaN is NaN.
    """
    kv_heads, queries, group, head_dim = q.shape
    flat = q.reshape(kv_heads, queries * group, head_dim)
    scores = matmul(flat, k, (2, 1), batched=True).reshape(kv_heads, queries, group, -1)
    scores = jnp.where(mask[None, :, None, :], scores, -jnp.inf)
    top = jnp.maximum(state.top, on_cpu(_max_by_halves, bind(jnp.max, axis=-1), scores))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    shares = jnp.exp(scores - shift[..., None])
    keep = jnp.exp(state.top - shift)
    v, tainted = _select(v, mask)
    gained = matmul(shares.reshape(kv_heads, queries * group, -1), v, (2, 1), batched=True).reshape(state.out.shape)
    if tainted is not None:
        gained = jnp.where(tainted[:, :, None, None], jnp.nan, gained)
    return State(state.out * keep[..., None] + gained, top, state.total * keep + jnp.sum(shares, axis=-1))


def _select(v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """v [K, S, Y] with what must not be multiplied set to 0, and which queries saw NaN or infinity [K, Q].

    A single query sees all that is left. Of several, one may see a value that is hidden from another.
    """
    usable = jnp.any(mask, axis=0)[None, :, None]
    if mask.shape[0] == 1:
        return jnp.where(usable, v, 0.0), None
    finite = jnp.isfinite(v)
    tainted = jnp.any(mask[None] & ~jnp.all(finite, axis=-1)[:, None, :], axis=-1)
    return jnp.where(usable & finite, v, 0.0), tainted


def _max_by_halves(scores: jax.Array) -> jax.Array:
    """Maximum over the last axis, as elementwise maxima of its halves.

    XLA's CPU backend uses vector instructions for elementwise operations, but not for this reduction.
    """
    while scores.shape[-1] > 16 and scores.shape[-1] % 2 == 0:
        scores = jnp.maximum(*jnp.split(scores, 2, axis=-1))
    return jnp.max(scores, axis=-1)


def finish(state: State) -> Partial:
    """Running softmax -> partial, heads grouped as before."""
    empty = state.total == 0.0
    out = state.out / jnp.where(empty, 1.0, state.total)[..., None]
    lse = jnp.where(empty, -jnp.inf, state.top + jnp.log(jnp.where(empty, 1.0, state.total)))
    return Partial(out, lse)
