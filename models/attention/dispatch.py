"""Attention of one step on one device: write new keys and values, attend with the body that suits, merge over `dcp`.

One function serves decode (one query token per request), verification of drafts (a few) and chunked prefill (many).
"""

from collections.abc import Callable
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
    q: jax.Array,
    new: tuple[jax.Array, ...],
    cache: AnyCache,
    work: Work,
    features: int,
    runtime: Runtime,
    *,
    value_dim: int | None = None,
    body: Callable[..., Partial] | None = None,
) -> tuple[jax.Array, AnyCache]:
    """Write, attend and merge, inside `shard_map`: what every kind of attention shares.

    Per device: q [N, H, D] of all heads of the dcp group, rotated and scaled -> features [N, F / dcp] that this
    rank keeps of the H * Y merged ones, and the updated cache. `value_dim` keeps the first so many of the Y.
    `body` attends as `paged_partial` does, which is what `choose_body` chooses if it is left out.
    """
    with jax.named_scope("cache_write"):
        cache = write(cache, new, work, runtime.geometry, rank(), choose_store(cache, runtime))
    attend, join = bind(_attend, cache, runtime, value_dim, body), bind(_join, features, runtime)
    if runtime.dcp_overlap and runtime.place.dcp > 1 and _only_decodes(work):
        return _in_halves(attend, join, q, work), cache
    return join(attend(q, work)), cache


def write(
    cache: AnyCache,
    new: tuple[jax.Array, ...],
    work: Work,
    geometry: CacheGeometry,
    rank: jax.Array,
    store: Callable[..., AnyCache] | None = None,
) -> AnyCache:
    """Write what the step's tokens add to the slots this rank owns; other positions are dropped. `store` writes as
    the cache's own `write` does."""
    index, owner, slot = geometry.locate(work.positions)
    block = work.block_table[jnp.maximum(work.rows, 0), jnp.maximum(index, 0)]
    owned = (work.positions >= 0) & (owner == rank) & (block >= 0)
    block = jnp.where(owned, block, cache.num_blocks)  # past the end: dropped
    return (store or type(cache).write)(cache, new, block, slot)


def _in_halves(
    attend: Callable[[jax.Array, Work], Partial], join: Callable[[Partial], jax.Array], q: jax.Array, work: Work
) -> jax.Array:
    """Attend and merge tokens 0, 2, 4 ... and 1, 3, 5 ... apart: the first half's exchange needs nothing of the
    second half's attention and can hide behind it (Helix parallelism, Bhatia et al. 2025, HOP-B).

    The exchanges themselves take turns, or the compiler would join them into one that waits for both.
    """
    early, late = (attend(q[start::2], _every_other(work, start)) for start in (0, 1))
    first, late = jax.lax.optimization_barrier((join(early), late))
    order = np.arange(q.shape[0])
    joined = jnp.concatenate([first, join(late)])
    return joined[np.argsort(np.concatenate([order[::2], order[1::2]]))]


def _attend(
    cache: Cache,
    runtime: Runtime,
    value_dim: int | None,
    body: Callable[..., Partial] | None,
    q: jax.Array,
    work: Work,
) -> Partial:
    with jax.named_scope("partial"):
        attend = body or choose_body(cache, work, runtime)
        out, lse = attend(q, cache, work, runtime.geometry, rank())
        return Partial(out[..., :value_dim], lse)


def _join(features: int, runtime: Runtime, part: Partial) -> jax.Array:
    """Merge over dcp: per device [N, H, Y] -> [N, F / dcp]."""
    with jax.named_scope("merge"):
        if runtime.place.dcp == 1:
            return flatten_heads(part.out, features)
        merge, (tokens, heads, value_dim) = runtime.dcp_comm_backend, part.out.shape
        if merge == "auto":
            merge = fastest(MergeSize(tokens, heads, value_dim, features, runtime.place.dcp), runtime.link)
        return MERGES[merge](part, features)


def _only_decodes(work: Work) -> bool:
    """Whether the step is two or more single tokens and no more, so that tile i is token i."""
    return len(work.tiles) == 1 and work.tiles[0].size == 1 and work.positions.shape[0] > 1


def _every_other(work: Work, start: int) -> Work:
    """Tokens `start`, `start` + 2 ...: live tokens come first, so either half gets its share of them."""
    (tiles,), half = work.tiles, slice(start, None, 2)
    chosen = Tiles(
        tiles.start[half] // 2, tiles.row[half], tiles.chunks[half], (tiles.count + 1 - start) // 2, tiles.size
    )
    return Work(work.positions[half], work.rows[half], work.block_table, (chosen,))


def choose_body(cache: Cache, work: Work, runtime: Runtime) -> Callable[..., Partial]:
    """A kernel on accelerators where the shapes allow one, else the loop."""
    if runtime.attention_body == "gather":
        return paged_partial_gathered
    platform = runtime.place.platform
    if runtime.attention_body == "loop":
        return paged_partial
    if runtime.attention_body == "auto" and platform == "cpu":
        return _cpu_body(cache, runtime)
    # here, not above: Pallas imports this file, is slow to import, and a CPU never needs it
    from dcpjax.models.kernels.pallas.paged_call import paged_partial_kernel, suits

    if suits(cache, work, runtime.geometry, platform):  # type: ignore[arg-type]  # this file has two names for pyright
        return bind(paged_partial_kernel, platform=platform)
    if runtime.attention_body == "pallas":
        raise ValueError(
            f"attention_body must be 'auto' or 'loop' on {platform} with heads of {cache.value_dim} values and "
            f"{runtime.geometry.slots} slots per block and rank, but is 'pallas'; use 'auto'"
        )
    return paged_partial


def _cpu_body(cache: Cache, runtime: Runtime) -> Callable[..., Partial]:
    # here, not above, as in `choose_body`
    from dcpjax.models.kernels.cpu.attention_calls import paged_partial_on_cpu, suits

    if suits(cache, runtime.geometry):
        return bind(paged_partial_on_cpu, parallel=runtime.place.single_cpu)
    return paged_partial


def choose_store(cache: Cache, runtime: Runtime) -> Callable[..., Any] | None:
    """A kernel on CPUs where `choose_body` has one for keys and values, else what the cache does itself."""
    if runtime.attention_body != "auto" or runtime.place.platform != "cpu" or not isinstance(cache, LayerCache):
        return None
    from dcpjax.models.kernels.cpu.attention_calls import suits, write_on_cpu

    return bind(write_on_cpu, parallel=runtime.place.single_cpu) if suits(cache, runtime.geometry) else None
