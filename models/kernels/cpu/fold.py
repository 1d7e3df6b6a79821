"""A chunk of the cache folded into the running softmax of a tile's queries, on a CPU's vector units, compiled by Numba.

Works on numbers behind pointers.
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any, NamedTuple

import numpy as np
from numba import literally

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.softmax import clear, clip, round_up, update_softmax
from dcpjax.models.kernels.cpu.vector import (
    COLUMNS,
    LANES,
    add_lanes,
    add_products,
    load,
    load_block,
    pointer,
    prefetch_columns,
    shifted,
    store,
    store_block,
    store_sums,
    zeros_block,
)


class Matrix(NamedTuple):
    """Numbers behind a pointer. Those of one row lie in groups of COLUMNS neighbours: [row, column] is at
    start + row * row_stride + column // COLUMNS * group_stride + column % COLUMNS."""

    start: Any
    row_stride: int
    group_stride: int


class QueryTile(NamedTuple):
    """Query rows of one request and KV head: Q of them."""

    sums: Any  # [Q, value_dim] float32: weighted sums of values so far
    value_dim: int
    queries: Any  # [Q, query_dim] float32
    query_dim: int
    scores: Any  # scratch for the scores of the rows that are computed together, `score_stride` apart
    score_stride: int


class SoftmaxState(NamedTuple):
    """Where the running softmax of Q query rows stands."""

    visible: np.ndarray  # [Q] int64: how many of the request's slots each row sees; later rows see no fewer
    maximum: np.ndarray  # [Q] float32: largest score so far
    total: np.ndarray  # [Q] float32: sum of the weights exp(score - maximum) so far


class Chunk(NamedTuple):
    """Consecutive slots of one request. They lie in pieces (blocks) of `piece_slots`; `offsets` says where each is."""

    first: int  # slots of the request before this chunk
    slots: int  # of the chunk
    keys: Any  # Matrix [D, S] of a piece at offset 0; None where the values are also the keys
    values: Any  # Matrix [S, Y] of a piece at offset 0
    piece_slots: int
    offsets: np.ndarray  # [2 * pieces] int64: of each piece of this chunk, then of each piece to prefetch


class Prefetch(NamedTuple):
    """Pointers to what is requested from memory meanwhile, a line at a time, each at a piece's offset."""

    while_scoring: Any  # at the offsets of this chunk
    while_summing: Any  # at the offsets of the pieces to prefetch


@compiled
def widen_rows(source: Any, row_stride: int, rows: int, columns: int, target: Any, group_stride: int) -> None:
    """Rows of bfloat16 or float32 -> a float32 Matrix at `target`, with rows of a group COLUMNS apart."""
    for column in range(0, columns, COLUMNS):
        at = column // COLUMNS * group_stride
        for row in range(rows):
            store(target, at, load(source, row * row_stride + column))
            store(target, at + LANES, load(source, row * row_stride + column + LANES))
            at += COLUMNS


