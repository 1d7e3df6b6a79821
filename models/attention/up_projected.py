"""Latent attention of prompts, with keys and values of every head where that takes fewer operations.

Absorbed attention (see `mla`) takes C + R multiplications per query, position and head for the score, and C + R for
the value. Up-projected attention first computes the position's key (X numbers) and value (Y numbers) of each head from
its latent, C * (X + Y) multiplications, and then takes X + R for a score and Y for a value. All queries of a tile use
the same keys and values, so large tiles are faster that way and small ones slower; both give the same result. A large
tile is processed in pieces:

    tokens of the step   | d0 d1 | p0 p0 p0 p0 p0 p0 p0 p0 p0 p0 | p1 p1 p1 | -1 -1 -1 |
    tiles                |  0  1 | 0                             | 1        |               p0 is long, p1 is short
    pieces                       | 0           | 1           | 2 | 0        |

Each chunk of latents is up-projected once per large tile, then folded into those of its pieces that see it. Small
tiles and single tokens stay absorbed; W_uv takes their results to Y values before the merge, which a linear map may.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.attention.dispatch import choose_attention
from dcpjax.models.attention.softmax import (
    SoftmaxState,
    empty_state,
    finish,
    fold,
    select_state,
    set_state_window,
    state_window,
    window,
)
from dcpjax.models.attention.work import Runtime, Tiles, Work
from dcpjax.models.config import MLAConfig
from dcpjax.models.kv_cache import CacheGeometry, Chunk, LatentCache, locate_chunk
from dcpjax.models.layers import head_dot
from dcpjax.models.matmul import matmul
from dcpjax.sharding.merge import Partial

PIECE = 256  # query tokens of an up-projected tile that are folded together
ABSORBED_PIECE = 64  # the same, of an absorbed tile
NEVER = 2**31 - 1


def up_projection_threshold(mla: MLAConfig) -> int:
    """The smallest number of query tokens Q for which up-projection takes fewer operations, per position and head:

        Q * (X + R + Y) + C * (X + Y) < Q * 2 * (C + R)

    With dcp ranks, this is also near the number from which less is exchanged: Q * (C - X + C - Y) numbers less of
    queries and results, against C * (X + Y) more of weights that a rank gathers.
    """
    saved = 2 * mla.cached_dim - mla.qk_dim - mla.value_dim
    return NEVER if saved <= 0 else mla.latent_rank * (mla.nope_dim + mla.value_dim) // saved + 1


def uses_up_projection(work: Work, mla: MLAConfig, runtime: Runtime) -> bool:
    """Whether the step may have tiles that are large enough: their largest size is known when the step is traced.

    The bodies "gather" and "pallas" have only the absorbed form.
    """
    if work.tiles[-1].size == 1 or runtime.attention_body not in ("auto", "loop"):
        return False
    return work.tiles[-1].size >= up_projection_threshold(mla)


class UpProjection(NamedTuple):
    """The matrices from latents to the keys and values of H heads."""

    w_uk: jax.Array  # [H, X, C]
    w_uv: jax.Array  # [H, Y, C]
    scale: float  # factor of the scores

    @property
    def latent_rank(self) -> int:
        return self.w_uk.shape[2]

    def to_float32(self) -> "UpProjection":
        """In float32, in which attention multiplies."""
        return UpProjection(self.w_uk.astype(jnp.float32), self.w_uv.astype(jnp.float32), self.scale)

    def absorb(self, q: jax.Array) -> jax.Array:
        """Queries [T, H, X + R] -> [T, H, C + R], scaled, whose products with latents are scores."""
        nope, rope = jnp.split(q, [self.w_uk.shape[1]], axis=-1)
        return jnp.concatenate([head_dot(nope, self.w_uk), rope], axis=-1) * self.scale

    def values_of(self, out: jax.Array) -> jax.Array:
        """Results of attention over latents [T, H, C + R] -> [T, H, Y]."""
        return head_dot(out[..., : self.latent_rank], self.w_uv.swapaxes(1, 2))

    def project(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A chunk as cached, [1, C + R, S] and [1, S, C + R] -> keys [H, X + R, S] scaled, values [H, S, Y].

        Each slot's result depends on that slot alone, so masking by slot still works afterwards.
        """
        latents, rope = jnp.split(keys[0], [self.latent_rank])
        heads, slots = self.w_uk.shape[0], latents.shape[1]
        nope = matmul(self.w_uk.reshape(-1, self.latent_rank), latents, (1, 0)).reshape(heads, -1, slots)
        rope = jnp.broadcast_to(rope[None], (heads, *rope.shape))
        heads_values = matmul(values[0, :, : self.latent_rank], self.w_uv.reshape(-1, self.latent_rank), (1, 1))
        return jnp.concatenate([nope, rope], axis=1) * self.scale, heads_values.reshape(slots, heads, -1).swapaxes(0, 1)


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
    """Attention over this rank's slots as by `paged_partial`, but with queries and results as the heads have them.

    Per device: q [T, H, X + R] (not scaled) -> out [T, H, Y], lse [T, H]. If the step's tiles are in two groups, the
    first holds single tokens, which are absorbed and attend by the function that `choose_attention` returns.
    """
    *single, many = work.tiles
    step = _StepInputs(q.swapaxes(0, 1)[:, :, None], cache, work, geometry, rank, up, up.to_float32())
    out, lse = _on_cpu(q, many, step, mla, runtime) or step.partial(many, up_projection_threshold(mla))
    for tiles in single:
        index, alone = _single_tokens(q, tiles, step, runtime)
        out, lse = out.at[index].set(alone.out, mode="drop"), lse.at[index].set(alone.lse, mode="drop")
    return Partial(out, lse)


