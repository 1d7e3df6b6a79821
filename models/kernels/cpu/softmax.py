"""One query's running softmax over rows of scores, on a CPU's vector units, compiled by Numba.

Works on numbers behind pointers; knows nothing about caches or tiles.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import carray

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.vector import (
    COLUMNS,
    LANES,
    add,
    exponential,
    horizontal_largest,
    horizontal_sum,
    larger,
    load,
    multiply,
    spread,
    store,
    zeros,
)


@compiled
def take_shares(sums: Any, width: int, scores: Any, count: int, top: Any, total: Any) -> None:
    """Scores of one query -> shares in place. Its sums [D] shrink to the new `top[0]`, its `total[0]` grows."""
    top[0], keep, gained = _soften(scores, count, top[0])
    total[0] = total[0] * keep + gained
    if keep != 1.0:
        scale(sums, width, keep)


@compiled
def _soften(scores: Any, count: int, before: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Scores of one query -> shares in place. Returns the largest score so far, which was `before`, the factor by
    which it shrinks what was summed until now, and the shares' sum.
    """
    columns = round_up(count, COLUMNS)
    _hide(scores, count, columns)
    top = max(before, _largest(scores, columns))
    shift = np.float32(0.0) if top == -np.inf else top
    keep = horizontal_largest(exponential(spread(before), shift))
    a, b = zeros(), zeros()
    for i in range(0, columns, COLUMNS):
        first, second = exponential(load(scores, i), shift), exponential(load(scores, i + LANES), shift)
        store(scores, i, first)
        store(scores, i + LANES, second)
        a, b = add(a, first), add(b, second)
    return top, keep, horizontal_sum(add(a, b))


@compiled
def _hide(scores: Any, count: int, columns: int) -> None:
    """Vectors are computed whole: what is past `count` gets no share."""
    numbers = carray(scores, columns, np.float32)
    for i in range(count, columns):
        numbers[i] = -np.inf


@compiled
def _largest(scores: Any, columns: int) -> np.float32:
    """The maximum. What it makes of NaN does not matter: the exponentials are NaN then."""
    a, b = load(scores, 0), load(scores, LANES)
    for i in range(COLUMNS, columns, COLUMNS):
        a, b = larger(load(scores, i), a), larger(load(scores, i + LANES), b)
    return horizontal_largest(larger(a, b))


@compiled
def scale(sums: Any, width: int, factor: np.float32) -> None:
    for i in range(0, width, LANES):
        store(sums, i, multiply(load(sums, i), spread(factor)))


@compiled
def within(number: int, most: int) -> int:
    """The nearest of 0 .. most."""
    return min(max(number, 0), most)


@compiled
def round_up(count: int, base: int) -> int:
    return -(-count // base) * base


@compiled
def copy(source: Any, to: Any, count: int) -> None:
    for i in range(0, count, LANES):
        store(to, i, load(source, i))


@compiled
def clear(numbers: Any, count: int) -> None:
    for i in range(0, count, LANES):
        store(numbers, i, zeros())
