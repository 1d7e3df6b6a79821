"""Attention of prompts over a paged latent cache, each head with keys and values of its own; compiled by Numba.

A work item is one tile, the tokens of one request, and one head. With many tokens, chunks of latents are up-projected
to that head's keys and values, which meet all of them; with few, they are absorbed and meet the latents themselves, as
`mla_prefill` has it. Items share nothing, so neither threads nor other requests change a bit.

    rows      latents of a chunk in float32, [S, C + R]
    turned    the same as `fold` takes keys: S / COLUMNS groups of [C + R, COLUMNS]

Works on plain arrays: knows blocks and slots, knows nothing about JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, njit, prange

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.fold import accumulate, fold
from dcpjax.models.kernels.cpu.paged_attention import CHUNK_SLOTS, TOGETHER, finish, visible
from dcpjax.models.kernels.cpu.softmax import clear, copy, round_up
from dcpjax.models.kernels.cpu.tile import TILE, transpose
from dcpjax.models.kernels.cpu.vector import COLUMNS, pointer, shifted
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, arguments, array, is_call, results


@njit(inline="always")
def _attend(arguments: Any) -> None:
    """`arguments` as `_attend_items` names them; as many threads as have a workspace."""
    out, lse, workspace, _, _, _, _, positions, _, _, share, _, _, _ = arguments
    out[:], lse[:] = np.float32(0.0), np.float32(-np.inf)  # of tokens that are in no tile
    seen = visible(positions, share)
    for thread in prange(workspace.shape[0]):
        _attend_items(np.int64(thread), seen, arguments)  # for prange's uint64 it would be compiled once more


@compiled
def _attend_items(thread: int, seen: np.ndarray, arguments: Any) -> None:
    """Fill in `out` [N, H, Y] and `lse` [N, H] of one thread's items: the threads deal.

    q [N, H, X + R] float32, scaled; latents [B, 1, P, C + R] as cached; w_uk [H, X, C] and w_uv [H, C, Y] float32;
    positions and rows [N], table [R, W]: what `Work` holds; `share` as in `numba_kernel`; `starts` and `owners` [G] of
    tiles, their first tokens and rows; `limits`: how many tiles there are, tokens that each may have, and with how
    many it is up-projected. `workspace` [threads, `workspace_size`] float32.
    """
    out, lse, workspace, q, latents, w_uk, w_uv, _, rows, table, _, starts, owners, limits = arguments
    heads, depth, width = q.shape[1], q.shape[2], out.shape[2]
    for item in range(thread, limits[0] * heads, workspace.shape[0]):
        tile, head = item // heads, item % heads
        first, owner, tokens = starts[tile], owners[tile], 0
        while tokens < limits[1] and first + tokens < rows.shape[0] and rows[first + tokens] == owner:
            tokens += 1
        queries, padded = pointer(workspace[thread], 0), round_up(tokens, TOGETHER)
        for token in range(tokens):
            copy(pointer(q, ((first + token) * heads + head) * depth), shifted(queries, token * depth), depth)
        clear(shifted(queries, tokens * depth), (padded - tokens) * depth)
        sums = shifted(queries, padded * depth)
        clear(sums, padded * width)
        factors = pointer(w_uk, head * w_uk.shape[1] * w_uk.shape[2]), pointer(w_uv, head * w_uv.shape[1] * width)
        sizes = w_uk.shape[1], w_uk.shape[2], latents.shape[3], depth, width
        own, room = seen[first : first + tokens], shifted(sums, padded * width)
        if tokens >= limits[2]:
            lses = _up_projected(sums, queries, room, latents, factors, sizes, table[owner], own)
        else:
            lses = _absorbed(sums, queries, room, latents, factors, sizes, table[owner], own)
        for token in range(tokens):
            copy(shifted(sums, token * width), pointer(out, ((first + token) * heads + head) * width), width)
            lse[first + token, head] = lses[token]


@compiled
def _up_projected(
    sums: Any, queries: Any, room: Any, latents: np.ndarray, factors: Any, sizes: Any, blocks: Any, seen: Any
) -> np.ndarray:
    """One item: queries [Q, X + R], sums [Q, Y] are 0 -> lse [Q]."""
    _, _, row, depth, width = sizes
    tokens, places = seen.shape[0], np.zeros(2, np.int64)
    top, total = np.full(tokens, np.float32(-np.inf), np.float32), np.zeros(tokens, np.float32)
    state = seen, top, total
    turned = shifted(room, CHUNK_SLOTS * row)
    keys = shifted(turned, CHUNK_SLOTS * row)
    values = shifted(keys, CHUNK_SLOTS * depth)
    tile = sums, width, queries, depth, shifted(values, CHUNK_SLOTS * width), CHUNK_SLOTS
    stored = (keys, COLUMNS, depth * COLUMNS), (values, width, COLUMNS), CHUNK_SLOTS
    for done in range(0, seen[-1], CHUNK_SLOTS):
        count = min(CHUNK_SLOTS, seen[-1] - done)
        _gather(latents, blocks, done, count, room)
        _project(room, turned, count, factors, sizes, keys, values)
        fold(TOGETHER, tile, state, done, count, stored, places, (room, room))
    return finish(sums, width, top, total)


@compiled
def _project(rows: Any, turned: Any, count: int, factors: Any, sizes: Any, keys: Any, values: Any) -> None:
    """A chunk's latents -> keys [X + R, S] in groups of COLUMNS, values [S, Y]."""
    (w_uk, w_uv), (nope, rank, row, depth, width) = factors, sizes
    for group in range(0, round_up(count, COLUMNS), COLUMNS):
        own, to = shifted(turned, group * row), shifted(keys, group * depth)
        for half in range(0, COLUMNS, TILE):
            for dim in range(0, row, TILE):
                source = shifted(rows, (group + half) * row + dim)
                transpose(source, row, shifted(own, dim * COLUMNS + half), COLUMNS)
        clear(to, nope * COLUMNS)
        for dim in range(0, nope, TOGETHER):
            begin, weights = shifted(to, dim * COLUMNS), shifted(w_uk, dim * rank)
            accumulate(TOGETHER, begin, COLUMNS, weights, rank, rank, (own, COLUMNS, 0), COLUMNS, rows)
        copy(shifted(own, rank * COLUMNS), shifted(to, nope * COLUMNS), (depth - nope) * COLUMNS)
    padded = round_up(count, TOGETHER)
    clear(values, padded * width)
    for slot in range(0, padded, TOGETHER):
        begin, weights = shifted(values, slot * width), shifted(rows, slot * row)
        accumulate(TOGETHER, begin, width, weights, row, rank, (w_uv, width, COLUMNS), width, rows)


