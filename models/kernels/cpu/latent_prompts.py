"""Attention of prompts over a paged latent cache, each head with its own keys and values; compiled by Numba.

A work item is one tile, the tokens of one request, and one head. For many tokens, chunks of latents are up-projected
to that head's keys and values. For few, the queries are absorbed instead and meet the latents themselves, as
`attention.up_projected` says. Items share nothing, so neither threads nor other requests change a bit.

    latents      of a chunk in float32, [S, C + R]
    transposed   the same as a Matrix [C + R, S], as `fold` takes keys: S / COLUMNS groups of [C + R, COLUMNS]
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, prange

from dcpjax.models.kernels.cpu.compile import both, catching, compiled, raise_if
from dcpjax.models.kernels.cpu.fold import Chunk, Matrix, Prefetch, QueryTile, SoftmaxState, accumulate, fold
from dcpjax.models.kernels.cpu.paged_attention import CHUNK_SLOTS, ROWS_AT_ONCE, finish, visible_slots
from dcpjax.models.kernels.cpu.softmax import clear, copy, round_up
from dcpjax.models.kernels.cpu.tile import TILE, transpose
from dcpjax.models.kernels.cpu.vector import COLUMNS, pointer, shifted
from dcpjax.models.kernels.cpu.xla_call import (
    NO_ERROR,
    Handler,
    arguments,
    array,
    error,
    is_call,
    results,
)


class PromptCall(NamedTuple):
    """Arguments and results of one call."""

    out: np.ndarray  # [T, H, Y] float32, result
    lse: np.ndarray  # [T, H] float32, result
    workspace: np.ndarray  # [threads, `workspace_size`] float32
    q: np.ndarray  # [T, H, X + R] float32, scaled
    latents: np.ndarray  # [N, 1, P, C + R] as cached
    w_uk: np.ndarray  # [H, X, C] float32
    w_uv: np.ndarray  # [H, C, Y] float32
    positions: np.ndarray  # [T] int32, of `Work`
    rows: np.ndarray  # [T] int32, of `Work`
    block_table: np.ndarray  # [B, W] int32, of `Work`
    ownership: np.ndarray  # [3] int32: dcp, interleave, rank: which positions are cached here
    tile_starts: np.ndarray  # [I] int32: each tile's first token
    tile_rows: np.ndarray  # [I] int32: each tile's row of the block table
    # [3] int32: number of tiles, tokens that each may have, tokens from which on it is up-projected
    limits: np.ndarray


class Item(NamedTuple):
    """One tile and head. Pointers are to float32 numbers."""

    sums: Any  # [Q, Y]: 0, becomes the output
    queries: Any  # [Q, X + R]
    scratch: Any
    w_uk: Any  # [X, C] of this head
    w_uv: Any  # [C, Y] of this head
    latents: np.ndarray  # the cache
    blocks: np.ndarray  # [W] int32: block ids of the request
    visible: np.ndarray  # [Q] int64: slots of this rank that each token sees
    nope: int  # X
    rank: int  # C
    latent_dim: int  # C + R
    query_dim: int  # X + R
    value_dim: int  # Y


def _attend(call: Any) -> None:
    """Compute `out` and `lse`, with as many threads as have a workspace."""
    call.out[:], call.lse[:] = np.float32(0.0), np.float32(-np.inf)  # of tokens that are in no tile
    visible = visible_slots(call.positions, call.ownership)
    failed = 0
    for thread in prange(call.workspace.shape[0]):
        # prange counts in uint64, for which the function would be compiled once more
        failed += _attend_items(np.int64(thread), visible, call)
    raise_if(failed)


_attend_parallel, _attend_sequential = both(_attend)


@catching
@compiled
def _attend_items(thread: int, visible: np.ndarray, call: Any) -> None:
    """One thread's items, every `threads`-th one: fill in their part of `out` and `lse`."""
    heads, depth, width = call.q.shape[1], call.q.shape[2], call.out.shape[2]
    count, most_tokens, fewest_up_projected = call.limits[0], call.limits[1], call.limits[2]
    for number in range(thread, count * heads, call.workspace.shape[0]):
        tile, head = number // heads, number % heads
        first, row, tokens = call.tile_starts[tile], call.tile_rows[tile], 0
        while tokens < most_tokens and first + tokens < call.rows.shape[0] and call.rows[first + tokens] == row:
            tokens += 1
        queries, padded = pointer(call.workspace[thread], 0), round_up(tokens, ROWS_AT_ONCE)
        for token in range(tokens):
            copy(pointer(call.q, ((first + token) * heads + head) * depth), shifted(queries, token * depth), depth)
        clear(shifted(queries, tokens * depth), (padded - tokens) * depth)
        sums = shifted(queries, padded * depth)
        clear(sums, padded * width)
        _, nope, rank = call.w_uk.shape
        item = Item(
            sums,
            queries,
            shifted(sums, padded * width),
            pointer(call.w_uk, head * nope * rank),
            pointer(call.w_uv, head * rank * width),
            call.latents,
            call.block_table[row],
            visible[first : first + tokens],
            nope,
            rank,
            call.latents.shape[3],
            depth,
            width,
        )
        lse = _up_projected(item) if tokens >= fewest_up_projected else _absorbed(item)
        for token in range(tokens):
            copy(shifted(sums, token * width), pointer(call.out, ((first + token) * heads + head) * width), width)
            call.lse[first + token, head] = lse[token]