def _on_cpu(q: jax.Array, tiles: Tiles, step: "_StepInputs", mla: MLAConfig, runtime: Runtime) -> Partial | None:
    """`_StepInputs.partial` by a kernel; None if there is none for this step."""
    if runtime.attention_body != "auto" or runtime.place.platform != "cpu":
        return None
    # here, not above, as in `choose_attention`
    from dcpjax.models.kernels.cpu.attention_calls import prompt_partial_on_cpu, suits_prompts

    up = step.up_float32
    if not suits_prompts(step.cache, step.geometry, up.w_uk, up.w_uv):
        return None
    where, own = (step.cache, step.work, tiles, step.geometry, step.rank), (up.w_uk, up.w_uv)
    fewest, parallel = up_projection_threshold(mla), runtime.place.single_cpu
    return prompt_partial_on_cpu(q * up.scale, *where, *own, fewest=fewest, parallel=parallel)


def _single_tokens(q: jax.Array, tiles: Tiles, step: "_StepInputs", runtime: Runtime) -> tuple[jax.Array, Partial]:
    """The tokens that are tiles of their own: their indices in the step [I], T for padding, and their partial."""
    work, up, count = step.work, step.up, tiles.start.shape[0]
    index = jnp.where(jnp.arange(count) < tiles.count, tiles.start, q.shape[0])
    positions, rows = (x.at[index].get(mode="fill", fill_value=-1) for x in (work.positions, work.rows))
    own = Work(positions, rows, work.block_table, (replace(tiles, start=jnp.arange(count)),))
    queries = up.absorb(q.at[index].get(mode="fill", fill_value=0.0))
    out, lse = choose_attention(step.cache, own, runtime)(queries, step.cache, own, step.geometry, step.rank)
    return index, Partial(up.values_of(out), lse)


class _Tile(NamedTuple):
    """One entry of `Tiles` and its number of tokens."""

    start: jax.Array  # [] int32: index of its first token in the step
    row: jax.Array  # [] int32: of the block table
    chunks: jax.Array  # [] int32: to visit
    tokens: jax.Array  # [] int32
    size: int  # the most tokens that a tile of this group may have


