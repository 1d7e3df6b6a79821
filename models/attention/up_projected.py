"""Prompts under latent attention, with keys and values of every head where that takes fewer operations.

Absorbed attention (`mla`) multiplies C + R numbers for the score of a query, a position and a head, and C + R again
for its share of the value. Up-projected attention makes each position's X numbers of key and Y of value first, with
C * (X + Y) products for a head, and multiplies X + R and Y from there on. All queries of a tile share what was made,
so many of them gain and few of them lose; both give the same result. A tile of many goes through in pieces:

    tokens of the step   | d0 d1 | p0 p0 p0 p0 p0 p0 p0 p0 p0 p0 | p1 p1 p1 | -1 -1 -1 |
    tiles                |  0  1 | 0                             | 1        |               p0 is long, p1 is short
    pieces                       | 0           | 1           | 2 | 0        |

Each chunk of latents is up-projected once for a long tile and visited by those of its pieces that see it. Short
tiles and single tokens stay absorbed; W_uv, by which a result is linear, takes them to Y values before the merge.

Knows latents, tiles and slots; knows nothing about exchanges or weights of other kinds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.attention.dispatch import (
    choose_body,
)
from dcpjax.models.attention.softmax import (
    State,
    finish,
    fold,
    unseen,
)
from dcpjax.models.attention.work import (
    Runtime,
    Tiles,
    Work,
)
from dcpjax.models.config import MLAConfig
from dcpjax.models.kv_cache import CacheGeometry, Chunk, LatentCache, locate_chunk
from dcpjax.models.layers import head_dot
from dcpjax.models.matmul import matmul
from dcpjax.sharding.merge import Partial

PIECE = 256  # query tokens of a long tile that are folded together
SHORT_PIECE = 64  # of a short one
NEVER = 2**31 - 1


def fewest_queries(mla: MLAConfig) -> int:
    """The smallest tile for which up-projection takes fewer operations, per position and head:

        Q * (X + R + Y) + C * (X + Y) < Q * 2 * (C + R)

    Under DCP it is also about where less is exchanged: Q * (C - X + C - Y) fewer numbers of queries and results
    against C * (X + Y) of weights that a rank gathers.
    """
    saved = 2 * mla.cached_dim - mla.qk_dim - mla.value_dim
    return NEVER if saved <= 0 else mla.latent_rank * (mla.nope_dim + mla.value_dim) // saved + 1


def up_projects(work: Work, mla: MLAConfig, runtime: Runtime) -> bool:
    """Whether the step has tiles that are large enough. Known when it is traced; "gather" and "pallas" are absorbed."""
    if len(work.tiles) == 1 or runtime.attention_body not in ("auto", "loop"):
        return False
    return work.tiles[1].size >= fewest_queries(mla)


class UpProjection(NamedTuple):
    """From latents to the keys and values of H heads."""

    w_uk: jax.Array  # [H, X, C]
    w_uv: jax.Array  # [H, Y, C]
    scale: float  # of scores

    @property
    def latent_rank(self) -> int:
        return self.w_uk.shape[2]

    def raised(self) -> "UpProjection":
        """In float32, as attention multiplies."""
        return UpProjection(self.w_uk.astype(jnp.float32), self.w_uv.astype(jnp.float32), self.scale)

    def absorb(self, q: jax.Array) -> jax.Array:
        """[N, H, X + R] -> [N, H, C + R] scaled, to be compared with latents."""
        nope, rope = jnp.split(q, [self.w_uk.shape[1]], axis=-1)
        return jnp.concatenate([head_dot(nope, self.w_uk), rope], axis=-1) * self.scale

    def values_of(self, out: jax.Array) -> jax.Array:
        """Attention over latents [N, H, C + R] -> [N, H, Y]."""
        return head_dot(out[..., : self.latent_rank], self.w_uv.swapaxes(1, 2))

    def project(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A chunk as cached, [1, C + R, S] and [1, S, C + R] -> keys [H, X + R, S] scaled, values [H, S, Y].

        A slot's numbers mix with no other slot's, so what nobody may see can still be selected away by slot.
        """
        latents, rope = jnp.split(keys[0], [self.latent_rank])
        heads, slots = self.w_uk.shape[0], latents.shape[1]
        nope = matmul(self.w_uk.reshape(-1, self.latent_rank), latents, (1, 0)).reshape(heads, -1, slots)
        rope = jnp.broadcast_to(rope[None], (heads, *rope.shape))
        raised = matmul(values[0, :, : self.latent_rank], self.w_uv.reshape(-1, self.latent_rank), (1, 1))
        return jnp.concatenate([nope, rope], axis=1) * self.scale, raised.reshape(slots, heads, -1).swapaxes(0, 1)


