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
from dcpjax.models.numba_vector import add_products, load, load_block, prefetch_columns, shifted, store, store_block


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

    `stored` keys and values: pointer, distance of rows and of groups of COLUMNS. `ahead`: what is asked for meanwhile.
    """
    out, q, width, shares, size = tile
    for query in range(0, seen.shape[0], literally(together)):
        end = min(query + together, seen.shape[0])
        common, most = min(max(seen[query], 0), count), min(max(seen[end - 1], 0), count)  # later tokens see no less
        if most == 0:
            continue
        columns = round_up(most, COLUMNS)
        clear(shares, together * size)
        _accumulate(together, shares, size, shifted(q, query * width), width, width, stored[0], columns, ahead[0])
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