@compiled
def _absorbed(
    sums: Any, queries: Any, room: Any, latents: np.ndarray, factors: Any, sizes: Any, blocks: Any, seen: Any
) -> np.ndarray:
    """The same of few queries, which are projected instead."""
    (w_uk, w_uv), (nope, rank, row, depth, width) = factors, sizes
    tokens, places = seen.shape[0], np.zeros(2, np.int64)
    top, total = np.full(tokens, np.float32(-np.inf), np.float32), np.zeros(tokens, np.float32)
    state = seen, top, total
    padded = round_up(tokens, TOGETHER)
    absorbed = shifted(room, CHUNK_SLOTS * row)
    mixed = shifted(absorbed, padded * row)
    clear(absorbed, 2 * padded * row)
    for query in range(0, padded, TOGETHER):
        begin, weights = shifted(absorbed, query * row), shifted(queries, query * depth)
        accumulate(TOGETHER, begin, row, weights, depth, nope, (w_uk, rank, COLUMNS), rank, room)
        for own in range(query, query + TOGETHER):
            copy(shifted(queries, own * depth + nope), shifted(absorbed, own * row + rank), depth - nope)
    tile = mixed, row, absorbed, row, shifted(mixed, padded * row), CHUNK_SLOTS
    for done in range(0, seen[-1], CHUNK_SLOTS):
        count = min(CHUNK_SLOTS, seen[-1] - done)
        _gather(latents, blocks, done, count, room)
        stored = None, (room, row, COLUMNS), CHUNK_SLOTS
        fold(TOGETHER, tile, state, done, count, stored, places, (room, room))
    lse = finish(mixed, row, top, total)
    for query in range(0, padded, TOGETHER):
        begin, weights = shifted(sums, query * width), shifted(mixed, query * row)
        accumulate(TOGETHER, begin, width, weights, row, rank, (w_uv, width, COLUMNS), width, room)
    return lse


@compiled
def _gather(latents: np.ndarray, blocks: np.ndarray, done: int, count: int, rows: Any) -> None:
    """`count` slots of the request, those after the first `done`, and 0 up to whole groups."""
    slots, row, at = latents.shape[2], latents.shape[3], 0
    while at < count:
        offset = (done + at) % slots
        own = min(slots - offset, count - at)
        begin = (blocks[(done + at) // slots] * slots + offset) * row
        copy(pointer(latents, begin), shifted(rows, at * row), own * row)
        at += own
    clear(shifted(rows, count * row), (round_up(count, COLUMNS) - count) * row)


def workspace_size(tokens: int, few: int, row: int, depth: int, width: int) -> int:
    """float32 numbers that a thread needs for tiles of at most so many tokens, fewer than `few` absorbed: queries and
    sums, a chunk's rows, and what either way makes of them."""
    tokens, few = round_up(tokens, TOGETHER), round_up(min(tokens, few), TOGETHER)
    ways = CHUNK_SLOTS * (row + depth + width), 2 * few * row
    return tokens * (depth + width) + CHUNK_SLOTS * row + max(ways) + TOGETHER * CHUNK_SLOTS


def kernel(stored: np.dtype) -> Callable[[Any], int]:
    """A custom call for caches of this dtype; arguments and results are those of `_attend_items`."""

    def run(frame: Any) -> int:
        if is_call(frame):
            given, made = arguments(frame), results(frame)
            filled = array(made[0], 3, float32), array(made[1], 2, float32), array(made[2], 2, float32)
            q, latents = array(given[0], 3, float32), array(given[1], 4, stored)
            factors = array(given[2], 3, float32), array(given[3], 3, float32)
            work = array(given[4], 1, int32), array(given[5], 1, int32), array(given[6], 2, int32)
            tiles = array(given[8], 1, int32), array(given[9], 1, int32), array(given[10], 1, int32)
            _attend((*filled, q, latents, *factors, *work, array(given[7], 1, int32), *tiles))
        return NO_ERROR

    return run