class _StepInputs(NamedTuple):
    """What all tiles of a step read. The running softmax of the step is [H, T, 1]: each token is in one tile."""

    q: jax.Array  # [H, T, 1, X + R]
    cache: LatentCache
    work: Work
    geometry: CacheGeometry
    rank: jax.Array
    up: UpProjection
    up_float32: UpProjection

    def partial(self, tiles: Tiles, fewest: int) -> Partial:
        """Attention of all tiles: out [T, H, Y], lse [T, H]; tokens outside the tiles get 0 and -inf."""
        heads, tokens, *_ = self.q.shape
        state = empty_state((heads, tokens, 1), self.up.w_uv.shape[1])
        out, lse = finish(jax.lax.fori_loop(0, tiles.count, self.attend_tile(tiles, fewest), state))
        return Partial(out[:, :, 0].swapaxes(0, 1), lse[:, :, 0].T)

    def attend_tile(self, tiles: Tiles, fewest: int) -> Callable[[jax.Array, SoftmaxState], SoftmaxState]:
        """A loop body that attends tile number i, up-projected if it has at least `fewest` tokens, else absorbed."""

        def attend(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
            tile = self.tile(tiles, number)
            large = tile.tokens >= fewest
            # one of these two has nothing to do; a conditional would copy the state
            state = self.absorbed(state, tile._replace(tokens=jnp.where(large, 0, tile.tokens)))
            return self.up_projected(state, tile._replace(chunks=jnp.where(large, tile.chunks, 0)))

        return attend

    def tile(self, tiles: Tiles, number: jax.Array) -> _Tile:
        start, row = tiles.start[number], tiles.row[number]
        index = jnp.arange(self.work.rows.shape[0])
        in_tile = (self.work.rows == row) & (index >= start) & (index < start + tiles.size)
        return _Tile(start, row, tiles.chunks[number], jnp.sum(in_tile, dtype=jnp.int32), tiles.size)

    def up_projected(self, state: SoftmaxState, tile: _Tile) -> SoftmaxState:
        size = min(PIECE, tile.size)

        def fold_chunk(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
            chunk = self.locate(tile, number)
            keys, values = self.up_float32.project(*self.cache.read(chunk))

            def fold_into_piece(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
                first, limits = self.limits(tile, number, size)
                seen = chunk.positions[None, :] <= limits[:, None]
                queries, piece = window(self.q, first, size, axis=1), state_window(state, first, size, axis=1)
                return set_state_window(state, fold(piece, queries, keys, values, seen), first, axis=1)

            # pieces before this one see nothing of the chunk; counted for rank 0, so that all ranks loop as often
            earliest = chunk.positions[0] - self.rank * self.geometry.interleave
            first_piece = jnp.maximum(earliest - self.work.positions[tile.start], 0) // size
            return jax.lax.fori_loop(first_piece, _ceil(tile.tokens, size), fold_into_piece, state)

        return jax.lax.fori_loop(0, tile.chunks, fold_chunk, state)

    def absorbed(self, state: SoftmaxState, tile: _Tile) -> SoftmaxState:
        size = min(ABSORBED_PIECE, tile.size)

        def attend_piece(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
            first, limits = self.limits(tile, number, size)
            queries = self.up.absorb(window(self.q, first, size, axis=1)[:, :, 0].swapaxes(0, 1))[None]

            def fold_chunk(number: jax.Array, piece: SoftmaxState) -> SoftmaxState:
                chunk = self.locate(tile, number)
                return fold(piece, queries, *self.cache.read(chunk), chunk.positions[None, :] <= limits[:, None])

            empty = empty_state(queries.shape[:-1], self.cache.value_dim)
            out, *sums = (x[0] for x in jax.lax.fori_loop(0, tile.chunks, fold_chunk, empty))
            new = SoftmaxState(*(x.swapaxes(0, 1)[:, :, None] for x in (self.up.values_of(out), *sums)))
            new = select_state(limits >= 0, new, state_window(state, first, size, axis=1), axis=1)
            return set_state_window(state, new, first, axis=1)

        return jax.lax.fori_loop(0, _ceil(tile.tokens, size), attend_piece, state)

    def limits(self, tile: _Tile, number: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """A window of `size` tokens that holds a piece of the tile: its first token, and the last position each sees.

        The window never reaches past the step's end, so it may begin before the piece. The position is -1 for tokens
        of other pieces and tiles.
        """
        begin = tile.start + number * size
        first = jnp.minimum(begin, self.work.rows.shape[0] - size)
        index = first + jnp.arange(size)
        in_piece = (index >= begin) & (index < tile.start + tile.tokens)
        return first, jnp.where(in_piece, jax.lax.dynamic_slice_in_dim(self.work.positions, first, size), -1)

    def locate(self, tile: _Tile, chunk: jax.Array) -> Chunk:
        return locate_chunk(self.work.block_table, tile.row, chunk, self.geometry, self.rank)


def _ceil(count: jax.Array, size: int) -> jax.Array:
    return (count + size - 1) // size
