"""Merging partial attention by log-sum-exp, on one device and across the `dcp` axis.

A partial is `(out, lse)`: attention of some queries over a subset of the keys, and the natural log of the
softmax denominator over that subset. An empty subset is `(0, -inf)`. For disjoint subsets 1 and 2

    lse = log(exp(lse1) + exp(lse2));   out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2

which is associative and commutative (online softmax, Milakov & Gimelshein 2018; FlashAttention, Dao et al.
2022, section 3.1). The functions for several ranks run inside `shard_map`.

Of the three merges of a dcp group, each takes out [T, H, Y] and lse [T, H] per device and returns [T, features / dcp]
per device; `features` are H * Y, padded so that dcp divides them. Outputs cross the links in `dtype`, lse in float32.
"""

from collections.abc import Callable
from functools import partial as bind
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.sharding.merge_cost import Merge, MergeSize
from dcpjax.sharding.mesh import DCP
from dcpjax.sharding.platform import on_cpu


class Partial(NamedTuple):
    """Attention over a subset of the keys."""

    out: jax.Array  # [T, H, Y] float32, 0 if no key was visible
    lse: jax.Array  # [T, H] float32, natural log, -inf if no key was visible


def merge(left: Partial, right: Partial) -> Partial:
    """Combine two partials over disjoint subsets of the keys: what MERGES compute for all ranks of a mesh."""
    lse = jnp.logaddexp(left.lse, right.lse)
    scale_left, scale_right = weight(left.lse, lse), weight(right.lse, lse)
    out = left.out * scale_left[..., None] + right.out * scale_right[..., None]
    return Partial(out, lse)


def weight(lse: jax.Array, total: jax.Array) -> jax.Array:
    """exp(lse - total): the weight of one partial in the merged one; 0 if it is empty, even if all are."""
    return jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - jnp.where(jnp.isneginf(total), 0.0, total)))


def rank() -> jax.Array:
    """This device's index along `dcp`."""
    return jax.lax.axis_index(DCP)


def gather_over_dcp(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Features or heads of a dcp group: [T, features / dcp, ...] per device -> [T, features, ...] on every rank.

    They cross the links in `dtype`, by default as they are.
    """
    if jax.lax.axis_size(DCP) == 1:
        return x
    return jax.lax.all_gather(x.astype(dtype or x.dtype), DCP, axis=1, tiled=True).astype(x.dtype)


def merge_ag_rs(part: Partial, features: int, dtype: Any = jnp.float32) -> jax.Array:
    """All-gather the lse, scale the own partial, reduce-scatter the features.

    Per device: lse [T, H] -> [dcp, T, H] (all-gather); out [T, features] -> [T, features / dcp] (reduce-scatter).
    """
    every_lse = jax.lax.all_gather(part.lse, DCP)
    scale = weight(part.lse, jax.nn.logsumexp(every_lse, axis=0))
    scaled = flatten_heads(part.out * scale[..., None], features)
    scattered = jax.lax.psum_scatter(scaled.astype(dtype), DCP, scatter_dimension=1, tiled=True)
    return scattered.astype(jnp.float32)


def merge_a2a(part: Partial, features: int, dtype: Any = jnp.float32) -> jax.Array:
    """Exchange heads for ranks, then combine locally.

    If dcp divides the heads and all is float32, they are sent with their lse in one packed all-to-all, per device
    [T, H, Y + 1] -> [dcp, T, H / dcp, Y + 1]. Otherwise the flattened features are sent, [T, features] -> [dcp, T,
    features / dcp], and the small lse is gathered.
    """
    ranks = jax.lax.axis_size(DCP)
    tokens, heads, head_dim = part.out.shape
    if MergeSize(tokens, heads, head_dim, features, ranks, jnp.dtype(dtype).itemsize).packs:
        packed = jnp.concatenate([part.out, part.lse[..., None]], axis=-1)
        packed = packed.reshape(tokens, ranks, heads // ranks, head_dim + 1)
        received = jax.lax.all_to_all(packed, DCP, split_axis=1, concat_axis=0, tiled=False)
        out, lse = received[..., :-1], received[..., -1]
        scale = weight(lse, jax.nn.logsumexp(lse, axis=0, keepdims=True))
        return _sum_over_ranks(out * scale[..., None]).reshape(tokens, features // ranks)
    flat = flatten_heads(part.out, features).reshape(tokens, ranks, features // ranks).astype(dtype)
    received = jax.lax.all_to_all(flat, DCP, split_axis=1, concat_axis=0, tiled=False).astype(jnp.float32)
    every_lse = jax.lax.all_gather(part.lse, DCP)
    scale = weight(every_lse, jax.nn.logsumexp(every_lse, axis=0, keepdims=True))
    return _sum_over_ranks(received * own_features(_per_feature(scale, head_dim, features)))


def merge_psum(part: Partial, features: int, dtype: Any = jnp.float32) -> jax.Array:
    """One pmax and two psums give every rank every head; each keeps its own features.

    Per device: lse [T, H] (pmax), weights [T, H] and out [T, H, Y] (psum); then [T, features] -> [T, features / dcp].
    """
    top = jax.lax.pmax(part.lse, DCP)
    scale = weight(part.lse, top)
    total = jax.lax.psum(scale, DCP)
    out = jax.lax.psum((part.out * scale[..., None]).astype(dtype), DCP).astype(jnp.float32)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    return own_features(flatten_heads(out, features))


def _sum_over_ranks(x: jax.Array) -> jax.Array:
    """[dcp, ...] -> [...]."""
    return on_cpu(_sum_one_by_one, bind(jnp.sum, axis=0), x)


def _sum_one_by_one(x: jax.Array) -> jax.Array:
    """Sum over the first axis, as elementwise additions.

    XLA's CPU backend uses vector instructions for elementwise operations, but not for this reduction.
    """
    return reduce(jnp.add, [x[other] for other in range(x.shape[0])])


def _per_feature(scale: jax.Array, head_dim: int, features: int) -> jax.Array:
    """[dcp, T, H] -> [dcp, T, features]: each head's weight, repeated for each of its features."""
    scale = jnp.repeat(scale, head_dim, axis=-1)
    return jnp.pad(scale, ((0, 0), (0, 0), (0, features - scale.shape[-1])))


def flatten_heads(out: jax.Array, features: int) -> jax.Array:
    """[T, H, Y] -> [T, features], padded with zeros."""
    flat = out.reshape(out.shape[0], -1)
    return jnp.pad(flat, ((0, 0), (0, features - flat.shape[1])))


def own_features(flat: jax.Array) -> jax.Array:
    """[..., features] -> [..., features / dcp]: the features whose o_proj rows this rank has."""
    size = flat.shape[-1] // jax.lax.axis_size(DCP)
    return jax.lax.dynamic_slice_in_dim(flat, rank() * size, size, axis=-1)


MERGES: dict[Merge, Callable[[Partial, int, Any], jax.Array]] = {
    "ag_rs": merge_ag_rs,
    "a2a": merge_a2a,
    "psum": merge_psum,
}
