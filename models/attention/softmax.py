"""Attention with a running softmax on one device, in float32 with natural logarithms: the reference for every kernel.

`partial` is attention of queries over one set of keys. `fold` adds one chunk of keys to a running softmax, `finish`
makes a partial of it.
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

    q [T, H, D] (already scaled), k [S, K, D], v [S, K, Y], mask [T, S] -> out [T, H, Y], lse [T, H].
    Query head h reads KV head h // (H / K). A query that sees no key gets out 0 and lse -inf, whatever the
    masked keys and values hold.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 0, 2, 3)
    state = empty_state(grouped.shape[:-1], v.shape[2])
    out, lse = finish(fold(state, grouped, k.transpose(1, 2, 0), v.transpose(1, 0, 2), mask))
    return Partial(out.transpose(1, 0, 2, 3).reshape(tokens, heads, -1), lse.transpose(1, 0, 2).reshape(tokens, heads))


class SoftmaxState(NamedTuple):
    """A running softmax: [K, Q, G] for the Q tokens of one tile, [T, K, G] or [K, T, G] for those of a step."""

    out: jax.Array  # [..., Y] float32: sum of exp(score - max_score) * value
    max_score: jax.Array  # [...] float32: of the keys so far
    exp_sum: jax.Array  # [...] float32: sum of exp(score - max_score)


def empty_state(shape: tuple[int, ...], value_dim: int) -> SoftmaxState:
    """The running softmax before any key."""
    return SoftmaxState(jnp.zeros((*shape, value_dim)), jnp.full(shape, -jnp.inf), jnp.zeros(shape))


def fold(state: SoftmaxState, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> SoftmaxState:
    """Add one chunk of keys to the running softmax (Milakov & Gimelshein 2018, algorithm 3).

    q [K, Q, G, D], k [K, D, S], v [K, S, Y] float32; mask [Q, S]. Masked scores and values are replaced by `where`,
    not multiplied by 0, because 0 * NaN is NaN.
    """
    kv_heads, queries, group, head_dim = q.shape
    flat = q.reshape(kv_heads, queries * group, head_dim)
    scores = matmul(flat, k, (2, 1), batched=True).reshape(kv_heads, queries, group, -1)
    scores = jnp.where(mask[None, :, None, :], scores, -jnp.inf)
    max_score = jnp.maximum(state.max_score, on_cpu(_max_by_halves, bind(jnp.max, axis=-1), scores))
    shift = jnp.where(jnp.isneginf(max_score), 0.0, max_score)
    exp_scores = jnp.exp(scores - shift[..., None])
    rescale = jnp.exp(state.max_score - shift)
    v, sees_nonfinite = _mask_values(v, mask)
    flat_scores = exp_scores.reshape(kv_heads, queries * group, -1)
    added = matmul(flat_scores, v, (2, 1), batched=True).reshape(state.out.shape)
    if sees_nonfinite is not None:
        added = jnp.where(sees_nonfinite[:, :, None, None], jnp.nan, added)
    exp_sum = state.exp_sum * rescale + jnp.sum(exp_scores, axis=-1)
    return SoftmaxState(state.out * rescale[..., None] + added, max_score, exp_sum)


def _mask_values(v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """v [K, S, Y] with 0 in place of values that must not be multiplied, and which queries see NaN or infinity [K, Q].

    A single query sees every value that is left, so there the second result is None. Of several queries, one may see
    a value that is hidden from another: NaN and infinity are removed here and the result of that query is set to NaN.
    """
    seen = jnp.any(mask, axis=0)[None, :, None]
    if mask.shape[0] == 1:
        return jnp.where(seen, v, 0.0), None
    finite = jnp.isfinite(v)
    sees_nonfinite = jnp.any(mask[None] & ~jnp.all(finite, axis=-1)[:, None, :], axis=-1)
    return jnp.where(seen & finite, v, 0.0), sees_nonfinite


def _max_by_halves(scores: jax.Array) -> jax.Array:
    """Maximum over the last axis, as elementwise maxima of its halves.

    XLA's CPU backend uses vector instructions for elementwise operations, but not for this reduction.
    """
    while scores.shape[-1] > 16 and scores.shape[-1] % 2 == 0:
        scores = jnp.maximum(*jnp.split(scores, 2, axis=-1))
    return jnp.max(scores, axis=-1)


def finish(state: SoftmaxState) -> Partial:
    """Running softmax -> partial, of the same leading shape."""
    empty = state.exp_sum == 0.0
    out = state.out / jnp.where(empty, 1.0, state.exp_sum)[..., None]
    lse = jnp.where(empty, -jnp.inf, state.max_score + jnp.log(jnp.where(empty, 1.0, state.exp_sum)))
    return Partial(out, lse)


def window(x: jax.Array, start: jax.Array, size: int, axis: int = 0) -> jax.Array:
    """`size` entries of `axis` from `start` on, which is not negative."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def state_window(state: SoftmaxState, start: jax.Array, size: int, axis: int) -> SoftmaxState:
    """The running softmax of `size` tokens, which lie along `axis`."""
    return SoftmaxState(*(window(x, start, size, axis) for x in state))


def set_state_window(state: SoftmaxState, new: SoftmaxState, start: jax.Array, axis: int) -> SoftmaxState:
    """`state` with `new` in place of the tokens from `start` on."""
    pairs = zip(state, new, strict=True)
    return SoftmaxState(*(jax.lax.dynamic_update_slice_in_dim(x, y, start, axis) for x, y in pairs))


def select_state(mask: jax.Array, new: SoftmaxState, old: SoftmaxState, axis: int) -> SoftmaxState:
    """`new` for the tokens for which mask [tokens] is true, else `old`; tokens lie along `axis`."""
    pairs = zip(new, old, strict=True)
    return SoftmaxState(*(jnp.where(_along(mask, axis, x.ndim), x, y) for x, y in pairs))


def _along(mask: jax.Array, axis: int, ndim: int) -> jax.Array:
    """A vector as an array of `ndim` dimensions, all of size 1 but `axis`."""
    return jnp.expand_dims(mask, [other for other in range(ndim) if other != axis])
