"""One query's running softmax over rows of scores, on a CPU's vector units, compiled by Numba.

Works on numbers behind pointers.
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import carray

from dcpjax.models.kernels.cpu.compile import compiled, shared_with_python
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
def update_softmax(sums: Any, width: int, scores: Any, count: int, maximum: Any, total: Any) -> None:
    """Add `count` scores of one query to its running softmax.

    The scores become weights exp(score - maximum) in place. `maximum[0]` rises to the largest score so far, `total[0]`
    is the sum of all weights; what was summed before, `sums` [width] and `total[0]`, is scaled to the new maximum.
    """
    maximum[0], correction, added = _exponentiate(scores, count, maximum[0])
    total[0] = total[0] * correction + added
    if correction != 1.0:
        scale(sums, width, correction)


@compiled
def _exponentiate(scores: Any, count: int, before: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Scores -> weights in place. Returns the largest score so far (`before` until now), the factor for what was
    summed until now, and the sum of the weights.
    """
    columns = round_up(count, COLUMNS)
    _hide(scores, count, columns)
    maximum = max(before, _largest(scores, columns))
    shift = np.float32(0.0) if maximum == -np.inf else maximum
    correction = horizontal_largest(exponential(spread(before), shift))
    a, b = zeros(), zeros()
    for i in range(0, columns, COLUMNS):
        first, second = exponential(load(scores, i), shift), exponential(load(scores, i + LANES), shift)
        store(scores, i, first)
        store(scores, i + LANES, second)
        a, b = add(a, first), add(b, second)
    return maximum, correction, horizontal_sum(add(a, b))


@compiled
def _hide(scores: Any, count: int, columns: int) -> None:
    """Scores from `count` to `columns` become -inf, so that their weights are 0: only whole vectors are computed."""
    numbers = carray(scores, columns, np.float32)
    for i in range(count, columns):
        numbers[i] = -np.inf


@compiled
def _largest(scores: Any, columns: int) -> np.float32:
    """The maximum. With NaN among the scores any result will do: the weights are NaN then."""
    a, b = load(scores, 0), load(scores, LANES)
    for i in range(COLUMNS, columns, COLUMNS):
        a, b = larger(load(scores, i), a), larger(load(scores, i + LANES), b)
    return horizontal_largest(larger(a, b))


@compiled
def scale(sums: Any, width: int, factor: np.float32) -> None:
    for i in range(0, width, LANES):
        store(sums, i, multiply(load(sums, i), spread(factor)))


@compiled
def clip(number: int, most: int) -> int:
    """The nearest of 0 .. most."""
    return min(max(number, 0), most)


@shared_with_python
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
