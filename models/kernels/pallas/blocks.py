"""What both accelerator kernels use: queries laid out as blocks of rows, and the running softmax of one block.

A row is one query token of one head. The rows of a tile that read the same KV head are contiguous, token by token, so
that a kernel loads a key once for all of them. Two tokens, G = 3 query heads per KV head, blocks of 4 rows:

    block     |     0      |     1      |
    token     | 0  0  0  1 | 1  1  -  - |      - is padding, which sees no position
    head      | 0  1  2  0 | 1  2  -  - |

In an iteration a kernel loads the next slots of the request and folds them into the running softmax of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.attention.work import Tiles, Work
from dcpjax.models.kv_cache import Cache, CacheGeometry, decode
from dcpjax.models.matmul import matmul


class RowBlocks(NamedTuple):
    """The queries of I tiles. A tile has K * per_head blocks, those of a KV head next to each other."""

    queries: jax.Array  # [I, blocks, rows, D] in the dtype of the products
    limits: jax.Array  # [I, per_head, rows, 1] int32: last position that a row sees, -1 if it sees none
    tokens: jax.Array  # [I, Q] int32: token of the step, T for padding
    table_rows: jax.Array  # [I] int32: row of the block table
    iterations: jax.Array  # [I] int32: how often a kernel loads the next slots; 0 for padding

    @property
    def per_head(self) -> int:
        """Blocks of one KV head of a tile."""
        return self.limits.shape[1]


def split(
    q: jax.Array, cache: Cache, work: Work, tiles: Tiles, geometry: CacheGeometry, size: int, slots: int
) -> RowBlocks:
    """q [T, H, D] -> blocks of `size` rows, for a kernel that loads `slots` slots at a time."""
    live = jnp.arange(tiles.start.shape[0]) < tiles.count
    tokens = tiles.start[:, None] + jnp.arange(tiles.size)[None, :]
    in_tile = live[:, None] & (work.rows.at[tokens].get(mode="fill", fill_value=-1) == tiles.row[:, None])
    tokens = jnp.where(in_tile, tokens, q.shape[0])
    limits = work.positions.at[tokens].get(mode="fill", fill_value=-1)
    queries = q.at[tokens].get(mode="fill", fill_value=0.0).astype(product_dtype(cache))
    queries = queries.reshape(*tokens.shape, cache.kv_heads, -1, q.shape[2]).swapaxes(1, 2)  # [I, K, Q, G, D]
    limits = jnp.broadcast_to(limits[:, None, :, None, None], (*queries.shape[:1], 1, *queries.shape[2:4], 1))
    chunks = jnp.where(live, tiles.chunks, 0)
    iterations = -(-chunks * geometry.chunk_slots // slots)
    return RowBlocks(_to_blocks(queries, size, 0.0), _to_blocks(limits, size, -1), tokens, tiles.row, iterations)


def _to_blocks(x: jax.Array, size: int, padding: float) -> jax.Array:
    """[I, K, Q, G, features] -> [I, blocks, rows, features], `size` rows to a block."""
    tiles, kv_heads, queries, group, features = x.shape
    x = x.reshape(tiles, kv_heads, queries * group, features)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -queries * group % size), (0, 0)), constant_values=padding)
    return x.reshape(tiles, -1, size, features)


def scatter(into: jax.Array, x: jax.Array, tokens: jax.Array, kv_heads: int) -> jax.Array:
    """`into` [T, H, features] with a kernel's results x [I, blocks, rows, features] at their tokens; drops padding."""
    (tiles, queries), (_, heads, features) = tokens.shape, into.shape
    group = heads // kv_heads
    x = x.reshape(tiles, kv_heads, -1, features)[:, :, : queries * group]
    x = x.reshape(tiles, kv_heads, queries, group, features).swapaxes(1, 2)
    return into.at[tokens].set(x.reshape(tiles, queries, heads, features), mode="drop")


def product_dtype(cache: Cache) -> jnp.dtype:
    """The dtype of operands: that of the cache if matrix units take it, else float32. Sums are always float32."""
    (stored, *_) = jax.tree.leaves(cache)
    return jnp.dtype(jnp.bfloat16 if stored.dtype == jnp.bfloat16 else jnp.float32)


