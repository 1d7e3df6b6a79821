"""A chunk of the cache folded into the running softmax of many queries, on a CPU's vector units, compiled by Numba.

Works on numbers behind pointers; knows nothing about blocks, requests or JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import literally

from dcpjax.models.numba_compile import compiled
from dcpjax.models.numba_here import COLUMNS, LANES
from dcpjax.models.numba_softmax import clear, round_up, take_shares
from dcpjax.models.numba_vector import (
    add_lanes,
    add_products,
    load,
    load_block,
    prefetch_columns,
    shifted,
    store,
    store_block,
    store_sums,
    zeros_block,
)


@compiled
def raise_rows(stored: Any, stride: int, rows: int, columns: int, to: Any) -> None:
    """Rows of `stored` as float32, COLUMNS of them after another: [columns / COLUMNS, rows, COLUMNS]."""
    at = 0
    for column in range(0, columns, COLUMNS):
        for row in range(rows):
            store(to, at, load(stored, row * stride + column))
            store(to, at + LANES, load(stored, row * stride + column + LANES))
            at += COLUMNS


@compiled
def fold(
    together: int, tile: Any, top: np.ndarray, total: np.ndarray, seen: np.ndarray, count: int, stored: Any, ahead: Any
) -> None:
    """Fold `count` slots into the running softmax of all queries, so many at a time.

    `stored` keys [D, S] and values [S, D]: pointer, distance of rows and of groups of COLUMNS; keys None where values
    are also the keys. `ahead`: what is asked for meanwhile.
    """
    out, q, width, shares, size = tile
    for query in range(0, seen.shape[0], literally(together)):
        end = min(query + together, seen.shape[0])
        common, most = min(max(seen[query], 0), count), min(max(seen[end - 1], 0), count)  # later tokens see no less
        if most == 0:
            continue
        _score(together, shares, size, shifted(q, query * width), width, stored[0], stored[1], most, ahead[0])
        for row in range(query, end):
            limit = min(max(seen[row], 0), count)
            if limit > 0:
                take_shares(out, width, row, shifted(shares, (row - query) * size), limit, top, total)
        _accumulate(together, shifted(out, query * width), width, shares, size, common, stored[1], width, ahead[1])
        values, stride, step = stored[1]
        rest = (shifted(values, common * stride), stride, step)
        for row in range(query + 1, end):
            more = min(max(seen[row], 0), count) - common
            if more > 0:
                weights = shifted(shares, (row - query) * size + common)
                _accumulate(1, shifted(out, row * width), width, weights, size, more, rest, width, ahead[1])


@compiled
def _score(
    together: int, scores: Any, size: int, q: Any, width: int, keys: Any, values: Any, slots: int, ahead: Any
) -> None:
    """scores [together, slots] of queries [together, D] and the slots' keys."""
    if keys is None:
        _score_rows(together, scores, size, q, width, values, slots)
    else:
        clear(scores, together * size)
        _accumulate(together, scores, size, q, width, width, keys, round_up(slots, COLUMNS), ahead)


@compiled
def _score_rows(together: int, scores: Any, size: int, q: Any, width: int, stored: Any, slots: int) -> None:
    """The same of keys [S, D], two slots at a time; an odd last one is scored with itself."""
    rows, stride, _ = stored
    for slot in range(0, slots, 2):
        left = shifted(rows, slot * stride)
        right = shifted(left, stride if slot + 1 < slots else 0)
        block = zeros_block(literally(together))
        for dim in range(0, width, LANES):
            block = add_lanes(block, q, dim, width, load(left, dim), load(right, dim))
        store_sums(shifted(scores, slot), size, 1, block)


@compiled
def _accumulate(
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