def prompt_partial(
    q: jax.Array,
    cache: LatentCache,
    work: Work,
    geometry: CacheGeometry,
    rank: jax.Array,
    *,
    up: UpProjection,
    mla: MLAConfig,
    runtime: Runtime,
) -> Partial:
    """`paged_partial` for queries and results of the heads' own dimensions, decodes beside prompts.

    Per device: q [N, H, X + R] (not scaled) -> out [N, H, Y], lse [N, H]. The step's first group
    of tiles are single tokens, for which `choose_body` chooses.
    """
    single, many = work.tiles
    step = _Step(q.swapaxes(0, 1)[:, :, None], cache, work, geometry, rank, up, up.raised())
    out, lse = _on_cpu(q, many, step, mla, runtime) or step.partial(many, fewest_queries(mla))
    index, alone = _single_tokens(q, single, step, runtime)
    return Partial(out.at[index].set(alone.out, mode="drop"), lse.at[index].set(alone.lse, mode="drop"))


def _on_cpu(q: jax.Array, tiles: Tiles, step: "_Step", mla: MLAConfig, runtime: Runtime) -> Partial | None:
    """`_Step.partial` by a kernel, None where there is none."""
    if runtime.attention_body != "auto" or runtime.place.platform != "cpu":
        return None
    # here, not above, as in `choose_body`
    from dcpjax.models.kernels.cpu.attention_calls import prompt_partial_numba, suits_prompts

    up = step.raised
    if not suits_prompts(step.cache, step.geometry, up.w_uk, up.w_uv):
        return None
    where, own = (step.cache, step.work, tiles, step.geometry, step.rank), (up.w_uk, up.w_uv)
    fewest, parallel = fewest_queries(mla), runtime.place.single_cpu
    return prompt_partial_numba(q * up.scale, *where, *own, fewest=fewest, parallel=parallel)


def _single_tokens(q: jax.Array, tiles: Tiles, step: "_Step", runtime: Runtime) -> tuple[jax.Array, Partial]:
    """Which tokens of the step are alone [R], N where there is none, and their partial."""
    work, up, count = step.work, step.up, tiles.start.shape[0]
    index = jnp.where(jnp.arange(count) < tiles.count, tiles.start, q.shape[0])
    positions, rows = (x.at[index].get(mode="fill", fill_value=-1) for x in (work.positions, work.rows))
    own = Work(positions, rows, work.block_table, (tiles.replace(start=jnp.arange(count)),))  # type: ignore[attr-defined]
    queries = up.absorb(q.at[index].get(mode="fill", fill_value=0.0))
    out, lse = choose_body(step.cache, own, runtime)(queries, step.cache, own, step.geometry, step.rank)
    return index, Partial(up.values_of(out), lse)


class _Tile(NamedTuple):
    """Where one tile lies."""

    start: jax.Array  # [] int32: its first token in the step
    row: jax.Array  # [] int32, of the block table
    chunks: jax.Array  # [] int32, to visit
    tokens: jax.Array  # [] int32: how many it has
    size: int  # most tokens it may have


