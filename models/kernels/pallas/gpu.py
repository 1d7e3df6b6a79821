"""Paged attention on GPUs: a Pallas kernel for Triton.

A program takes one block of rows and one span of its request's slots, loads some of them per iteration and keeps the
running softmax in registers. The slots of a decoding request are cut into spans, so that a few requests fill the
device (split-K); the partials of the spans are merged afterwards. The ends of the spans depend on the width of the
block table alone, so a request's result does not depend on the other requests.
"""

from collections.abc import Sequence
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.lax import div, rem  # for numbers that are not negative: no code that rounds down

from dcpjax.models.attention.work import Work
from dcpjax.models.kernels.pallas.blocks import (
    RowBlocks,
    Slots,
    SoftmaxState,
    empty_state,
    finish,
    fold,
    positions,
    product_dtype,
)
from dcpjax.models.kv_cache import Cache, CacheGeometry
from dcpjax.sharding.merge import Partial, weight

MIN_SIDE = 16  # the smallest side of a matrix product in Triton
SPAN_SLOTS, MAX_SPANS = 1024, 16  # a shorter span costs more than it saves; each span stores its own output


def suits(cache: Cache, _: Work, geometry: CacheGeometry) -> bool:
    """Whether slots and features are multiples of 16: they are loaded in powers of two, of at least 16."""
    return cache.value_dim % MIN_SIDE == 0 and geometry.slots % MIN_SIDE == 0


def rows_per_block(rows: int, cache: Cache) -> int:
    """Rows of a block: few enough that the running softmax stays in registers."""
    return min(_longest_side(cache), max(MIN_SIDE, pl.next_power_of_2(rows)))


def slots_per_iteration(cache: Cache, geometry: CacheGeometry) -> int:
    """S: the largest power of two that divides a block and lets keys and values stay on the chip."""
    return min(_longest_side(cache), geometry.slots & -geometry.slots)


def _longest_side(cache: Cache) -> int:
    """Of a matrix product whose operands ptxas fits into the registers of sm_80 and sm_90a.

    float32 does not use the matrix units and needs more registers.
    """
    side, features = (64, 256) if product_dtype(cache) == jnp.bfloat16 else (32, 64)
    return side if cache.value_dim <= features else side // 2


def attend(
    blocks: RowBlocks, cache: Cache, table: jax.Array, geometry: CacheGeometry, rank: jax.Array, interpret: bool
) -> Partial:
    """The blocks of I tiles -> out [I, blocks, rows, Y], lse [I, blocks, rows]."""
    tiles, heads, rows, head_dim = blocks.queries.shape
    slots, per_head = slots_per_iteration(cache, geometry), blocks.per_head
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
    )(rank[None], blocks.table_rows, blocks.iterations, table, blocks.limits, blocks.queries, *leaves)
    return _merge_spans(out, lse)


def _kernel(
    rank: Any,
    table_rows: Any,
    iterations: Any,
    table: Any,
    limits: Any,
    q: Any,
    *refs: Any,
    geometry: CacheGeometry,
    slots: int,
    span: int,
    per_head: int,
) -> None:
    """One span of one block. `refs`: keys and values, or latents; then out and lse."""
    *stored, out, lse = refs
    tile, head, part = (pl.program_id(axis) for axis in range(3))
    queries, pieces = tuple(q[:, piece] for piece in _pieces(q.shape[1])), _pieces(out.shape[1])

    def iterate(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
        index, slot = div(number * slots, geometry.slots), rem(number * slots, geometry.slots)
        block = jnp.maximum(table[table_rows[tile], index], 0)
        keys, values = _load(stored, block, div(head, per_head), pl.ds(slot, slots))
        slot_positions = positions(index, slot, slots, geometry, rank[0])
        return fold(state, queries, Slots(keys, values, 2 - len(stored), *slot_positions), limits[...])

    stop = jnp.minimum((part + 1) * span, iterations[tile])
    empty = empty_state(q.shape[0], *(piece.stop - piece.start for piece in pieces))
    outs, lse[...] = finish(jax.lax.fori_loop(part * span, stop, iterate, empty))
    for piece, values in zip(pieces, outs, strict=True):
        out[:, piece] = values


def _spans(queries: int, slots: int, slots_per_iteration: int) -> tuple[int, int]:
    """Iterations of one span, and the number of spans of a whole row of the table.

    Prompts have one span, because their tiles fill the device.
    """
    iterations = slots // slots_per_iteration
    if queries > 1:
        return iterations, 1
    span = max(SPAN_SLOTS // slots_per_iteration, pl.cdiv(iterations, MAX_SPANS))
    return span, pl.cdiv(iterations, span)


def _pieces(features: int) -> list[slice]:
    """Slices whose sizes are powers of two, the largest first: 576 is 512 + 64."""
    pieces, start = [], 0
    while start < features:
        stop = start + (1 << (features - start).bit_length() - 1)
        pieces.append(slice(start, stop))
        start = stop
    return pieces


def _load(stored: Sequence[Any], block: jax.Array, head: jax.Array, slots: Any) -> Any:
    """Keys and values of some slots of a block, features in pieces."""
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
    """out [spans, I, blocks, rows, Y], lse [spans, I, blocks, rows, 1] -> the same without spans."""
    total = jax.nn.logsumexp(lse, axis=0)
    return Partial(jnp.sum(out * weight(lse, total[None]), axis=0), total[..., 0])
