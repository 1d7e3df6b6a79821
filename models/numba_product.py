"""Matrix products of a few rows on a CPU, compiled by Numba: as fast as the weights can be read from memory.

Works on plain arrays: knows nothing about JAX or models.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, literally, njit, prange

from dcpjax.models.numba_call import NO_ERROR, arguments, array, is_call, results
from dcpjax.models.numba_compile import compiled
from dcpjax.models.numba_vector import LANES, add_lanes, load, pointer, prefetch, store_sums, zeros_block

BLOCK = 32  # columns of the result that one thread computes before it takes the next
AHEAD = 2048  # weights: how far ahead of use they are asked for


@njit(inline="always")
def _multiply(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """y [N, O] = x [N, I] float32 times weight [O, I], float32 or bfloat16 as uint16; I a multiple of LANES."""
    for block in prange(-(-weight.shape[0] // BLOCK)):
        _multiply_block(y, x, weight, np.int64(block))  # for prange's uint64 it would be compiled once more


@compiled
def _multiply_block(y: np.ndarray, x: np.ndarray, weight: np.ndarray, block: int) -> None:
    first, end, rows, row = block * BLOCK, min((block + 1) * BLOCK, y.shape[1]), y.shape[0], 0
    while rows - row >= 8:
        _multiply_rows(8, y, x, weight, first, end, row)
        row += 8
    if rows - row >= 4:
        _multiply_rows(4, y, x, weight, first, end, row)
        row += 4
    if rows - row >= 2:
        _multiply_rows(2, y, x, weight, first, end, row)
        row += 2
    if rows > row:
        _multiply_rows(1, y, x, weight, first, end, row)


@compiled
def _multiply_rows(
    together: int, y: np.ndarray, x: np.ndarray, weight: np.ndarray, first: int, end: int, row: int
) -> None:
    """So many rows by columns `first` to `end`, two at a time; of an odd number the last is computed twice."""
    size, columns = x.shape[1], y.shape[1]
    for column in range(first, end, 2):
        other = min(column + 1, end - 1)
        rows, left, right = pointer(x, row * size), pointer(weight, column * size), pointer(weight, other * size)
        sums = zeros_block(literally(together))
        for i in range(0, size, LANES):
            prefetch(left, i + AHEAD)
            prefetch(right, i + AHEAD)
            sums = add_lanes(sums, rows, i, size, load(left, i), load(right, i))
        store_sums(pointer(y, row * columns + column), columns, other - column, sums)


def kernel(stored: np.dtype) -> Callable[[Any], int]:
    """A custom call (x [N, I] float32, weight [O, I] of this dtype) -> y [N, O] float32."""

    def run(frame: Any) -> int:
        if is_call(frame):
            given, made = arguments(frame), results(frame)
            _multiply(array(made[0], 2, float32), array(given[0], 2, float32), array(given[1], 2, stored))
        return NO_ERROR

    return run