@compiled
def fold(rows_at_once: int, tile: Any, state: Any, chunk: Any, prefetch: Any) -> None:
    """Fold a Chunk into the running softmax (SoftmaxState) of a QueryTile, `rows_at_once` query rows at a time.

    Each value is added only to the rows that see its slot, so a hidden NaN reaches none.
    """
    sums, width, queries, depth, scores, stride = tile
    first, count, keys, values, piece_slots, offsets_ = chunk
    limits, maxima, totals = pointer(state.visible, 0), pointer(state.maximum, 0), pointer(state.total, 0)
    offsets, pieces, rows = pointer(offsets_, 0), offsets_.shape[0] // 2, state.visible.shape[0]
    for query in range(0, rows, literally(rows_at_once)):
        end = min(query + rows_at_once, rows)
        # slots of the chunk that every one of these rows sees, and that the last one sees
        common, most = clip(limits[query] - first, count), clip(limits[end - 1] - first, count)
        if most == 0:
            continue
        own_queries, own_sums = shifted(queries, query * depth), shifted(sums, query * width)
        clear(scores, rows_at_once * stride)
        for piece in range(-(-most // piece_slots)):
            slot, offset = piece * piece_slots, offsets[piece]
            k, v, upcoming = _moved(keys, offset, 0), _moved(values, offset, 0), shifted(prefetch.while_scoring, offset)
            slots = min(piece_slots, most - slot)
            _score(rows_at_once, shifted(scores, slot), stride, own_queries, depth, k, v, slots, upcoming)
        for row in range(query, end):
            limit = clip(limits[row] - first, count)
            if limit > 0:
                row_sums, row_scores = shifted(sums, row * width), shifted(scores, (row - query) * stride)
                update_softmax(row_sums, width, row_scores, limit, shifted(maxima, row), shifted(totals, row))
        for piece in range(-(-common // piece_slots)):
            slot, upcoming = piece * piece_slots, shifted(prefetch.while_summing, offsets[pieces + piece])
            v, slots = _moved(values, offsets[piece], 0), min(piece_slots, common - slot)
            accumulate(rows_at_once, own_sums, width, shifted(scores, slot), stride, slots, v, width, upcoming)
        for row in range(query + 1, end):
            limit = clip(limits[row] - first, count)
            for piece in range(common // piece_slots, -(-limit // piece_slots)):
                slot = max(common, piece * piece_slots)
                v = _moved(values, offsets[piece], slot - piece * piece_slots)
                slots = min(limit, (piece + 1) * piece_slots) - slot
                weights = shifted(scores, (row - query) * stride + slot)
                row_sums, upcoming = shifted(sums, row * width), prefetch.while_summing
                accumulate(1, row_sums, width, weights, stride, slots, v, width, upcoming)


@compiled
def _moved(matrix: Any, offset: int, rows: int) -> Any:
    """The matrix `offset` numbers further, without its first rows."""
    if matrix is None:
        return None
    return Matrix(shifted(matrix.start, offset + rows * matrix.row_stride), matrix.row_stride, matrix.group_stride)


@compiled
def _score(
    rows_at_once: int,
    scores: Any,
    stride: int,
    queries: Any,
    depth: int,
    keys: Any,
    values: Any,
    slots: int,
    upcoming: Any,
) -> None:
    """scores [rows, slots], 0 before, += queries [rows, D] times the slots' keys."""
    if keys is None:
        _score_rows(rows_at_once, scores, stride, queries, depth, values, slots)
    else:
        columns = round_up(slots, COLUMNS)
        accumulate(rows_at_once, scores, stride, queries, depth, depth, keys, columns, upcoming)


@compiled
def _score_rows(rows_at_once: int, scores: Any, stride: int, queries: Any, depth: int, keys: Any, slots: int) -> None:
    """The same with keys [S, D], two slots at a time; an odd last one is computed twice."""
    for slot in range(0, slots, 2):
        pair, to_second = shifted(keys.start, slot * keys.row_stride), 1 if slot + 1 < slots else 0
        block = zeros_block(literally(rows_at_once), 2)
        for dim in range(0, depth, LANES):
            block = add_lanes(block, shifted(queries, dim), depth, shifted(pair, dim), to_second * keys.row_stride)
        store_sums(shifted(scores, slot), stride, to_second, block)


@compiled
def accumulate(
    rows_at_once: int,
    sums: Any,
    sum_stride: int,
    factors: Any,
    factor_stride: int,
    terms: int,
    matrix: Any,
    columns: int,
    upcoming: Any,
) -> None:
    """sums [rows, columns] += factors [rows, terms] times a Matrix [terms, columns].

    The sums stay in registers. With each row of the matrix one portion of `upcoming` is requested from memory.
    """
    for column in range(0, columns, COLUMNS):
        target, at = shifted(sums, column), column // COLUMNS * matrix.group_stride
        block = load_block(literally(rows_at_once), target, sum_stride)
        for term in range(terms):
            prefetch_columns(upcoming, term * COLUMNS)
            left, right = load(matrix.start, at), load(matrix.start, at + LANES)
            block = add_products(block, factors, term, factor_stride, left, right)
            at += matrix.row_stride
        upcoming = shifted(upcoming, terms * COLUMNS)
        store_block(target, sum_stride, block)
