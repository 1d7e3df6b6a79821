"""A chunk of a bfloat16 cache folded into the running softmax of many queries, on a CPU's matrix units.

The units multiply bfloat16 alone. Queries and softmax weights are float32: each is split into three bfloat16 numbers
that add up to it, so only sums are rounded, in float32. Slots that are hidden from a query have a weight of 0, but
0 times infinity or NaN is NaN: the caller must not pass a chunk with such values.

    parts       of TILE rows by TERMS columns: three tiles, `distance` apart
    pairs       rows of the cache two by two, as `multiply_tiles` takes them: tiles of TERMS rows by TILE columns, those
                of the same columns one after another

Works on numbers behind pointers.
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.softmax import clear, clip, round_up, update_softmax
from dcpjax.models.kernels.cpu.tile import (
    PAIRS,
    PARTS,
    ROW,
    SIZE,
    TERMS,
    TILE,
    clear_tile,
    load_tile,
    multiply_tiles,
    pair_up,
    split_rows,
    store_tile,
)
from dcpjax.models.kernels.cpu.vector import COLUMNS, pointer, shifted


@compiled
def pair_rows(source: Any, row_stride: int, rows: int, columns: int, target: Any, column_stride: int) -> bool:
    """Rows of a bfloat16 cache -> pairs at `target`, those of the next TILE columns `column_stride` further. Rows from
    `rows` to the next multiple of TERMS count as 0. Returns whether all numbers are finite."""
    odd = 0
    for column in range(0, columns, TILE):
        at = shifted(target, column // TILE * column_stride)
        for row in range(0, round_up(rows, TERMS), 2):
            first = shifted(source, row * row_stride + column)
            odd |= pair_up(first, row_stride, rows - row, at)
            at = shifted(at, PAIRS)
    return odd == 0


@compiled
def split_queries(queries: Any, rows: int, width: int, target: Any) -> None:
    """queries [Q, D] -> parts: for each TILE queries those of the first TERMS dimensions, of the next ...; all first
    parts before all second ones."""
    distance = width // TERMS * SIZE
    for query in range(0, rows, TILE):
        for dim in range(0, width, TERMS):
            source = shifted(queries, query * width + dim)
            split_rows(source, width, shifted(target, (query // TILE * PARTS * width + dim) // TERMS * SIZE), distance)


@compiled
def fold_pairs(tile: Any, state: Any, first: int, count: int, keys: Any, values: Any, weight_parts: Any) -> None:
    """Fold `count` slots, those after the `first` ones, into the running softmax of all queries, TILE at a time.

    `tile` is a QueryTile with the queries' parts instead of queries, `state` a SoftmaxState. `keys` and `values` are
    pairs, `weight_parts` is scratch for the parts of softmax weights.
    """
    sums, width, query_parts, _, scores, stride = tile
    visible = state.visible
    steps, limits = width // TERMS, pointer(visible, 0)
    maxima, totals = pointer(state.maximum, 0), pointer(state.total, 0)
    for query in range(0, visible.shape[0], TILE):
        end = min(query + TILE, visible.shape[0])
        columns = round_up(clip(limits[end - 1] - first, count), COLUMNS)  # later tokens see no less
        if columns == 0:
            continue
        own_parts = shifted(query_parts, query // TILE * PARTS * steps * SIZE)
        for slot in range(0, columns, COLUMNS):
            pairs = shifted(keys, slot // TILE * steps * SIZE)
            _multiply(own_parts, steps, steps, pairs, steps, shifted(scores, slot), stride, False)
        for row in range(query, end):
            limit, row_scores = clip(limits[row] - first, count), shifted(scores, (row - query) * stride)
            hidden = round_up(limit, COLUMNS)
            if limit > 0:
                row_sums = shifted(sums, row * width)
                update_softmax(row_sums, width, row_scores, limit, shifted(maxima, row), shifted(totals, row))
            clear(shifted(row_scores, hidden), columns - hidden)
        for row in range(end - query, TILE):
            clear(shifted(scores, row * stride), columns)
        terms = columns // TERMS
        for slot in range(0, columns, TERMS):
            split_rows(shifted(scores, slot), stride, shifted(weight_parts, slot // TERMS * SIZE), terms * SIZE)
        rows = round_up(count, TERMS) // TERMS
        for column in range(0, width, COLUMNS):
            pairs = shifted(values, column // TILE * rows * SIZE)
            _multiply(weight_parts, terms, terms, pairs, rows, shifted(sums, query * width + column), width, True)


@compiled
def _multiply(
    parts: Any, steps: int, distance: int, pairs: Any, pair_distance: int, target: Any, stride: int, add: bool
) -> None:
    """TILE rows by COLUMNS of products at `target`, rows `stride` apart, added to what is there or not: parts of
    `steps` tiles times as many of pairs.

    Counted in tiles: second and third parts are `distance` after the first ones, pairs of the other columns
    `pair_distance`.
    """
    other = shifted(target, TILE)
    if add:
        load_tile(0, target, 4 * stride)
        load_tile(1, other, 4 * stride)
    else:
        clear_tile(0)
        clear_tile(1)
    for step in range(steps):
        left = shifted(parts, step * SIZE)
        load_tile(2, shifted(pairs, step * SIZE), ROW)
        load_tile(3, shifted(pairs, (pair_distance + step) * SIZE), ROW)
        load_tile(4, left, ROW)
        multiply_tiles(0, 4, 2)
        multiply_tiles(1, 4, 3)
        load_tile(5, shifted(left, distance * SIZE), ROW)
        multiply_tiles(0, 5, 2)
        multiply_tiles(1, 5, 3)
        load_tile(6, shifted(left, 2 * distance * SIZE), ROW)
        multiply_tiles(0, 6, 2)
        multiply_tiles(1, 6, 3)
    store_tile(0, target, 4 * stride)
    store_tile(1, other, 4 * stride)
