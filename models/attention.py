"""Attention over the paged cache, split by token position across `dcp`.

One function serves decode (one query token per request), verification of drafts (a few) and chunked prefill
(many). A step's work is a list of tiles; a tile is up to `size` query tokens of one request, and it visits that
request's slots in chunks of a fixed size, so cost follows the live tokens and a request's result does not depend
on its neighbours. The list is made from global lengths and is the same on every rank: nothing rank-local decides
how often a loop turns, and no loop holds a collective.

Knows token positions, block tables and slots; knows nothing about requests or model families.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dcpjax.models.kv_cache import AnyCache, Cache, CacheGeometry, LayerCache, locate_chunk
from dcpjax.sharding.exchange import Link, Merge, MergeSize, fastest
from dcpjax.sharding.merge import MERGES, Partial, flatten_heads, rank
from dcpjax.sharding.rules import Placement


@struct.dataclass
class Tiles:
    """Query tiles of one step. Entries past `count` are padding and are never visited."""

    # [G] int32, host: index of the tile's first token in the step
    start: jax.Array
    # [G] int32, host: the tile's row of the block table
    row: jax.Array
    # [G] int32, host: chunks of slots to visit, from the position of the tile's last token
    chunks: jax.Array
    # [] int32, host: tiles in use
    count: jax.Array
    # tokens per tile
    size: int = struct.field(pytree_node=False)


@struct.dataclass
class Work:
    """What attention needs to know about a step's N tokens."""

    # [N] int32, host: position of each token in its request, -1 for padding
    positions: jax.Array
    # [N] int32, host: row of the block table that each token belongs to, -1 for padding
    rows: jax.Array
    # [R, W] int32, host: block ids of each row's request, -1 for padding; W a multiple of `chunk_blocks`
    block_table: jax.Array
    # decode tiles of one token, prefill tiles of many: each token is in exactly one tile
    tiles: tuple[Tiles, ...]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a model runs, besides its numbers."""

    place: Placement
    geometry: CacheGeometry
    dcp_comm_backend: Merge | Literal["auto"] = "ag_rs"
    dcp_replicate_q: bool = False
    dcp_overlap: bool = False
    link: Link | None = None  # by which "auto" chooses
    attention_body: Literal["auto", "loop", "gather", "pallas"] = "auto"


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
    scores = _batched_dot(flat, k).reshape(kv_heads, queries, group, -1)
    scores = jnp.where(mask[None, :, None, :], scores, -jnp.inf)
    top = jnp.maximum(state.top, _largest(scores))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    shares = jnp.exp(scores - shift[..., None])
    keep = jnp.exp(state.top - shift)
    v, tainted = _select(v, mask)
    gained = _batched_dot(shares.reshape(kv_heads, queries * group, -1), v).reshape(state.out.shape)
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


def _largest(scores: jax.Array) -> jax.Array:
    """Maximum over the last axis. Halved while wide, which XLA's CPU backend vectorises and a reduction is not."""
    while scores.shape[-1] > 16 and scores.shape[-1] % 2 == 0:
        scores = jnp.maximum(*jnp.split(scores, 2, axis=-1))
    return jnp.max(scores, axis=-1)


def finish(state: State) -> Partial:
    """Running softmax -> partial, heads grouped as before."""
    empty = state.total == 0.0
    out = state.out / jnp.where(empty, 1.0, state.total)[..., None]
    lse = jnp.where(empty, -jnp.inf, state.top + jnp.log(jnp.where(empty, 1.0, state.total)))
    return Partial(out, lse)


