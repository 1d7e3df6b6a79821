"""A chunk of the cache folded into the running softmax of many queries, on a CPU's vector units, compiled by Numba.

Works on numbers behind pointers; knows nothing about blocks, requests or JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

from numba import literally

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.softmax import clear, round_up, take_shares, within
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


@compiled
def raise_rows(stored: Any, stride: int, rows: int, columns: int, to: Any, between: int) -> None:
    """Rows of `stored` as float32, COLUMNS of them after another: the next COLUMNS begin `between` further."""
    for column in range(0, columns, COLUMNS):
        at = column // COLUMNS * between
        for row in range(rows):
            store(to, at, load(stored, row * stride + column))
            store(to, at + LANES, load(stored, row * stride + column + LANES))
            at += COLUMNS


@compiled
def fold(together: int, tile: Any, state: Any, done: int, count: int, stored: Any, places: Any, ahead: Any) -> None:
    """Fold `count` slots, those after the first `done`, into the running softmax of all queries, so many at a time.

    `tile`: sums [Q, Y], Y, queries [Q, D], D, room for scores [together, size], `size`. `state`: how many of the
    request's slots each query sees, its largest score so far and its total, [Q].

    `stored` keys [D, S] and values [S, Y]: pointer, distance of rows and of groups of COLUMNS; keys None where values
    are also the keys. They lie in pieces of so many slots, the third: how much further each begins, `places` tells, and
    after that of what is asked for meanwhile, `ahead`: while keys are read and while values are.
    """
    (out, width, q, depth, shares, size), (keys, values, slots) = tile, stored
    seen, top, total = state
    limits, tops, totals, at = pointer(seen, 0), pointer(top, 0), pointer(total, 0), pointer(places, 0)
    queries, pieces = seen.shape[0], places.shape[0] // 2
    for query in range(0, queries, literally(together)):
        end = min(query + together, queries)
        common, most = within(limits[query] - done, count), within(limits[end - 1] - done, count)  # later: no less
        if most == 0:
            continue
        own, sums = shifted(q, query * depth), shifted(out, query * width)
        clear(shares, together * size)
        for piece in range(-(-most // slots)):
            first, to = piece * slots, shifted(shares, piece * slots)
            k, v, coming = _moved(keys, at[piece], 0), _moved(values, at[piece], 0), shifted(ahead[0], at[piece])
            _score(together, to, size, own, depth, k, v, min(slots, most - first), coming)
        for row in range(query, end):
            limit = within(limits[row] - done, count)
            if limit > 0:
                scores = shifted(shares, (row - query) * size)
                take_shares(shifted(out, row * width), width, scores, limit, shifted(tops, row), shifted(totals, row))
        for piece in range(-(-common // slots)):
            first, coming = piece * slots, shifted(ahead[1], at[pieces + piece])
            v, rows = _moved(values, at[piece], 0), min(slots, common - first)
            accumulate(together, sums, width, shifted(shares, first), size, rows, v, width, coming)
        for row in range(query + 1, end):
            limit = within(limits[row] - done, count)
            for piece in range(common // slots, -(-limit // slots)):
                first = max(common, piece * slots)
                rest, rows = _moved(values, at[piece], first - piece * slots), min(limit, (piece + 1) * slots) - first
                weights = shifted(shares, (row - query) * size + first)
                accumulate(1, shifted(out, row * width), width, weights, size, rows, rest, width, ahead[1])


@compiled
def _moved(stored: Any, place: int, rows: int) -> Any:
    """The same of another piece, without its first rows."""
    if stored is None:
        return None
    begin, stride, step = stored
    return shifted(begin, place + rows * stride), stride, step


@compiled
def _score(
    together: int, scores: Any, size: int, q: Any, depth: int, keys: Any, values: Any, slots: int, ahead: Any
) -> None:
    """scores [together, slots], 0 before, of queries [together, D] and the slots' keys."""
    if keys is None:
        _score_rows(together, scores, size, q, depth, values, slots)
    else:
        accumulate(together, scores, size, q, depth, depth, keys, round_up(slots, COLUMNS), ahead)


@compiled
def _score_rows(together: int, scores: Any, size: int, q: Any, depth: int, stored: Any, slots: int) -> None:
    """The same of keys [S, D], two slots at a time; an odd last one is scored with itself."""
    rows, stride, _ = stored
    for slot in range(0, slots, 2):
        both, beside = shifted(rows, slot * stride), 1 if slot + 1 < slots else 0
        block = zeros_block(literally(together), 2)
        for dim in range(0, depth, LANES):
            block = add_lanes(block, shifted(q, dim), depth, shifted(both, dim), beside * stride)
        store_sums(shifted(scores, slot), size, beside, block)


@compiled
def accumulate(
    together: int, sums: Any, width: int, weights: Any, terms: int, count: int, stored: Any, columns: int, ahead: Any
) -> None:
    """sums [together, columns] += weights [together, count] times rows of `stored` [count, columns].

    Rows of sums are `width` apart, those of weights `terms`. The sums stay in registers. With each row of `stored` a
    portion of what lies ahead is asked for.
    """
    rows, stride, step = stored
    for column in range(0, columns, COLUMNS):
        to, at = shifted(sums, column), column // COLUMNS * step
        block = load_block(literally(together), to, width)
        for index in range(count):
            prefetch_columns(ahead, index * COLUMNS)
            block = add_products(block, weights, index, terms, load(rows, at), load(rows, at + LANES))
            at += stride
        ahead = shifted(ahead, count * COLUMNS)
        store_block(to, width, block)
