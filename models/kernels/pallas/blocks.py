"""What the accelerator kernels share: queries laid out as blocks of rows, and the running softmax of one block.

A row is one query of one head. The rows of a tile that read the same KV head lie together, token by token, so that
a kernel loads a slot's key once for all of them. Two tokens, G = 3 query heads to a KV head, blocks of M = 4 rows:

    block     |     0      |     1      |
    token     | 0  0  0  1 | 1  1  -  - |      - is padding, which sees no position
    head      | 0  1  2  0 | 1  2  -  - |

Knows tiles and slots; knows nothing about grids, memories or devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.attention.work import Tiles, Work
from dcpjax.models.kv_cache import Cache, CacheGeometry, decode
from dcpjax.models.matmul import matmul


class Blocks(NamedTuple):
    """The queries of T tiles, each K KV heads times B blocks of M rows. J = K * B, the KV head first."""

    queries: jax.Array  # [T, J, M, D] in the dtype that is multiplied
    limits: jax.Array  # [T, B, M, 1] int32: last position that a row sees, -1 where it sees none
    tokens: jax.Array  # [T, Q] int32: token of the step, N where there is none
    rows: jax.Array  # [T] int32: row of the block table
    turns: jax.Array  # [T] int32: how often a kernel loads the next slots; 0 for padding

    @property
    def per_head(self) -> int:
        return self.limits.shape[1]


def split(
    q: jax.Array, cache: Cache, work: Work, tiles: Tiles, geometry: CacheGeometry, size: int, slots: int
) -> Blocks:
    """q [N, H, D] -> blocks of `size` rows, for a kernel that loads `slots` slots at a time."""
    live = jnp.arange(tiles.start.shape[0]) < tiles.count
    tokens = tiles.start[:, None] + jnp.arange(tiles.size)[None, :]
    mine = live[:, None] & (work.rows.at[tokens].get(mode="fill", fill_value=-1) == tiles.row[:, None])
    tokens = jnp.where(mine, tokens, q.shape[0])
    limits = work.positions.at[tokens].get(mode="fill", fill_value=-1)
    queries = q.at[tokens].get(mode="fill", fill_value=0.0).astype(multiplied(cache))
    queries = queries.reshape(*tokens.shape, cache.kv_heads, -1, q.shape[2]).swapaxes(1, 2)  # [T, K, Q, G, D]
    limits = jnp.broadcast_to(limits[:, None, :, None, None], (*queries.shape[:1], 1, *queries.shape[2:4], 1))
    chunks = jnp.where(live, tiles.chunks, 0)
    turns = -(-chunks * geometry.chunk_slots // slots)
    return Blocks(_to_blocks(queries, size, 0.0), _to_blocks(limits, size, -1), tokens, tiles.row, turns)


def _to_blocks(x: jax.Array, size: int, padding: float) -> jax.Array:
    """[T, K, Q, G, X] -> [T, J, M, X]."""
    tiles, kv_heads, queries, group, features = x.shape
    x = x.reshape(tiles, kv_heads, queries * group, features)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -queries * group % size), (0, 0)), constant_values=padding)
    return x.reshape(tiles, -1, size, features)


def scatter(into: jax.Array, x: jax.Array, tokens: jax.Array, kv_heads: int) -> jax.Array:
    """Put a kernel's [T, J, M, X] where its tokens belong in [N, H, X]; padding is dropped."""
    (tiles, queries), (_, heads, features) = tokens.shape, into.shape
    group = heads // kv_heads
    x = x.reshape(tiles, kv_heads, -1, features)[:, :, : queries * group]
    x = x.reshape(tiles, kv_heads, queries, group, features).swapaxes(1, 2)
    return into.at[tokens].set(x.reshape(tiles, queries, heads, features), mode="drop")


def multiplied(cache: Cache) -> jnp.dtype:
    """The dtype of products, as stored where the matrix units take it. Sums are float32 in any case."""
    (stored, *_) = jax.tree.leaves(cache)
    return jnp.dtype(jnp.bfloat16 if stored.dtype == jnp.bfloat16 else jnp.float32)


class State(NamedTuple):
    """Running softmax of one block of M rows. The Y values of a row lie in pieces, as the kernel loads them."""

    out: tuple[jax.Array, ...]  # [M, Y'] float32 each, not yet divided by `total`
    top: jax.Array  # [M, 1] float32, largest score so far
    total: jax.Array  # [M, 1] float32, sum of exp(score - top)


class Slots(NamedTuple):
    """S slots of one KV head as a kernel loaded them, features in pieces."""

    keys: tuple[jax.Array, ...]  # [D', S] each, or [S, D'] where the keys are the values
    values: tuple[jax.Array, ...]  # [S, Y'] each
    key_axis: int  # of the features
    position: jax.Array  # [1, S] int32
    position_column: jax.Array  # [S, 1] int32, the same


def empty(rows: int, *pieces: int) -> State:
    out = tuple(jnp.zeros((rows, piece), jnp.float32) for piece in pieces)
    return State(out, jnp.full((rows, 1), -jnp.inf, jnp.float32), jnp.zeros((rows, 1), jnp.float32))


def positions(
    index: jax.Array, slot: jax.Array, count: int, geometry: CacheGeometry, rank: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Positions of `count` slots from `slot` on, of block `index` of the table, as a row and as a column."""

    def along(axis: int, shape: tuple[int, int]) -> jax.Array:
        slots = slot + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        # unsigned: without the instructions that floor a negative quotient
        return geometry.position(*(x.astype(jnp.uint32) for x in (index, rank, slots))).astype(jnp.int32)

    return along(1, (1, count)), along(0, (count, 1))


def fold(state: State, q: tuple[jax.Array, ...], slots: Slots, limits: jax.Array) -> State:
    """Fold S slots into the running softmax (Milakov & Gimelshein 2018, algorithm 3).

    q [M, D'] each, limits [M, 1]. What no row sees is selected away, not multiplied: 0 * NaN is NaN. A value that
    some row sees is trusted to be finite: it belongs to the same request, which a NaN of its own has spoilt.
    """
    scores = sum(matmul(piece, decoded(key), (1, slots.key_axis)) for piece, key in zip(q, slots.keys, strict=True))
    scores = jnp.where(slots.position <= limits, scores, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1, keepdims=True))
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    shares, keep = jnp.exp(scores - shift), jnp.exp(state.top - shift)
    seen = slots.position_column <= jnp.max(limits)
    values = [jnp.where(seen, decoded(value), 0) for value in slots.values]
    gained = [matmul(shares.astype(value.dtype), value, (1, 0)) for value in values]
    out = tuple(old * keep + new for old, new in zip(state.out, gained, strict=True))
    return State(out, top, state.total * keep + jnp.sum(shares, axis=1, keepdims=True))


def finish(state: State) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Running softmax -> out [M, Y'] each, lse [M, 1]: 0 and -inf for a row that saw nothing."""
    none = state.total == 0.0
    total = jnp.where(none, 1.0, state.total)
    return tuple(out / total for out in state.out), jnp.where(none, -jnp.inf, state.top + jnp.log(total))


def decoded(stored: jax.Array) -> jax.Array:
    """As stored where the matrix units take it, else raised to float32."""
    return stored if stored.dtype == jnp.bfloat16 else decode(stored)