def _batched_dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """[K, A, C] x [K, C, E] -> [K, A, E] in full float32; the batch dimension leads, as XLA's CPU backend needs."""
    return jax.lax.dot_general(left, right, (((2,), (1,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST)


def paged_partial(q: jax.Array, cache: Cache, work: Work, geometry: CacheGeometry, rank: jax.Array) -> Partial:
    """Attention of a step's tokens over the slots of this rank, tile by tile and chunk by chunk.

    Per device: q [N, H, D] (scaled) and a cache of values of Y dimensions -> out [N, H, Y], lse [N, H].
    """
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, cache.kv_heads, -1, head_dim)  # [N, K, G, D]
    state = unseen(grouped.shape[:-1], cache.value_dim)
    for tiles in work.tiles:
        state = _visit_tiles(state, grouped, cache, work, tiles, geometry, rank)
    part = finish(state)
    return Partial(part.out.reshape(tokens, heads, -1), part.lse.reshape(tokens, heads))


def _visit_tiles(
    state: State, q: jax.Array, cache: Cache, work: Work, tiles: Tiles, geometry: CacheGeometry, rank: jax.Array
) -> State:
    """Fill in the running softmax of the tokens [N] of these tiles."""
    overhang = tiles.size - 1
    q, state = _pad(q, overhang), State(*(_pad(x, overhang) for x in state))
    positions, rows = _pad(work.positions, overhang, -1), _pad(work.rows, overhang, -1)

    def visit(tile: jax.Array, state: State) -> State:
        start, row = _at(tiles.start, tile), _at(tiles.row, tile)
        queries, limits = _window(q, start, tiles.size).swapaxes(0, 1), _window(positions, start, tiles.size)

        def visit_chunk(chunk: jax.Array, own: State) -> State:
            where = locate_chunk(work.block_table, row, chunk, geometry, rank)
            return fold(own, queries, *cache.read(where), where.positions[None, :] <= limits[:, None])

        none = unseen(queries.shape[:-1], cache.value_dim)
        own = jax.lax.fori_loop(0, _at(tiles.chunks, tile), visit_chunk, none)
        own = State(*(x.swapaxes(0, 1) for x in own))
        if tiles.size > 1:  # the window may overhang its request: leave the others' tokens as they are
            mine = _window(rows, start, tiles.size) == row
            kept = State(*(_window(x, start, tiles.size) for x in state))
            own = State(*(jnp.where(_expand(mine, new.ndim), new, old) for new, old in zip(own, kept, strict=True)))
        return State(
            *(jax.lax.dynamic_update_slice_in_dim(x, new, start, 0) for x, new in zip(state, own, strict=True))
        )

    state = jax.lax.fori_loop(0, tiles.count, visit, state)
    return State(*(x[: work.positions.shape[0]] for x in state))


def _expand(x: jax.Array, ndim: int) -> jax.Array:
    return jnp.expand_dims(x, range(1, ndim))


def _pad(x: jax.Array, count: int, value: float = 0) -> jax.Array:
    """`count` more entries at the end of the first axis."""
    return x if count == 0 else jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)), constant_values=value)


def _window(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] for an index known to be in range: no code for negative ones."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def paged_partial_gathered(q: jax.Array, cache: Cache, work: Work, geometry: CacheGeometry, rank: jax.Array) -> Partial:
    """The plain batched form of `paged_partial`: gathers every slot of every row. The reference, not for speed."""
    index = jnp.arange(work.block_table.shape[1])
    slot = jnp.arange(geometry.slots)
    positions = geometry.position(index[:, None], rank, slot[None, :]).reshape(-1)

    def one_token(query: jax.Array, position: jax.Array, row: jax.Array) -> Partial:
        keys, values = cache.read_blocks(jnp.maximum(work.block_table[jnp.maximum(row, 0)], 0))
        mask = (positions <= position) & (row >= 0)
        out, lse = partial(query[None], keys, values, mask[None])
        return Partial(out[0], lse[0])

    return Partial(*jax.vmap(one_token)(q, work.positions, work.rows))


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
    from dcpjax.models.pallas_attention import paged_partial_kernel, suits

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
    from dcpjax.models.numba_attention import paged_partial_numba, suits

    if suits(cache, runtime.geometry):
        return bind(paged_partial_numba, parallel=runtime.place.lone_cpu)
    return paged_partial


def choose_store(cache: Cache, runtime: Runtime) -> Callable[..., Any] | None:
    """A kernel on CPUs where `choose_body` has one for keys and values, else what the cache does itself."""
    if runtime.attention_body != "auto" or runtime.place.platform != "cpu" or not isinstance(cache, LayerCache):
        return None
    from dcpjax.models.numba_attention import suits, write_numba

    return bind(write_numba, parallel=runtime.place.lone_cpu) if suits(cache, runtime.geometry) else None