class SoftmaxState(NamedTuple):
    """Running softmax of one block. A row's Y values are split into pieces, the same as the kernel loads."""

    out: tuple[jax.Array, ...]  # [rows, piece] float32 each: sum of exp(score - max_score) * value
    max_score: jax.Array  # [rows, 1] float32: of the slots so far
    exp_sum: jax.Array  # [rows, 1] float32: sum of exp(score - max_score)


class Slots(NamedTuple):
    """S slots of one KV head as a kernel loaded them, features split into pieces."""

    keys: tuple[jax.Array, ...]  # [piece, S] each, or [S, piece] if the keys are the values (latents)
    values: tuple[jax.Array, ...]  # [S, piece] each
    key_axis: int  # axis of the features in `keys`
    position: jax.Array  # [1, S] int32
    position_column: jax.Array  # [S, 1] int32, the same


def empty_state(rows: int, *pieces: int) -> SoftmaxState:
    """The running softmax before any slot, with values in pieces of these sizes."""
    out = tuple(jnp.zeros((rows, piece), jnp.float32) for piece in pieces)
    return SoftmaxState(out, jnp.full((rows, 1), -jnp.inf, jnp.float32), jnp.zeros((rows, 1), jnp.float32))


def positions(
    index: jax.Array, slot: jax.Array, count: int, geometry: CacheGeometry, rank: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Positions of `count` slots from `slot` on, in the request's block number `index`: [1, count] and [count, 1]."""

    def along(axis: int, shape: tuple[int, int]) -> jax.Array:
        slots = slot + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        # unsigned: division needs no extra instructions for negative numbers
        return geometry.position(*(x.astype(jnp.uint32) for x in (index, rank, slots))).astype(jnp.int32)

    return along(1, (1, count)), along(0, (count, 1))


def fold(state: SoftmaxState, q: tuple[jax.Array, ...], slots: Slots, limits: jax.Array) -> SoftmaxState:
    """Add S slots to the running softmax (Milakov & Gimelshein 2018, algorithm 3).

    q [rows, piece] each, limits [rows, 1]. Values that no row sees are replaced by `where`, not multiplied by 0,
    because 0 * NaN is NaN. A value that some row sees may reach every row of the block as NaN: all rows belong to the
    same request, whose result is lost then anyway.
    """
    scores = sum(
        matmul(piece, to_product_dtype(key), (1, slots.key_axis)) for piece, key in zip(q, slots.keys, strict=True)
    )
    scores = jnp.where(slots.position <= limits, scores, -jnp.inf)
    max_score = jnp.maximum(state.max_score, jnp.max(scores, axis=1, keepdims=True))
    shift = jnp.where(max_score == -jnp.inf, 0.0, max_score)
    exp_scores, rescale = jnp.exp(scores - shift), jnp.exp(state.max_score - shift)
    seen = slots.position_column <= jnp.max(limits)
    values = [jnp.where(seen, to_product_dtype(value), 0) for value in slots.values]
    added = [matmul(exp_scores.astype(value.dtype), value, (1, 0)) for value in values]
    out = tuple(old * rescale + new for old, new in zip(state.out, added, strict=True))
    return SoftmaxState(out, max_score, state.exp_sum * rescale + jnp.sum(exp_scores, axis=1, keepdims=True))


def finish(state: SoftmaxState) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Running softmax -> out [rows, piece] each, lse [rows, 1]: 0 and -inf for a row that saw nothing."""
    none = state.exp_sum == 0.0
    exp_sum = jnp.where(none, 1.0, state.exp_sum)
    return tuple(out / exp_sum for out in state.out), jnp.where(none, -jnp.inf, state.max_score + jnp.log(exp_sum))


def to_product_dtype(stored: jax.Array) -> jax.Array:
    """Cached values as stored if they are bfloat16, which matrix units take, else as float32."""
    return stored if stored.dtype == jnp.bfloat16 else decode(stored)
