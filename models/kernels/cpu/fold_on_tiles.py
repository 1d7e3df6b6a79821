"""A chunk of a bfloat16 cache folded into the running softmax of many queries, on a CPU's matrix units.

The units multiply bfloat16 alone. Queries and shares are float32: each is split into the three bfloat16 numbers whose
sum it is, so that nothing is rounded but sums, in float32. Slots that are hidden from a query have a share of 0;
a chunk that holds values which 0 does not silence, infinity or NaN, is refused.

    parts       of TILE rows by TERMS: three tiles, `distance` apart
    pairs       rows of the cache two by two, as `multiply_tiles` wants them: tiles of TERMS rows by TILE columns, those
                of the same columns one after another

Works on numbers behind pointers; knows nothing about blocks, requests or JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.softmax import clear, round_up, take_shares, within
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
def pair_rows(stored: Any, stride: int, rows: int, columns: int, to: Any, between: int) -> bool:
    """Rows of a bfloat16 cache as pairs; rows from `rows` to the next multiple of TERMS count as 0. Pairs of the next
    TILE columns begin `between` further. Whether all are finite."""
    odd = 0
    for column in range(0, columns, TILE):
        at = shifted(to, column // TILE * between)
        for row in range(0, round_up(rows, TERMS), 2):
            first = shifted(stored, row * stride + column)
            odd |= pair_up(first, stride, rows - row, at)
            at = shifted(at, PAIRS)
    return odd == 0


@compiled
def split_queries(q: Any, queries: int, width: int, to: Any) -> None:
    """q [Q, D] as parts: for each TILE queries those of the first TERMS dimensions, of the next ...; all first parts
    before all second ones."""
    distance = width // TERMS * SIZE
    for query in range(0, queries, TILE):
        for dim in range(0, width, TERMS):
            rows = shifted(q, query * width + dim)
            split_rows(rows, width, shifted(to, (query // TILE * PARTS * width + dim) // TERMS * SIZE), distance)


@compiled
def fold_pairs(tile: Any, state: Any, done: int, count: int, keys: Any, values: Any) -> None:
    """Fold `count` slots, those after the first `done`, into the running softmax of all queries, TILE at a time.

    `tile`: sums [Q, D], the queries' parts, D, room for scores [TILE, size] and for the parts of shares, `size`.
    `state` as in `numba_fold`.
    """
    out, queries, width, scores, shares, size = tile
    seen, top, total = state
    steps, limits, tops, totals = width // TERMS, pointer(seen, 0), pointer(top, 0), pointer(total, 0)
    for query in range(0, seen.shape[0], TILE):
        end = min(query + TILE, seen.shape[0])
        columns = round_up(within(limits[end - 1] - done, count), COLUMNS)  # later tokens see no less
        if columns == 0:
            continue
        own = shifted(queries, query // TILE * PARTS * steps * SIZE)
        for slot in range(0, columns, COLUMNS):
            pairs = shifted(keys, slot // TILE * steps * SIZE)
            _multiply(own, steps, steps, pairs, steps, shifted(scores, slot), size, False)
        for row in range(query, end):
            limit, of_row = within(limits[row] - done, count), shifted(scores, (row - query) * size)
            hidden = round_up(limit, COLUMNS)
            if limit > 0:
                take_shares(shifted(out, row * width), width, of_row, limit, shifted(tops, row), shifted(totals, row))
            clear(shifted(of_row, hidden), columns - hidden)
        for row in range(end - query, TILE):
            clear(shifted(scores, row * size), columns)
        terms = columns // TERMS
        for slot in range(0, columns, TERMS):
            split_rows(shifted(scores, slot), size, shifted(shares, slot // TERMS * SIZE), terms * SIZE)
        rows = round_up(count, TERMS) // TERMS
        for column in range(0, width, COLUMNS):
            pairs = shifted(values, column // TILE * rows * SIZE)
            _multiply(shares, terms, terms, pairs, rows, shifted(out, query * width + column), width, True)


@compiled
def _multiply(parts: Any, steps: int, distance: int, pairs: Any, beside: int, to: Any, stride: int, add: bool) -> None:
    """TILE rows by COLUMNS of sums, `stride` apart: parts of `steps` tiles by as many of pairs.

    In tiles: second and third parts are `distance` after the first ones, pairs of the other columns `beside`.
    """
    other = shifted(to, TILE)
    if add:
        load_tile(0, to, 4 * stride)
        load_tile(1, other, 4 * stride)
    else:
        clear_tile(0)
        clear_tile(1)
    for step in range(steps):
        left = shifted(parts, step * SIZE)
        load_tile(2, shifted(pairs, step * SIZE), ROW)
        load_tile(3, shifted(pairs, (beside + step) * SIZE), ROW)
        load_tile(4, left, ROW)
        multiply_tiles(0, 4, 2)
        multiply_tiles(1, 4, 3)
        load_tile(5, shifted(left, distance * SIZE), ROW)
        multiply_tiles(0, 5, 2)
        multiply_tiles(1, 5, 3)
        load_tile(6, shifted(left, 2 * distance * SIZE), ROW)
        multiply_tiles(0, 6, 2)
        multiply_tiles(1, 6, 3)
    store_tile(0, to, 4 * stride)
    store_tile(1, other, 4 * stride)
