"""Paged attention on TPUs: a Pallas kernel for Mosaic.

The grid is [blocks of a tile, iterations of the tiles], so its size follows the tokens in use. The list of iterations
is in scalar memory: from it the pipeline knows which page of the cache to copy to the chip while the page before is
multiplied. The iterations of a tile are consecutive, so its running softmax stays on the chip. If the list of all tiles
could be longer than that memory, the kernel runs for some of them after the other.
"""

from functools import partial as bind
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.lax import div, rem  # for numbers that are not negative: no code that rounds down

from dcpjax.models.attention.work import Work
from dcpjax.models.kernels.pallas.blocks import RowBlocks, Slots, SoftmaxState, empty_state, finish, fold, positions
from dcpjax.models.kv_cache import Cache, CacheGeometry, LatentCache
from dcpjax.sharding.merge import Partial

SCALARS = 2**17  # integers of the list: half of the scalar memory of the smallest chips
LANES = 128
MAX_SLOTS = 512


def suits(cache: Cache, work: Work, geometry: CacheGeometry) -> bool:
    """Whether a block of the cache is whole sublanes or lanes, and the list of one tile fits in scalar memory."""
    slots = slots_per_iteration(cache, geometry)
    return slots > 0 and _tiles_per_call(work.block_table, geometry.slots // slots) > 0


def rows_per_block(rows: int, cache: Cache) -> int:
    """Rows of a block: a multiple of 16, as in a bfloat16 tile; queries and running softmax must fit on the chip."""
    return min(512 if cache.value_dim <= 256 else 256, -(-rows // 16) * 16)


def slots_per_iteration(_: Cache, geometry: CacheGeometry) -> int:
    """S: a whole block of the cache, or of a long one the most whole lanes; 0 if neither is possible."""
    if geometry.slots <= MAX_SLOTS:
        return geometry.slots if geometry.slots % 16 == 0 else 0
    return next((size for size in range(MAX_SLOTS, 0, -LANES) if geometry.slots % size == 0), 0)


def attend(
    blocks: RowBlocks, cache: Cache, table: jax.Array, geometry: CacheGeometry, rank: jax.Array, interpret: bool
) -> Partial:
    """The blocks of I tiles -> out [I, blocks, rows, Y], lse [I, blocks, rows]; undefined for padding tiles."""
    slots = slots_per_iteration(cache, geometry)
    size, tiles = _tiles_per_call(table, geometry.slots // slots), len(blocks.iterations)
    call = bind(_call, cache=cache, table=table, geometry=geometry, slots=slots, rank=rank, interpret=interpret)
    if tiles <= size:
        return call(blocks)
    groups = jax.tree.map(bind(_in_groups, size=size), blocks)
    part = jax.lax.map(call, groups)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tiles], part)


def _tiles_per_call(table: jax.Array, pages: int) -> int:
    """Tiles whose list is sure to fit in scalar memory, for `pages` pages of a block; 0 if that of one may not."""
    return SCALARS // (2 * (1 + table.shape[1] * pages))


def _in_groups(x: jax.Array, size: int) -> jax.Array:
    """[I, ...] -> [groups, size, ...], padded with zeros: tiles without iterations."""
    return jnp.pad(x, ((0, -len(x) % size), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])


def _call(
    blocks: RowBlocks,
    *,
    cache: Cache,
    table: jax.Array,
    geometry: CacheGeometry,
    slots: int,
    rank: jax.Array,
    interpret: bool,
) -> Partial:
    """`attend` for tiles whose list fits in scalar memory."""
    tiles, heads, rows, head_dim = blocks.queries.shape
    per_head = blocks.per_head
    iterations, count = _list_iterations(blocks, table, geometry.slots // slots)

    def of_tile(size: int, heads: int = heads) -> pl.BlockSpec:
        def index(head: jax.Array, item: jax.Array, _: Any, iterations: Iterations) -> tuple[Any, ...]:
            return iterations.tile[item], rem(head, heads), 0, 0

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
    )(rank[None], iterations, blocks.limits, blocks.queries, *jax.tree.leaves(cache))
    return Partial(out, lse[..., 0])


class Iterations(NamedTuple):
    """The iterations of all tiles, one tile after another. A page is what one iteration loads of a block."""

    tile: Any  # [most iterations] int32
    page: Any  # [most iterations] int32: block * pages of a block + page within the block
    first: Any  # [I] int32: the tile's first iteration
    count: Any  # [I] int32: the tile's number of iterations


def _list_iterations(blocks: RowBlocks, table: jax.Array, pages: int) -> tuple[Iterations, jax.Array]:
    """The list, for `pages` pages of a block, and its length: at least 1, because a grid must not be empty."""
    tiles, width = blocks.iterations.shape[0], table.shape[1] * pages
    ends = jnp.cumsum(blocks.iterations)
    first = ends - blocks.iterations
    tile = jnp.repeat(jnp.arange(tiles), blocks.iterations, total_repeat_length=tiles * width)
    number = jnp.clip(jnp.arange(tiles * width) - first[tile], 0, width - 1)
    block = jnp.maximum(table[blocks.table_rows[tile], number // pages], 0)
    return Iterations(tile, block * pages + number % pages, first, blocks.iterations), jnp.maximum(ends[-1], 1)


def _cache_specs(cache: Cache, slots: int, per_head: int) -> list[pl.BlockSpec]:
    """Which page of each cached array an iteration reads."""

    def spec(shape: tuple[int, ...], axis: int) -> pl.BlockSpec:
        """`slots` slots along `axis`, of one block and, if the array has heads, of one head."""
        ndim, pages = len(shape), shape[axis] // slots

        def index(head: jax.Array, item: jax.Array, _: Any, iterations: Iterations) -> tuple[Any, ...]:
            page = iterations.page[item]
            indices = [*(div(page, pages), 0, div(head, per_head))[: ndim - 2], 0, 0]
            indices[axis] = rem(page, pages)
            return tuple(indices)

        sizes = list(shape[-2:])
        sizes[axis - ndim] = slots
        return pl.BlockSpec((*[None] * (ndim - 2), *sizes), index)

    if isinstance(cache, LatentCache):
        return [spec(cache.latents.shape, axis=2)]
    return [spec(cache.keys.shape, axis=4), spec(cache.values.shape, axis=3)]


def _kernel(
    rank: Any, iterations: Iterations, limits: Any, q: Any, *refs: Any, geometry: CacheGeometry, slots: int
) -> None:
    """One iteration of one tile. `refs`: keys and values, or latents; then out, lse and the running softmax."""
    *stored, out, lse, sums, max_score, exp_sum = refs
    tile, pages = iterations.tile[pl.program_id(1)], geometry.slots // slots
    number = pl.program_id(1) - iterations.first[tile]

    @pl.when(number == 0)
    def _start() -> None:
        (sums[...],), max_score[...], exp_sum[...] = empty_state(*sums.shape)

    slot_positions = positions(div(number, pages), rem(number, pages) * slots, slots, geometry, rank[0])
    loaded = Slots((stored[0][...],), (stored[-1][...],), 2 - len(stored), *slot_positions)
    state = fold(SoftmaxState((sums[...],), max_score[...], exp_sum[...]), (q[...],), loaded, limits[...])
    (sums[...],), max_score[...], exp_sum[...] = state

    @pl.when(number == iterations.count[tile] - 1)
    def _finish() -> None:
        (out[...],), lse[...] = finish(state)
