"""Attention over the paged cache, split by token position across `dcp`.

One function serves decode (one query token per request), verification of drafts (a few) and chunked prefill
(many). A step's work is a list of tiles; a tile is up to `size` query tokens of one request, and it visits that
request's slots in chunks of a fixed size, so cost follows the live tokens and a request's result does not depend
on its neighbours. The list is made from global lengths and is the same on every rank: nothing rank-local decides
how often a loop turns, and no loop holds a collective.

Knows token positions, block tables and slots; knows nothing about requests or model families.
"""

from dataclasses import dataclass
from functools import partial as bind
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dcpjax.models.kv_cache import CacheGeometry, decode, encode
from dcpjax.models.layers import Rotary, rms_norm, rotate
from dcpjax.sharding.arrays import Leaf
from dcpjax.sharding.merge import MERGES, Partial, flatten_heads, gather_features, rank
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


@struct.dataclass
class LayerCache:
    """One layer's keys and values, N blocks of P slots per rank."""

    # [N, dcp, K, D, P] cache dtype, transposed so that scores read along slots
    keys: Leaf
    # [N, dcp, K, P, D] cache dtype
    values: Leaf


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a model runs, besides its numbers."""

    place: Placement
    geometry: CacheGeometry
    dcp_comm_backend: Literal["ag_rs", "a2a", "psum"] = "ag_rs"
    dcp_replicate_q: bool = False
    attention_body: Literal["loop", "gather"] = "loop"


class HeadNorms(NamedTuple):
    """Per-head RMS norms of queries and keys (Qwen3); None where a family has none."""

    query: jax.Array | None  # [D]
    key: jax.Array | None  # [D]
    eps: float = 1e-6


# --- the contract, on one device


def partial(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """Attention of queries over one set of keys, in float32, with the natural-log lse.

    q [N, H, D] (already scaled), k [S, K, D], v [S, K, D], mask [N, S] -> out [N, H, D], lse [N, H].
    Query head h reads KV head h // (H / K). A query that sees no key gets out 0 and lse -inf, whatever the
    masked keys and values hold.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 0, 2, 3)
    state = fold(_empty(grouped.shape), grouped, k.transpose(1, 2, 0), v.transpose(1, 0, 2), mask)
    out, lse = finish(state)
    return Partial(out.transpose(1, 0, 2, 3).reshape(q.shape), lse.transpose(1, 0, 2).reshape(tokens, heads))


class State(NamedTuple):
    """Running softmax: [K, Q, G] of one tile's Q tokens, or [N, K, G] of a whole step; G = H / K query heads."""

    out: jax.Array  # [..., D] float32, not yet divided by `total`
    top: jax.Array  # float32, largest score so far
    total: jax.Array  # float32, sum of exp(score - top)


def _empty(shape: tuple[int, ...]) -> State:
    return State(jnp.zeros(shape), jnp.full(shape[:-1], -jnp.inf), jnp.zeros(shape[:-1]))


