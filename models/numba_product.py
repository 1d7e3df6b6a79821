"""Matrix products of a few rows on a CPU, compiled by Numba: as fast as the weights can be read from memory.

Works on plain arrays: knows nothing about JAX or models.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import from_dtype, njit, prange, types

from dcpjax.models.numba_call import arguments, results
from dcpjax.models.numba_call import array as array_of
from dcpjax.models.numba_vector import LANES, horizontal_sum, load, multiply_add, pointer, prefetch, zeros

BLOCK = 32  # columns of the result that one thread computes before it takes the next
AHEAD = 2048  # weights: how far ahead of use they are asked for
ROWS = 4  # rows of x that meet a row of weights while it is in a register

_compile = njit(error_model="numpy", nogil=True, cache=True)


@_compile
def multiply_in_turn(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """y [N, O] = x [N, I] float32 times weight [O, I], float32 or bfloat16 as uint16; I a multiple of LANES."""
    for block in range(-(-weight.shape[0] // BLOCK)):
        _multiply_block(y, x, weight, block)


@njit(error_model="numpy", nogil=True, cache=True, parallel=True)
def multiply_in_parallel(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    for block in prange(-(-weight.shape[0] // BLOCK)):
        _multiply_block(y, x, weight, block)


@_compile
def _multiply_block(y: np.ndarray, x: np.ndarray, weight: np.ndarray, block: int) -> None:
    end = min((block + 1) * BLOCK, y.shape[1])
    for column in range(block * BLOCK, end, 2):
        for row in range(0, y.shape[0], ROWS):
            _multiply_few(y, x, weight, column, min(column + 1, end - 1), row)


@_compile
def _multiply_few(y: np.ndarray, x: np.ndarray, weight: np.ndarray, column: int, other: int, row: int) -> None:
    """ROWS rows by two columns. Where there are fewer the last is computed repeatedly, and stored as often."""
    size, last = x.shape[1], y.shape[0] - 1
    left, right = pointer(weight, column * size), pointer(weight, other * size)
    b, c, d = min(row + 1, last), min(row + 2, last), min(row + 3, last)
    pa, pb, pc, pd = pointer(x, row * size), pointer(x, b * size), pointer(x, c * size), pointer(x, d * size)
    a0, b0, c0, d0 = zeros(), zeros(), zeros(), zeros()
    a1, b1, c1, d1 = zeros(), zeros(), zeros(), zeros()
    for i in range(0, size, LANES):
        w0, w1 = load(left, i), load(right, i)
        prefetch(left, i + AHEAD)
        prefetch(right, i + AHEAD)
        v = load(pa, i)
        a0, a1 = multiply_add(v, w0, a0), multiply_add(v, w1, a1)
        v = load(pb, i)
        b0, b1 = multiply_add(v, w0, b0), multiply_add(v, w1, b1)
        v = load(pc, i)
        c0, c1 = multiply_add(v, w0, c0), multiply_add(v, w1, c1)
        v = load(pd, i)
        d0, d1 = multiply_add(v, w0, d0), multiply_add(v, w1, d1)
    y[row, column], y[row, other] = horizontal_sum(a0), horizontal_sum(a1)
    y[b, column], y[b, other] = horizontal_sum(b0), horizontal_sum(b1)
    y[c, column], y[c, other] = horizontal_sum(c0), horizontal_sum(c1)
    y[d, column], y[d, other] = horizontal_sum(d0), horizontal_sum(d1)


def kernel(stored: np.dtype, parallel: bool) -> Any:
    """A custom call (x [N, I] float32, weight [O, I] of this dtype) -> y [N, O] float32."""
    multiply = multiply_in_parallel if parallel else multiply_in_turn
    array, weight_array = array_of(2, types.float32), array_of(2, from_dtype(stored))

    @njit(inline="always")
    def run(frame: np.ndarray) -> None:
        given = arguments(frame)
        multiply(array(results(frame)[0]), array(given[0]), weight_array(given[1]))

    return run
