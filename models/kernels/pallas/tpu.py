"""Paged attention on TPUs: a Pallas kernel for Mosaic.

The grid is the list of live (tile, slots) pairs, as long as the step needs and no longer, once for each block of
rows. The list lies in scalar memory: it tells the pipeline which page of the cache to copy to the chip while the
page before it is being multiplied. A tile's turns follow one another, so its running softmax stays on the chip.

Knows blocks of rows and one rank's cache; knows nothing about a step's tokens or the other ranks.
"""

from functools import partial as bind
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.lax import div, rem  # whole and rest of numbers that are never negative: no floor

from dcpjax.models.attention.work import Work
from dcpjax.models.kernels.pallas.blocks import Blocks, Slots, State, empty, finish, fold, positions
from dcpjax.models.kv_cache import Cache, CacheGeometry, LatentCache
from dcpjax.sharding.merge import Partial

SCALARS = 2**17  # integers of the list: half of the scalar memory of the smallest chips
LANES = 128
MOST_SLOTS = 512


def suits(cache: Cache, work: Work, geometry: CacheGeometry) -> bool:
    """Whether a block comes in whole sublanes or lanes, and the list of turns fits scalar memory."""
    slots, tiles = slots_per_turn(cache, geometry), max(tiles.start.shape[0] for tiles in work.tiles)
    return slots > 0 and 2 * tiles * (1 + work.block_table.shape[1] * geometry.slots // slots) <= SCALARS


def rows_per_block(rows: int, cache: Cache) -> int:
    """M: few enough that queries and the running softmax stay on chip; a multiple of what a bfloat16 tile holds."""
    return min(512 if cache.value_dim <= 256 else 256, -(-rows // 16) * 16)


def slots_per_turn(_: Cache, geometry: CacheGeometry) -> int:
    """S: a whole block, or as many whole lanes of a long one; 0 where neither is possible."""
    if geometry.slots <= MOST_SLOTS:
        return geometry.slots if geometry.slots % 16 == 0 else 0
    return next((size for size in range(MOST_SLOTS, 0, -LANES) if geometry.slots % size == 0), 0)


def attend(
    blocks: Blocks, cache: Cache, table: jax.Array, geometry: CacheGeometry, rank: jax.Array, interpret: bool
) -> Partial:
    """Blocks of T tiles -> out [T, J, M, Y], lse [T, J, M]. A tile without turns may hold anything."""
    tiles, heads, rows, head_dim = blocks.queries.shape
    slots, per_head = slots_per_turn(cache, geometry), blocks.per_head
    turns, count = _list_turns(blocks, table, geometry.slots // slots)

    def of_tile(size: int, heads: int = heads) -> pl.BlockSpec:
        def index(head: jax.Array, item: jax.Array, _: Any, turns: Turns) -> tuple[Any, ...]:
            return turns.tile[item], rem(head, heads), 0, 0

        return pl.BlockSpec((None, None, rows, size), index)

    out, lse = pl.pallas_call(
        bind(_kernel, geometry=geometry, slots=slots),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads, count),
            in_specs=[of_tile(1, per_head), of_tile(head_dim), *_cache_specs(cache, slots, per_head)],
            out_specs=[of_tile(cache.value_dim), of_tile(1)],
            scratch_shapes=[tpu.VMEM((rows, size), jnp.float32) for size in (cache.value_dim, 1, 1)],
        ),
        out_shape=[jax.ShapeDtypeStruct((tiles, heads, rows, size), jnp.float32) for size in (cache.value_dim, 1)],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(rank[None], turns, blocks.limits, blocks.queries, *jax.tree.leaves(cache))
    return Partial(out, lse[..., 0])


class Turns(NamedTuple):
    """The turns of all tiles one after another, I places for them. As many pages to a block as it takes turns."""

    tile: Any  # [I] int32
    page: Any  # [I] int32: block * pages + page of the block
    first: Any  # [T] int32: where a tile's turns begin
    count: Any  # [T] int32: how many they are


def _list_turns(blocks: Blocks, table: jax.Array, pages: int) -> tuple[Turns, jax.Array]:
    """The list, and its length: at least one, as a grid must not be empty."""
    tiles, width = blocks.turns.shape[0], table.shape[1] * pages
    ends = jnp.cumsum(blocks.turns)
    first = ends - blocks.turns
    tile = jnp.repeat(jnp.arange(tiles), blocks.turns, total_repeat_length=tiles * width)
    number = jnp.clip(jnp.arange(tiles * width) - first[tile], 0, width - 1)
    block = jnp.maximum(table[blocks.rows[tile], number // pages], 0)
    return Turns(tile, block * pages + number % pages, first, blocks.turns), jnp.maximum(ends[-1], 1)


def _cache_specs(cache: Cache, slots: int, per_head: int) -> list[pl.BlockSpec]:
    """Which page of each cached array a turn reads."""

    def spec(shape: tuple[int, ...], axis: int) -> pl.BlockSpec:
        """One block, one head where there are heads, and `slots` slots along `axis`."""
        ndim, pages = len(shape), shape[axis] // slots

        def index(head: jax.Array, item: jax.Array, _: Any, turns: Turns) -> tuple[Any, ...]:
            where = [*(div(turns.page[item], pages), 0, div(head, per_head))[: ndim - 2], 0, 0]
            where[axis] = rem(turns.page[item], pages)
            return tuple(where)

        sizes = list(shape[-2:])
        sizes[axis - ndim] = slots
        return pl.BlockSpec((*[None] * (ndim - 2), *sizes), index)

    if isinstance(cache, LatentCache):
        return [spec(cache.latents.shape, axis=2)]
    return [spec(cache.keys.shape, axis=4), spec(cache.values.shape, axis=3)]


def _kernel(rank: Any, turns: Turns, limits: Any, q: Any, *refs: Any, geometry: CacheGeometry, slots: int) -> None:
    """One turn of one tile. `refs`: keys and values, or latents; out and lse; the running softmax."""
    *stored, out, lse, sums, top, total = refs
    tile, pages = turns.tile[pl.program_id(1)], geometry.slots // slots
    number = pl.program_id(1) - turns.first[tile]

    @pl.when(number == 0)
    def _start() -> None:
        (sums[...],), top[...], total[...] = empty(*sums.shape)

    where = positions(div(number, pages), rem(number, pages) * slots, slots, geometry, rank[0])
    loaded = Slots((stored[0][...],), (stored[-1][...],), 2 - len(stored), *where)
    state = fold(State((sums[...],), top[...], total[...]), (q[...],), loaded, limits[...])
    (sums[...],), top[...], total[...] = state

    @pl.when(number == turns.count[tile] - 1)
    def _finish() -> None:
        (out[...],), lse[...] = finish(state)