class _Step(NamedTuple):
    """What all tiles read. A running softmax is [H, N, 1] of the whole step: each token is in one tile."""

    q: jax.Array  # [H, N, 1, X + R]
    cache: LatentCache
    work: Work
    geometry: CacheGeometry
    rank: jax.Array
    up: UpProjection
    raised: UpProjection

    def partial(self, tiles: Tiles, fewest: int) -> Partial:
        """All tiles: out [N, H, Y], lse [N, H]; tokens of none get 0 and -inf."""
        heads, tokens, *_ = self.q.shape
        state = unseen((heads, tokens, 1), self.up.w_uv.shape[1])
        out, lse = finish(jax.lax.fori_loop(0, tiles.count, self.visitor(tiles, fewest), state))
        return Partial(out[:, :, 0].swapaxes(0, 1), lse[:, :, 0].T)

    def visitor(self, tiles: Tiles, fewest: int) -> Callable[[jax.Array, State], State]:
        """Folds tile number i into the state, up-projected if it has at least `fewest` tokens."""

        def visit(number: jax.Array, state: State) -> State:
            tile = self.tile(tiles, number)
            long = tile.tokens >= fewest
            # one of the two has work: a conditional would copy the state
            state = self.absorbed(state, tile._replace(tokens=jnp.where(long, 0, tile.tokens)))
            return self.up_projected(state, tile._replace(chunks=jnp.where(long, tile.chunks, 0)))

        return visit

    def tile(self, tiles: Tiles, number: jax.Array) -> _Tile:
        start, row = tiles.start[number], tiles.row[number]
        index = jnp.arange(self.work.rows.shape[0])
        mine = (self.work.rows == row) & (index >= start) & (index < start + tiles.size)
        return _Tile(start, row, tiles.chunks[number], jnp.sum(mine, dtype=jnp.int32), tiles.size)

    def up_projected(self, state: State, tile: _Tile) -> State:
        size = min(PIECE, tile.size)

        def visit_chunk(chunk: jax.Array, state: State) -> State:
            where = self.locate(tile, chunk)
            keys, values = self.raised.project(*self.cache.read(where))

            def visit_piece(number: jax.Array, state: State) -> State:
                first, limits = self.limits(tile, number, size)
                seen = where.positions[None, :] <= limits[:, None]
                new = fold(_window(state, first, size), _slice(self.q, first, size), keys, values, seen)
                return _replace(state, new, first)

            # as rank 0 has it: every rank's loop turns as often
            earliest = where.positions[0] - self.rank * self.geometry.interleave
            unseeing = jnp.maximum(earliest - self.work.positions[tile.start], 0) // size
            return jax.lax.fori_loop(unseeing, _ceil(tile.tokens, size), visit_piece, state)

        return jax.lax.fori_loop(0, tile.chunks, visit_chunk, state)

    def absorbed(self, state: State, tile: _Tile) -> State:
        size = min(SHORT_PIECE, tile.size)

        def visit_piece(number: jax.Array, state: State) -> State:
            first, limits = self.limits(tile, number, size)
            queries = self.up.absorb(_slice(self.q, first, size)[:, :, 0].swapaxes(0, 1))[None]

            def visit_chunk(chunk: jax.Array, own: State) -> State:
                where = self.locate(tile, chunk)
                return fold(own, queries, *self.cache.read(where), where.positions[None, :] <= limits[:, None])

            none = unseen(queries.shape[:-1], self.cache.value_dim)
            out, top, total = (x[0] for x in jax.lax.fori_loop(0, tile.chunks, visit_chunk, none))
            new = State(*(x.swapaxes(0, 1)[:, :, None] for x in (self.up.values_of(out), top, total)))
            return _replace(state, _select(limits >= 0, new, _window(state, first, size)), first)

        return jax.lax.fori_loop(0, _ceil(tile.tokens, size), visit_piece, state)

    def limits(self, tile: _Tile, number: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """A window of `size` tokens with a piece of the tile in it: its first, and the last position that each sees.

        It is -1 for those of other pieces and tiles, which the window may hold: it never reaches past the step.
        """
        begin = tile.start + number * size
        first = jnp.minimum(begin, self.work.rows.shape[0] - size)
        index = first + jnp.arange(size)
        mine = (index >= begin) & (index < tile.start + tile.tokens)
        return first, jnp.where(mine, jax.lax.dynamic_slice_in_dim(self.work.positions, first, size), -1)

    def locate(self, tile: _Tile, chunk: jax.Array) -> Chunk:
        return locate_chunk(self.work.block_table, tile.row, chunk, self.geometry, self.rank)


def _ceil(count: jax.Array, size: int) -> jax.Array:
    return (count + size - 1) // size


def _slice(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=1, allow_negative_indices=False)


def _window(state: State, first: jax.Array, size: int) -> State:
    return State(*(_slice(x, first, size) for x in state))


def _replace(state: State, new: State, first: jax.Array) -> State:
    return State(*(jax.lax.dynamic_update_slice_in_dim(x, y, first, axis=1) for x, y in zip(state, new, strict=True)))


def _select(mine: jax.Array, new: State, kept: State) -> State:
    """By token [Q], of states [H, Q, 1]."""
    pairs = zip(new, kept, strict=True)
    return State(*(jnp.where(jnp.expand_dims(mine, (0, *range(2, x.ndim))), x, y) for x, y in pairs))