@compiled
def _up_projected(item: Any) -> np.ndarray:
    """Attention of an item with keys and values of the head -> lse [Q]."""
    tokens, slots = item.visible.shape[0], item.visible[-1]
    row, depth, width = item.latent_dim, item.query_dim, item.value_dim
    maximum, total = np.full(tokens, np.float32(-np.inf), np.float32), np.zeros(tokens, np.float32)
    state = SoftmaxState(item.visible, maximum, total)
    latents, offsets = item.scratch, np.zeros(2, np.int64)
    transposed = shifted(latents, CHUNK_SLOTS * row)
    keys = shifted(transposed, CHUNK_SLOTS * row)
    values = shifted(keys, CHUNK_SLOTS * depth)
    tile = QueryTile(item.sums, width, item.queries, depth, shifted(values, CHUNK_SLOTS * width), CHUNK_SLOTS)
    key_matrix, value_matrix = Matrix(keys, COLUMNS, depth * COLUMNS), Matrix(values, width, COLUMNS)
    for first in range(0, slots, CHUNK_SLOTS):
        count = min(CHUNK_SLOTS, slots - first)
        _gather(item.latents, item.blocks, first, count, latents)
        _project(item, latents, transposed, count, keys, values)
        chunk = Chunk(first, count, key_matrix, value_matrix, CHUNK_SLOTS, offsets)
        fold(ROWS_AT_ONCE, tile, state, chunk, Prefetch(latents, latents))
    return finish(item.sums, width, maximum, total)


@compiled
def _project(item: Any, latents: Any, transposed: Any, count: int, keys: Any, values: Any) -> None:
    """A chunk's latents -> keys, a Matrix [X + R, S] in groups of COLUMNS, and values [S, Y]."""
    nope, rank, row, depth, width = item.nope, item.rank, item.latent_dim, item.query_dim, item.value_dim
    for slot in range(0, round_up(count, COLUMNS), COLUMNS):
        own_latents, own_keys = shifted(transposed, slot * row), shifted(keys, slot * depth)
        for half in range(0, COLUMNS, TILE):
            for dim in range(0, row, TILE):
                source = shifted(latents, (slot + half) * row + dim)
                transpose(source, row, shifted(own_latents, dim * COLUMNS + half), COLUMNS)
        clear(own_keys, nope * COLUMNS)
        for dim in range(0, nope, ROWS_AT_ONCE):
            sums, factors, matrix = shifted(own_keys, dim * COLUMNS), shifted(item.w_uk, dim * rank), own_latents
            accumulate(ROWS_AT_ONCE, sums, COLUMNS, factors, rank, rank, Matrix(matrix, COLUMNS, 0), COLUMNS, latents)
        copy(shifted(own_latents, rank * COLUMNS), shifted(own_keys, nope * COLUMNS), (depth - nope) * COLUMNS)
    padded, w_uv = round_up(count, ROWS_AT_ONCE), Matrix(item.w_uv, width, COLUMNS)
    clear(values, padded * width)
    for slot in range(0, padded, ROWS_AT_ONCE):
        sums, factors = shifted(values, slot * width), shifted(latents, slot * row)
        accumulate(ROWS_AT_ONCE, sums, width, factors, row, rank, w_uv, width, latents)