def fold(state: State, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> State:
    """Fold one chunk of keys into the running softmax (Milakov & Gimelshein 2018, algorithm 3).

    q [K, Q, G, D], k [K, D, S], v [K, S, D] float32; mask [Q, S]. Masked scores and values are selected away,
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
    usable = jnp.any(mask, axis=0)[None, :, None]
    if queries > 1:  # a value that one query sees and another does not
        finite = jnp.isfinite(v)
        usable = usable & finite
        tainted = jnp.any(mask[None] & ~jnp.all(finite, axis=-1)[:, None, :], axis=-1)  # [K, Q]
    gained = _batched_dot(shares.reshape(kv_heads, queries * group, -1), jnp.where(usable, v, 0.0)).reshape(q.shape)
    if queries > 1:
        gained = jnp.where(tainted[:, :, None, None], jnp.nan, gained)
    return State(state.out * keep[..., None] + gained, top, state.total * keep + jnp.sum(shares, axis=-1))


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


# --- over the paged cache, per device


def paged_partial(q: jax.Array, cache: LayerCache, work: Work, geometry: CacheGeometry, rank: jax.Array) -> Partial:
    """Attention of a step's tokens over the slots of this rank, tile by tile and chunk by chunk.

    Per device: q [N, H, D] (scaled), cache keys [N, 1, K, D, P], values [N, 1, K, P, D] -> out [N, H, D], lse [N, H].
    """
    kv_heads = cache.keys.shape[2]
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[2])  # [N, K, G, D]
    state = _empty(grouped.shape)
    for tiles in work.tiles:
        state = _visit_tiles(state, grouped, cache, work, tiles, geometry, rank)
    part = finish(state)
    return Partial(part.out.reshape(q.shape), part.lse.reshape(q.shape[:2]))


def _visit_tiles(
    state: State, q: jax.Array, cache: LayerCache, work: Work, tiles: Tiles, geometry: CacheGeometry, rank: jax.Array
) -> State:
    """Fill in the running softmax of the tokens [N] of these tiles."""
    overhang = tiles.size - 1
    q, state = _pad(q, overhang), State(*(_pad(x, overhang) for x in state))
    positions, rows = _pad(work.positions, overhang, -1), _pad(work.rows, overhang, -1)

    def visit(tile: jax.Array, state: State) -> State:
        start, row = _at(tiles.start, tile), _at(tiles.row, tile)
        queries, limits = _window(q, start, tiles.size).swapaxes(0, 1), _window(positions, start, tiles.size)

        def visit_chunk(chunk: jax.Array, own: State) -> State:
            keys, values, slot_positions = read_chunk(cache, work.block_table, row, chunk, geometry, rank)
            return fold(own, queries, keys, values, slot_positions[None, :] <= limits[:, None])

        own = jax.lax.fori_loop(0, _at(tiles.chunks, tile), visit_chunk, _empty(queries.shape))
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


def read_chunk(
    cache: LayerCache,
    table: jax.Array,
    row: jax.Array,
    chunk: jax.Array,
    geometry: CacheGeometry,
    rank: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunk number `chunk` of the request in `row`, raised to float32: keys [K, D, S], values [K, S, D], positions [S]."""
    size, blocks = geometry.chunk_slots_per_block, geometry.chunk_blocks
    pieces = geometry.slots // size  # chunks per block where a block is long
    first_block, first_slot = chunk // pieces * blocks, chunk % pieces * size
    ids = jax.lax.dynamic_slice(table, (row, first_block), (1, blocks), allow_negative_indices=False)[0]
    ids = jnp.maximum(ids, 0)
    keys = _read_slots(cache.keys, ids, first_slot, size, axis=4)
    values = _read_slots(cache.values, ids, first_slot, size, axis=3)
    index = first_block + jnp.arange(blocks)
    positions = geometry.position(index[:, None], rank, first_slot + jnp.arange(size)[None, :])
    return decode(keys), decode(values), positions.reshape(-1)


def _read_slots(stored: jax.Array, ids: jax.Array, first: jax.Array, size: int, axis: int) -> jax.Array:
    """Slots `first .. first + size - 1` of blocks `ids`, side by side: [N, 1, K, ...] per device -> [K, ...].

    Slots lie along `axis` of the stored array. Copied slice by slice: XLA's CPU backend takes several times as
    long to gather or to concatenate.
    """
    starts, sizes = [jnp.zeros_like(first)] * stored.ndim, [1, *stored.shape[1:]]
    starts[axis], sizes[axis] = first, size

    def read(block_id: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(stored, [block_id, *starts[1:]], sizes, allow_negative_indices=False)[0, 0]

    if ids.shape[0] == 1:
        return read(ids[0])
    shape = list(stored.shape[2:])
    shape[axis - 2] = size * ids.shape[0]

    def copy(place: jax.Array, chunk: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(chunk, read(_at(ids, place)), place * size, axis - 2)

    return jax.lax.fori_loop(0, ids.shape[0], copy, jnp.zeros(shape, stored.dtype))


def paged_partial_gathered(
    q: jax.Array, cache: LayerCache, work: Work, geometry: CacheGeometry, rank: jax.Array
) -> Partial:
    """The plain batched form of `paged_partial`: gathers every slot of every row. The reference, not for speed."""
    index = jnp.arange(work.block_table.shape[1])
    slot = jnp.arange(geometry.slots)
    positions = geometry.position(index[:, None], rank, slot[None, :]).reshape(-1)

    def one_token(query: jax.Array, position: jax.Array, row: jax.Array) -> Partial:
        ids = jnp.maximum(work.block_table[jnp.maximum(row, 0)], 0)
        keys = decode(cache.keys[ids, 0]).transpose(0, 3, 1, 2)  # [W, P, K, D]
        values = decode(cache.values[ids, 0]).transpose(0, 2, 1, 3)
        flat = (-1, *keys.shape[2:])
        mask = (positions <= position) & (row >= 0)
        return Partial(*(x[0] for x in partial(query[None], keys.reshape(flat), values.reshape(flat), mask[None])))

    return Partial(*jax.vmap(one_token)(q, work.positions, work.rows))


def write(
    cache: LayerCache, k: jax.Array, v: jax.Array, work: Work, geometry: CacheGeometry, rank: jax.Array
) -> LayerCache:
    """Write the step's keys and values [N, K, D] to the slots this rank owns; other positions are dropped."""
    index, owner, slot = geometry.locate(work.positions)
    block = work.block_table[jnp.maximum(work.rows, 0), jnp.maximum(index, 0)]
    owned = (work.positions >= 0) & (owner == rank) & (block >= 0)
    block = jnp.where(owned, block, cache.keys.shape[0])  # past the end: dropped
    keys = cache.keys.at[block, 0, :, :, slot].set(encode(k, cache.keys.dtype), mode="drop")
    values = cache.values.at[block, 0, :, slot, :].set(encode(v, cache.values.dtype), mode="drop")
    return LayerCache(keys, values)


# --- over the mesh


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    work: Work,
    angles: Rotary,
    norms: HeadNorms,
    head_dim: int,
    heads: int,
    runtime: Runtime,
) -> tuple[jax.Array, LayerCache]:
    """Update the cache and attend over it, on every device of the mesh at once.

    q [N, tp * F] over `query`, k and v [N, K * D] over `kv_heads` -> merged features [N, tp * F] over `heads`,
    F = H * D / tp padded so that it divides by dcp. Per device:

    1. gather q over dcp                       [N, F / dcp] -> [N, F]; heads [N, H / tp, D], norm, rope
    2. write new keys and values               to the slots this rank owns
    3. partial attention                       over this rank's slots -> out [N, H / tp, D], lse [N, H / tp]
    4. merge over dcp                          by lse, one of three exchanges
    5. keep the features of the own o_proj rows  [N, F / dcp]
    """
    place = runtime.place
    body = bind(_attend_on_device, norms_eps=norms.eps, head_dim=head_dim, heads=heads // place.tp, runtime=runtime)
    replicated = place.spec()
    cache_spec = LayerCache(
        keys=place.spec(None, "kv_context", "kv_heads", None, None),
        values=place.spec(None, "kv_context", "kv_heads", None, None),
    )
    kv_spec = place.spec(None, "kv_heads")
    return jax.shard_map(
        body,
        mesh=place.mesh,
        in_specs=(
            place.spec(None, "query"),
            kv_spec,
            kv_spec,
            cache_spec,
            replicated,
            replicated,
            replicated,
        ),
        out_specs=(place.spec(None, "heads"), cache_spec),
        check_vma=False,
    )(q, k, v, cache, work, angles, (norms.query, norms.key))


def _attend_on_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    work: Work,
    angles: Rotary,
    norms: tuple[jax.Array | None, jax.Array | None],
    *,
    norms_eps: float,
    head_dim: int,
    heads: int,
    runtime: Runtime,
) -> tuple[jax.Array, LayerCache]:
    with jax.named_scope("gather_query"):
        if not runtime.dcp_replicate_q:
            q = gather_features(q)
    features = q.shape[1]
    with jax.named_scope("rope"):
        q, k = _heads(q[:, : heads * head_dim], head_dim), _heads(k, head_dim)
        q, k = _normed(q, norms[0], norms_eps), _normed(k, norms[1], norms_eps)
        q, k = rotate(q, angles) * head_dim**-0.5, rotate(k, angles)
    with jax.named_scope("cache_write"):
        cache = write(cache, k, _heads(v, head_dim), work, runtime.geometry, rank())
    with jax.named_scope("partial"):
        body = paged_partial if runtime.attention_body == "loop" else paged_partial_gathered
        part = body(q, cache, work, runtime.geometry, rank())
    with jax.named_scope("merge"):
        if runtime.place.dcp == 1:
            return flatten_heads(part.out, features), cache
        return MERGES[runtime.dcp_comm_backend](part, features), cache


def _heads(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(x.shape[0], -1, head_dim)


def _normed(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    return x if weight is None else rms_norm(x, weight, eps)
