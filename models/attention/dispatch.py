"""Attention of one step on one device: write new keys and values to the cache, attend, merge over `dcp`.

One function serves decode (one query token per request), verification of drafts (a few) and chunked prefill (many).
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models.attention.paged import paged_partial, paged_partial_gathered
from dcpjax.models.attention.work import Runtime, Tiles, Work
from dcpjax.models.kv_cache import AnyCache, Cache, CacheGeometry, LayerCache
from dcpjax.sharding.merge import MERGES, Partial, flatten_heads, rank
from dcpjax.sharding.merge_cost import MergeSize, fastest


def attend_on_device(
    new: tuple[jax.Array, ...],
    cache: AnyCache,
    work: Work,
    runtime: Runtime,
    gather_queries: Callable[[AnyCache, Work, jax.Array | None], jax.Array],
    gather_keys: Callable[[AnyCache], jax.Array],
) -> tuple[jax.Array, AnyCache]:
    """Write and attend, inside `shard_map`; shared by grouped-query and latent attention.

    `gather_queries(cache, work, tokens)` attends with the queries of the step's `tokens` [n], all of it for None, and
    gives the rank's own features [n, features / dcp] of the merged result; `gather_keys(cache)` does so with gathered
    keys [T, features / dcp], for the prompts that `work.gathered_keys` names.
    """
    with jax.named_scope("cache_write"):
        cache = write(cache, new, work, runtime.geometry, rank(), choose_cache_write(cache, runtime))
    keys = work.gathered_keys
    if keys is None:
        return gather_queries(cache, work, None), cache
    features = gather_keys(cache)
    if keys.other_work is not None:
        others = gather_queries(cache, keys.other_work, keys.others)
        features = features.at[keys.others].set(others, mode="drop")
    return features, cache


def attend_and_merge(
    q: jax.Array,
    cache: AnyCache,
    work: Work,
    features: int,
    runtime: Runtime,
    *,
    value_dim: int | None = None,
    attention: Callable[..., Partial] | None = None,
) -> jax.Array:
    """Attention over the slots of this rank, merged over `dcp`.

    Per device: q [T, H, D] of all heads of the dcp group, rotated and scaled -> this rank's [T, features / dcp] of the
    merged features. `features` are H * Y, padded so that dcp divides them. `value_dim`: keep only the first so many of
    the cache's value dimensions. `attention`: a function like `paged_partial` to use in place of the one that
    `choose_attention` returns.
    """
    attend = bind(_attend, cache, runtime, value_dim, attention)
    merge = bind(_merge_over_dcp, features, runtime)
    if runtime.dcp_overlap and runtime.place.dcp > 1 and _only_decodes(work):
        return _attend_in_halves(attend, merge, q, work)
    return merge(attend(q, work))


def attend_to_whole(q: jax.Array, runtime: Runtime) -> Callable[[Cache, Work, CacheGeometry], Partial]:
    """Attention of q [T, H, D], rotated and scaled, over a cache that is not split over `dcp`."""

    def attend(cache: Cache, work: Work, geometry: CacheGeometry) -> Partial:
        with jax.named_scope("partial"):
            attention = choose_attention(cache, work, replace(runtime, geometry=geometry))
            return attention(q, cache, work, geometry, jnp.int32(0))

    return attend


def rows_of(x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """The rows of x [T, ...] for these tokens [n], 0 where a token is T; all rows for None."""
    return x if tokens is None else x.at[tokens].get(mode="fill", fill_value=0.0)


def write(
    cache: AnyCache,
    new: tuple[jax.Array, ...],
    work: Work,
    geometry: CacheGeometry,
    rank: jax.Array,
    write_slots: Callable[..., AnyCache] | None = None,
) -> AnyCache:
    """Write the step's new values to the slots this rank owns; those of other ranks are dropped.

    `write_slots`: a function to use in place of the cache's own `write`.
    """
    index, owner, slot = geometry.locate(work.positions)
    block = work.block_table[jnp.maximum(work.rows, 0), jnp.maximum(index, 0)]
    owned = (work.positions >= 0) & (owner == rank) & (block >= 0)
    block = jnp.where(owned, block, cache.num_blocks)  # past the end: dropped
    return (write_slots or type(cache).write)(cache, new, block, slot)


def _attend_in_halves(
    attend: Callable[[jax.Array, Work], Partial], merge: Callable[[Partial], jax.Array], q: jax.Array, work: Work
) -> jax.Array:
    """Attend and merge tokens 0, 2, 4 ... and 1, 3, 5 ... separately.

    The first half's exchange does not depend on the second half's attention, so both can run at the same time (Helix
    parallelism, Bhatia et al. 2025, HOP-B). The barrier orders the two exchanges: the compiler would combine them
    into one that waits for both halves.
    """
    even, odd = (attend(q[start::2], _every_other(work, start)) for start in (0, 1))
    merged_even, odd = jax.lax.optimization_barrier((merge(even), odd))
    order = np.arange(q.shape[0])
    halves = jnp.concatenate([merged_even, merge(odd)])
    return halves[np.argsort(np.concatenate([order[::2], order[1::2]]))]


def _attend(
    cache: Cache,
    runtime: Runtime,
    value_dim: int | None,
    attention: Callable[..., Partial] | None,
    q: jax.Array,
    work: Work,
) -> Partial:
    with jax.named_scope("partial"):
        attention = attention or choose_attention(cache, work, runtime)
        out, lse = attention(q, cache, work, runtime.geometry, rank())
        return Partial(out[..., :value_dim], lse)


def _merge_over_dcp(features: int, runtime: Runtime, part: Partial) -> jax.Array:
    """Per device: out [T, H, Y] -> [T, features / dcp]."""
    with jax.named_scope("merge"):
        if runtime.place.dcp == 1:
            return flatten_heads(part.out, features)
        merge, (tokens, heads, value_dim) = runtime.dcp_comm_backend, part.out.shape
        if merge == "auto":
            sent = jnp.dtype(runtime.dcp_exchange_dtype)
            size = MergeSize(tokens, heads, value_dim, features, runtime.place.dcp, sent.itemsize)
            merge = fastest(size, runtime.link)
        return MERGES[merge](part, features, runtime.dcp_exchange_dtype)


def _only_decodes(work: Work) -> bool:
    """Whether the step has at least two tokens and all tiles have one token, so that tile i is token i."""
    return len(work.tiles) == 1 and work.tiles[0].size == 1 and work.positions.shape[0] > 1


def _every_other(work: Work, start: int) -> Work:
    """Tokens `start`, `start` + 2 ...: padding comes last, so both halves get about as many tokens of requests."""
    (tiles,), half = work.tiles, slice(start, None, 2)
    half_tiles = Tiles(
        tiles.start[half] // 2, tiles.row[half], tiles.chunks[half], (tiles.count + 1 - start) // 2, tiles.size
    )
    return Work(work.positions[half], work.rows[half], work.block_table, (half_tiles,))


def choose_attention(cache: Cache, work: Work, runtime: Runtime) -> Callable[..., Partial]:
    """A function like `paged_partial`: a kernel if there is one for this platform and these shapes, else that loop."""
    if runtime.attention_body == "gather":
        return paged_partial_gathered
    platform = runtime.place.platform
    if runtime.attention_body == "loop":
        return paged_partial
    if runtime.attention_body == "auto" and platform == "cpu":
        return _choose_on_cpu(cache, runtime)
    # here, not above: Pallas is slow to import and not needed on CPU
    from dcpjax.models.kernels.pallas.paged_call import paged_partial_kernel, suits

    if suits(cache, work, runtime.geometry, platform):  # type: ignore[arg-type]  # pyright sees two files for this class
        return bind(paged_partial_kernel, platform=platform)
    if runtime.attention_body == "pallas":
        raise ValueError(
            f"attention_body must be 'auto' or 'loop' on {platform} with heads of {cache.value_dim} values and "
            f"{runtime.geometry.slots} slots per block and rank, but is 'pallas'; use 'auto'"
        )
    warnings.warn(
        f"attention runs as plain XLA operations, slower than the kernel for {platform.upper()}s: that takes multiples "
        f"of 16 slots per block and rank (of 128 beyond 512) and heads of multiples of 16 values, but there are "
        f"{runtime.geometry.slots} slots and {cache.value_dim} values; change block_size",
        stacklevel=2,
    )
    return paged_partial


def _choose_on_cpu(cache: Cache, runtime: Runtime) -> Callable[..., Partial]:
    # here, not above, as in `choose_attention`
    from dcpjax.models.kernels.cpu.attention_calls import paged_partial_on_cpu, suits

    if suits(cache, runtime.geometry):
        return bind(paged_partial_on_cpu, parallel=runtime.place.single_cpu)
    return paged_partial


def choose_cache_write(cache: Cache, runtime: Runtime) -> Callable[..., Any] | None:
    """A kernel that writes keys and values on CPUs; None if the cache's own `write` is to be used."""
    if runtime.attention_body != "auto" or runtime.place.platform != "cpu" or not isinstance(cache, LayerCache):
        return None
    from dcpjax.models.kernels.cpu.attention_calls import suits, write_on_cpu

    return bind(write_on_cpu, parallel=runtime.place.single_cpu) if suits(cache, runtime.geometry) else None
