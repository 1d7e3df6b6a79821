"""Attention over the slots that one rank holds, in plain XLA operations: a loop over tiles and chunks, and a reference.

Nothing rank-local decides how often a loop turns, and no loop holds a collective.
"""

import jax
import jax.numpy as jnp

from dcpjax.models.attention.softmax import State, finish, fold, partial, unseen
from dcpjax.models.attention.work import Tiles, Work
from dcpjax.models.kv_cache import Cache, CacheGeometry, locate_chunk
from dcpjax.sharding.merge import Partial


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