@compiled
def _absorbed(item: Any) -> np.ndarray:
    """Attention of an item with few queries, which are projected instead of the latents -> lse [Q]."""
    tokens, slots = item.visible.shape[0], item.visible[-1]
    nope, rank, row, depth, width = item.nope, item.rank, item.latent_dim, item.query_dim, item.value_dim
    maximum, total = np.full(tokens, np.float32(-np.inf), np.float32), np.zeros(tokens, np.float32)
    state = SoftmaxState(item.visible, maximum, total)
    latents, offsets, padded = item.scratch, np.zeros(2, np.int64), round_up(tokens, ROWS_AT_ONCE)
    absorbed = shifted(latents, CHUNK_SLOTS * row)
    latent_sums = shifted(absorbed, padded * row)
    clear(absorbed, 2 * padded * row)
    w_uk, w_uv = Matrix(item.w_uk, rank, COLUMNS), Matrix(item.w_uv, width, COLUMNS)
    for query in range(0, padded, ROWS_AT_ONCE):
        sums, factors = shifted(absorbed, query * row), shifted(item.queries, query * depth)
        accumulate(ROWS_AT_ONCE, sums, row, factors, depth, nope, w_uk, rank, latents)
        for one in range(query, query + ROWS_AT_ONCE):
            copy(shifted(item.queries, one * depth + nope), shifted(absorbed, one * row + rank), depth - nope)
    tile = QueryTile(latent_sums, row, absorbed, row, shifted(latent_sums, padded * row), CHUNK_SLOTS)
    for first in range(0, slots, CHUNK_SLOTS):
        count = min(CHUNK_SLOTS, slots - first)
        _gather(item.latents, item.blocks, first, count, latents)
        chunk = Chunk(first, count, None, Matrix(latents, row, COLUMNS), CHUNK_SLOTS, offsets)
        fold(ROWS_AT_ONCE, tile, state, chunk, Prefetch(latents, latents))
    lse = finish(latent_sums, row, maximum, total)
    for query in range(0, padded, ROWS_AT_ONCE):
        sums, factors = shifted(item.sums, query * width), shifted(latent_sums, query * row)
        accumulate(ROWS_AT_ONCE, sums, width, factors, row, rank, w_uv, width, latents)
    return lse


@compiled
def _gather(cache: np.ndarray, blocks: np.ndarray, first: int, count: int, latents: Any) -> None:
    """latents [count, C + R] float32: slots of the request from `first` on, then 0 up to whole groups of COLUMNS."""
    slots, row, at = cache.shape[2], cache.shape[3], 0
    while at < count:
        offset = (first + at) % slots
        neighbours = min(slots - offset, count - at)
        begin = (blocks[(first + at) // slots] * slots + offset) * row
        copy(pointer(cache, begin), shifted(latents, at * row), neighbours * row)
        at += neighbours
    clear(shifted(latents, count * row), (round_up(count, COLUMNS) - count) * row)


def workspace_size(tokens: int, few: int, latent_dim: int, query_dim: int, value_dim: int) -> int:
    """float32 numbers that a thread needs for tiles of at most `tokens` tokens, which are absorbed if they have fewer
    than `few`: queries and sums, a chunk's latents, and the larger of what either way computes from them."""
    tokens, few = round_up(tokens, ROWS_AT_ONCE), round_up(min(tokens, few), ROWS_AT_ONCE)
    either = CHUNK_SLOTS * (latent_dim + query_dim + value_dim), 2 * few * latent_dim
    size = tokens * (query_dim + value_dim) + CHUNK_SLOTS * latent_dim
    return size + max(either) + ROWS_AT_ONCE * CHUNK_SLOTS


def kernel(dtype: np.dtype, parallel: bool, message: np.ndarray) -> Handler:
    """For caches of this dtype: (q, latents, w_uk, w_uv, positions, rows, block table, ownership, tile starts, tile
    rows, limits) -> (out, lse, workspace)."""

    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        inputs, outputs = arguments(frame), results(frame)
        call = PromptCall(
            array(outputs[0], 3, float32),
            array(outputs[1], 2, float32),
            array(outputs[2], 2, float32),
            array(inputs[0], 3, float32),
            array(inputs[1], 4, dtype),
            array(inputs[2], 3, float32),
            array(inputs[3], 3, float32),
            array(inputs[4], 1, int32),
            array(inputs[5], 1, int32),
            array(inputs[6], 2, int32),
            array(inputs[7], 1, int32),
            array(inputs[8], 1, int32),
            array(inputs[9], 1, int32),
            array(inputs[10], 1, int32),
        )
        try:
            if parallel:
                _attend_parallel(call)
            else:
                _attend_sequential(call)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler
