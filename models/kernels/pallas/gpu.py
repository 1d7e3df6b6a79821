"""Paged attention on GPUs: a Pallas kernel for Triton.

A program takes one block of rows and one span of its request's slots, loads some of them at a time and keeps the
running softmax in registers. The slots of a decoding request are cut into spans, so that a few requests fill the
device (split-K); the partials of the spans are merged afterwards. Where a span ends depends on the width of the
block table alone: a request's result does not depend on its neighbours.

Knows blocks of rows and one rank's cache; knows nothing about a step's tokens or the other ranks.
"""

from collections.abc import Sequence
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.lax import div, rem  # whole and rest of numbers that are never negative: no floor

from dcpjax.models.attention.work import Work
from dcpjax.models.kernels.pallas.blocks import Blocks, Slots, State, empty, finish, fold, multiplied, positions
from dcpjax.models.kv_cache import Cache, CacheGeometry
from dcpjax.sharding.merge import Partial, weight

LEAST = 16  # the smallest side of a matrix product in Triton
SPAN_SLOTS, MAX_SPANS = 1024, 16  # a shorter span is not worth its merge; every span holds a copy of the output


def suits(cache: Cache, _: Work, geometry: CacheGeometry) -> bool:
    """Whether slots and features come in multiples of 16: they are loaded in powers of two, none smaller."""
    return cache.value_dim % LEAST == 0 and geometry.slots % LEAST == 0


def rows_per_block(rows: int, cache: Cache) -> int:
    """M: few enough that the running softmax stays in registers."""
    return min(_longest_side(cache), max(LEAST, pl.next_power_of_2(rows)))


def slots_per_turn(cache: Cache, geometry: CacheGeometry) -> int:
    """S: the largest power of two that divides a block, few enough that keys and values stay on chip."""
    return min(_longest_side(cache), geometry.slots & -geometry.slots)


def _longest_side(cache: Cache) -> int:
    """Of a matrix product whose operands ptxas fits into the registers of sm_80 and sm_90a.

    float32 does not go through the matrix units and needs more of them.
    """
    side, features = (64, 256) if multiplied(cache) == jnp.bfloat16 else (32, 64)
    return side if cache.value_dim <= features else side // 2


def attend(
    blocks: Blocks, cache: Cache, table: jax.Array, geometry: CacheGeometry, rank: jax.Array, interpret: bool
) -> Partial:
    """Blocks of T tiles -> out [T, J, M, Y], lse [T, J, M]."""
    tiles, heads, rows, head_dim = blocks.queries.shape
    slots, per_head = slots_per_turn(cache, geometry), blocks.per_head
    span, spans = _spans(blocks.tokens.shape[1], table.shape[1] * geometry.slots, slots)
    leaves, whole, sizes = jax.tree.leaves(cache), pl.BlockSpec(), (cache.value_dim, 1)
    out, lse = pl.pallas_call(
        bind(_kernel, geometry=geometry, slots=slots, span=span, per_head=per_head),
        grid=(tiles, heads, spans),
        in_specs=[
            *[whole] * 4,
            pl.BlockSpec((None, None, rows, 1), lambda tile, head, part: (tile, head % per_head, 0, 0)),
            pl.BlockSpec((None, None, rows, head_dim), lambda tile, head, part: (tile, head, 0, 0)),
            *[whole] * len(leaves),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, size), lambda tile, head, part: (part, tile, head, 0, 0))
            for size in sizes
        ],
        out_shape=[jax.ShapeDtypeStruct((spans, tiles, heads, rows, size), jnp.float32) for size in sizes],
        compiler_params=triton.CompilerParams(num_warps=4 if rows * head_dim <= 8192 else 8, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(rank[None], blocks.rows, blocks.turns, table, blocks.limits, blocks.queries, *leaves)
    return _merge_spans(out, lse)


def _kernel(
    rank: Any,
    rows: Any,
    turns: Any,
    table: Any,
    limits: Any,
    q: Any,
    *refs: Any,
    geometry: CacheGeometry,
    slots: int,
    span: int,
    per_head: int,
) -> None:
    """One span of one block of rows. `refs`: keys and values, or latents; out and lse."""
    *stored, out, lse = refs
    tile, head, part = (pl.program_id(axis) for axis in range(3))
    queries, pieces = tuple(q[:, piece] for piece in _pieces(q.shape[1])), _pieces(out.shape[1])

    def turn(number: jax.Array, state: State) -> State:
        index, slot = div(number * slots, geometry.slots), rem(number * slots, geometry.slots)
        block = jnp.maximum(table[rows[tile], index], 0)
        keys, values = _load(stored, block, div(head, per_head), pl.ds(slot, slots))
        where = positions(index, slot, slots, geometry, rank[0])
        return fold(state, queries, Slots(keys, values, 2 - len(stored), *where), limits[...])

    stop = jnp.minimum((part + 1) * span, turns[tile])
    none = empty(q.shape[0], *(piece.stop - piece.start for piece in pieces))
    outs, lse[...] = finish(jax.lax.fori_loop(part * span, stop, turn, none))
    for piece, values in zip(pieces, outs, strict=True):
        out[:, piece] = values


def _spans(queries: int, slots: int, slots_per_turn: int) -> tuple[int, int]:
    """Turns of one span, and how many spans cover the table: one for prompts, whose tiles fill the device."""
    turns = slots // slots_per_turn
    if queries > 1:
        return turns, 1
    span = max(SPAN_SLOTS // slots_per_turn, pl.cdiv(turns, MAX_SPANS))
    return span, pl.cdiv(turns, span)


def _pieces(features: int) -> list[slice]:
    """Features as powers of two, the largest first: 576 is 512 + 64."""
    pieces, start = [], 0
    while start < features:
        stop = start + (1 << (features - start).bit_length() - 1)
        pieces.append(slice(start, stop))
        start = stop
    return pieces


def _load(stored: Sequence[Any], block: jax.Array, head: jax.Array, slots: Any) -> Any:
    """Keys and values of some slots of a block, in pieces."""
    if len(stored) == 1:
        (latents,) = stored
        loaded = tuple(latents[block, 0, slots, piece] for piece in _pieces(latents.shape[3]))
        return loaded, loaded
    keys, values = stored
    return (
        tuple(keys[block, 0, head, piece, slots] for piece in _pieces(keys.shape[3])),
        tuple(values[block, 0, head, slots, piece] for piece in _pieces(values.shape[4])),
    )


def _merge_spans(out: jax.Array, lse: jax.Array) -> Partial:
    """out [Z, T, J, M, Y], lse [Z, T, J, M, 1] -> without Z."""
    total = jax.nn.logsumexp(lse, axis=0)
    return Partial(jnp.sum(out * weight(lse, total[None]), axis=0), total[..., 0])
