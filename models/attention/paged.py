"""Attention over the slots of one rank, in plain XLA operations: a loop over tiles and chunks, and a reference.

The number of iterations of each loop is the same on every rank, and no loop holds a collective.
"""

import jax
import jax.numpy as jnp

from dcpjax.models.attention.softmax import (
    SoftmaxState,
    empty_state,
    finish,
    fold,
    partial,
    select_state,
    set_state_window,
    state_window,
    window,
)
from dcpjax.models.attention.work import Tiles, Work
from dcpjax.models.kv_cache import Cache, CacheGeometry, locate_chunk
from dcpjax.sharding.merge import Partial


def paged_partial(q: jax.Array, cache: Cache, work: Work, geometry: CacheGeometry, rank: jax.Array) -> Partial:
    """Attention of a step's tokens over the slots of this rank, tile by tile and chunk by chunk.

    Per device: q [T, H, D] (scaled) and a cache of values of Y dimensions -> out [T, H, Y], lse [T, H].
    """
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, cache.kv_heads, -1, head_dim)  # [T, K, G, D]
    state = empty_state(grouped.shape[:-1], cache.value_dim)
    for tiles in work.tiles:
        state = _attend_tiles(state, grouped, cache, work, tiles, geometry, rank)
    part = finish(state)
    return Partial(part.out.reshape(tokens, heads, -1), part.lse.reshape(tokens, heads))


def _attend_tiles(
    state: SoftmaxState, q: jax.Array, cache: Cache, work: Work, tiles: Tiles, geometry: CacheGeometry, rank: jax.Array
) -> SoftmaxState:
    """`state` [T, K, G] with the results of these tiles' tokens; q [T, K, G, D]."""
    padding = tiles.size - 1  # a tile may begin at the last token of the step
    q, state = _pad(q, padding), SoftmaxState(*(_pad(x, padding) for x in state))
    positions, rows = _pad(work.positions, padding, -1), _pad(work.rows, padding, -1)

    def attend_tile(tile: jax.Array, state: SoftmaxState) -> SoftmaxState:
        start, row = _at(tiles.start, tile), _at(tiles.row, tile)
        queries, limits = window(q, start, tiles.size).swapaxes(0, 1), window(positions, start, tiles.size)

        def fold_chunk(number: jax.Array, tile_state: SoftmaxState) -> SoftmaxState:
            chunk = locate_chunk(work.block_table, row, number, geometry, rank)
            return fold(tile_state, queries, *cache.read(chunk), chunk.positions[None, :] <= limits[:, None])

        empty = empty_state(queries.shape[:-1], cache.value_dim)
        new = jax.lax.fori_loop(0, _at(tiles.chunks, tile), fold_chunk, empty)
        new = SoftmaxState(*(x.swapaxes(0, 1) for x in new))
        if tiles.size > 1:  # the window may reach into another request, whose tokens must not change
            in_tile = window(rows, start, tiles.size) == row
            new = select_state(in_tile, new, state_window(state, start, tiles.size, axis=0), axis=0)
        return set_state_window(state, new, start, axis=0)

    state = jax.lax.fori_loop(0, tiles.count, attend_tile, state)
    return SoftmaxState(*(x[: work.positions.shape[0]] for x in state))


def _pad(x: jax.Array, count: int, value: float = 0) -> jax.Array:
    """`count` more entries at the end of the first axis."""
    return x if count == 0 else jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)), constant_values=value)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] for an index from 0 to len(x) - 1: compiles to no code for negative indices."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def paged_partial_gathered(q: jax.Array, cache: Cache, work: Work, geometry: CacheGeometry, rank: jax.Array) -> Partial:
    """`paged_partial` in a plain batched form that gathers every slot of every request: a reference, slow."""
    index = jnp.arange(work.block_table.shape[1])
    slot = jnp.arange(geometry.slots)
    positions = geometry.position(index[:, None], rank, slot[None, :]).reshape(-1)

    def one_token(query: jax.Array, position: jax.Array, row: jax.Array) -> Partial:
        keys, values = cache.read_blocks(jnp.maximum(work.block_table[jnp.maximum(row, 0)], 0))
        mask = (positions <= position) & (row >= 0)
        out, lse = partial(query[None], keys, values, mask[None])
        return Partial(out[0], lse[0])

    return Partial(*jax.vmap(one_token)(q, work.positions, work.rows))
