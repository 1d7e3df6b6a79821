"""Matrix products on a CPU's vector units, compiled by Numba: few rows as fast as weights can be read from memory, many
as fast as the units multiply.

Rows of x and rows of a weight [O, I] both lie along what is summed: a few of either meet in registers, nothing is
packed. What is computed for a row does not depend on the others.

    a group     rows of x that meet the same weights in registers
    a block     columns of a result whose weights stay in a core's second cache while all groups meet them

Works on plain arrays: knows nothing about JAX or models.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, literally, njit, prange

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.vector import (
    LANES,
    ROWS,
    add,
    add_lanes,
    add_sums,
    horizontal_sum,
    load,
    multiply,
    multiply_add,
    numbers_of_line,
    pointer,
    prefetch_rows,
    rounded,
    shifted,
    silu,
    spread,
    store,
    store_sums,
    zeros,
    zeros_block,
)
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, arguments, array, is_call, results

BLOCK_BYTES = 2**17  # of weights, a quarter of the second cache of the smallest cores
LEAST, MOST = 24, 96  # columns of a block
ACROSS = 3  # columns that ROWS rows, or 4, meet at once; 1 or 2 rows meet one, so that memory is read in a line
AHEAD = 128  # cache lines: how far ahead of use weights are asked for where they are used once
TERMS = 768  # summed in registers, of rows that stay in a core's first cache
ALONE = 16  # rows at most that are prepared by one thread: a second one costs more to wake
WEIGHTS = 4  # of the arguments, where they begin


@njit(inline="always")
def _multiply(given: np.ndarray, made: np.ndarray, threads: int, stored: Any) -> None:
    """Each result [N, O] = x [N, I] float32 times its weight [O, I]; I a multiple of LANES.

    `given`: addresses of x, of `settings`, of a norm's weight [I], of what is added to the only result, [N, O] float32,
    and of the weights; weights are `stored`, float32 or bfloat16 as uint16, to which x is rounded. `made`: those of the
    results, float32, and of a workspace [`workspace_size`] float32.

    Settings, float32 [4]: whether gate and up [F, I] are the first two weights; then what meets the next one [F, N],
    F a multiple of LANES, is silu(x gate) * (x up), rounded as well. Whether x is normed, whether something is added,
    the norm's epsilon.
    """
    if array(given[0], 2, float32).shape[0] <= ALONE:
        _prepare_share(0, 1, given, made, stored)
    else:
        for thread in prange(threads):
            _prepare_share(np.int64(thread), threads, given, made, stored)  # uint64 would be compiled once more
    if array(given[1], 1, float32)[0] != 0.0:
        for thread in prange(threads):
            _gate_share(np.int64(thread), threads, given, made, stored)
    for thread in prange(threads):
        _multiply_share(np.int64(thread), threads, given, made, stored)


@compiled
def _prepare_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray, stored: Any) -> None:
    """Rows of x as they meet the weights: normed or not, rounded or not."""
    x, settings, norm = array(given[0], 2, float32), array(given[1], 1, float32), pointer(array(given[2], 1, stored), 0)
    rows, size = x.shape
    prepared, _, _ = _regions(array(made[-1], 1, float32), rows, size, 0, 0)
    narrow = array(given[WEIGHTS], 2, stored).itemsize == 2
    for row in range(thread, rows, threads):
        source, to = pointer(x, row * size), shifted(prepared, row * size)
        if settings[1] != 0.0:
            normalize(source, norm, settings[3], size, to)
            source = to
        for i in range(0, size, LANES):
            store(to, i, rounded(load(source, i)) if narrow else load(source, i))


@compiled
def normalize(row: Any, weight: Any, epsilon: np.float32, size: int, to: Any) -> None:
    """Root-mean-square norm of one row, as `layers.rms_norm`."""
    squares = zeros()
    for i in range(0, size, LANES):
        number = load(row, i)
        squares = multiply_add(number, number, squares)
    scale = np.float32(1.0) / np.sqrt(horizontal_sum(squares) / np.float32(size) + epsilon)
    for i in range(0, size, LANES):
        store(to, i, multiply(multiply(load(row, i), spread(scale)), load(weight, i)))


@compiled
def _gate_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray, stored: Any) -> None:
    """One thread's columns of gate and up, and what becomes of them."""
    x, gate, up = array(given[0], 2, float32), array(given[WEIGHTS], 2, stored), array(given[WEIGHTS + 1], 2, stored)
    (rows, size), width = x.shape, gate.shape[0]
    prepared, hidden, scratch = _regions(array(made[-1], 1, float32), rows, size, width, thread)
    columns, narrow, blocks = _columns(gate), gate.itemsize == 2, _blocks(gate)
    other = shifted(scratch, ROWS * MOST)
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        first, count = _span(block, columns, width)
        left, right, row = pointer(gate, first * size), pointer(up, first * size), 0
        while row < rows:
            group, own = _group(rows - row), shifted(prepared, row * size)
            _multiply_group(group, row == 0, own, left, size, count, scratch)
            _multiply_group(group, row == 0, own, right, size, count, other)
            for index in range(group):
                to, sums = shifted(hidden, (row + index) * width + first), index * MOST
                for column in range(0, count, LANES):
                    at = min(column, count - LANES)
                    risen = multiply(silu(load(scratch, sums + at)), load(other, sums + at))
                    store(to, at, rounded(risen) if narrow else risen)
            row += group


@compiled
def _multiply_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray, stored: Any) -> None:
    """One thread's columns of all results: neighbours, as they lie in memory."""
    x, settings, onto = array(given[0], 2, float32), array(given[1], 1, float32), array(given[3], 2, float32)
    rows = x.shape[0]
    width = array(given[WEIGHTS], 2, stored).shape[0] if settings[0] != 0.0 else 0
    prepared, hidden, scratch = _regions(array(made[-1], 1, float32), rows, x.shape[1], width, thread)
    weights, factor = given[WEIGHTS + 2 if width else WEIGHTS :], hidden if width else prepared
    blocks, passed = 0, 0
    for weight in weights:
        blocks += _blocks(array(weight, 2, stored))
    first, end = blocks * thread // threads, blocks * (thread + 1) // threads
    for index, place in enumerate(weights):
        weight, y = array(place, 2, stored), array(made[index], 2, float32)
        count = _blocks(weight)
        for block in range(max(first - passed, 0), min(end - passed, count)):
            _multiply_block(y, onto, settings[2] != 0.0, factor, weight, block, scratch)
        passed += count


@compiled
def _multiply_block(
    y: np.ndarray, onto: np.ndarray, added: bool, factor: Any, weight: np.ndarray, block: int, scratch: Any
) -> None:
    """Some columns of y [N, O] = factor [N, I] times weight [O, I], to which `onto` [N, O] is added or not."""
    (rows, width), size, row = y.shape, weight.shape[1], 0
    first, count = _span(block, _columns(weight), width)
    while row < rows:
        group = _group(rows - row)
        own, begin = shifted(factor, row * size), pointer(weight, first * size)
        _multiply_group(group, row == 0, own, begin, size, count, scratch)
        for index in range(group):
            sums, at = shifted(scratch, index * MOST), (row + index) * width + first
            _put(sums, count, pointer(y, 0), pointer(onto, 0), added, at)
        row += group


@compiled
def _put(sums: Any, count: int, y: Any, onto: Any, added: bool, at: int) -> None:
    """A row's part to its place."""
    whole = count // LANES * LANES
    for column in range(0, whole, LANES):
        own = load(sums, column)
        store(y, at + column, add(own, load(onto, at + column)) if added else own)
    for column in range(whole, count):
        y[at + column] = sums[column] + onto[at + column] if added else sums[column]


@compiled
def _multiply_group(group: int, new: bool, x: Any, weight: Any, size: int, count: int, to: Any) -> None:
    """`to` [group, count], its rows MOST apart: x [group, I] times weight [count, I], which is new to the caches or
    not."""
    if count % ACROSS != 0:
        for index in range(group):
            _multiply_rows(
                1, 1, new, shifted(x, index * size), weight, size, (0, size), count, shifted(to, index * MOST)
            )
    elif group == ROWS:
        span = size if new else TERMS
        for first in range(0, size, span):
            _multiply_rows(ROWS, ACROSS, new, x, weight, size, (first, min(first + span, size)), count, to)
    elif group == 4:
        _multiply_rows(4, ACROSS, new, x, weight, size, (0, size), count, to)
    elif group == 2:
        _multiply_rows(2, 1, new, x, weight, size, (0, size), count, to)
    else:
        _multiply_rows(1, 1, new, x, weight, size, (0, size), count, to)


@compiled
def _multiply_rows(
    group: int, across: int, new: bool, x: Any, weight: Any, size: int, span: tuple[int, int], count: int, to: Any
) -> None:
    """The same for so many columns at once, which divide `count`, and a span of the terms, which are summed TERMS at a
    time; what those before the span gave is there. Cache lines of a new weight are each asked for once."""
    (first, end), line = span, numbers_of_line(weight)
    for column in range(0, count, literally(across)):
        beside, made = shifted(weight, column * size), shifted(to, column)
        for begin in range(first, end, TERMS):
            after, block = min(begin + TERMS, end), zeros_block(literally(group), literally(across))
            whole = after - (after - begin) % line if new else begin
            for i in range(begin, whole, line):
                prefetch_rows(literally(across), shifted(beside, i * across + AHEAD * line), line)
                for j in range(i, i + line, LANES):
                    block = add_lanes(block, shifted(x, j), size, shifted(beside, j), size)
            for i in range(whole, after, LANES):
                block = add_lanes(block, shifted(x, i), size, shifted(beside, i), size)
            if begin > 0:
                add_sums(made, MOST, 1, block)
            else:
                store_sums(made, MOST, 1, block)


@compiled
def _group(left: int) -> int:
    """Rows of the next group."""
    if left >= ROWS:
        return ROWS
    return 4 if left >= 4 else min(left, 2)


@compiled
def _span(block: int, columns: int, width: int) -> tuple[int, int]:
    """First column of a block and their number. The last block has some of the one before, with the same results."""
    first = max(min(block * columns, width - columns), 0)
    return first, min(columns, width - first)


@compiled
def _columns(weight: np.ndarray) -> int:
    """Of a block: a multiple of ACROSS, or all of very few."""
    width, size = weight.shape
    fit = BLOCK_BYTES // (size * weight.itemsize) // ACROSS * ACROSS
    return width if width < LEAST else min(max(fit, LEAST), MOST, width // ACROSS * ACROSS)


@compiled
def _blocks(weight: np.ndarray) -> int:
    return -(-weight.shape[0] // _columns(weight))


@compiled
def _regions(workspace: np.ndarray, rows: int, size: int, width: int, thread: int) -> tuple[Any, Any, Any]:
    """Prepared rows of x, what is gated, a thread's sums of a group, twice."""
    prepared = pointer(workspace, 0)
    hidden = shifted(prepared, rows * size)
    return prepared, hidden, shifted(hidden, rows * width + thread * 2 * ROWS * MOST)


def workspace_size(rows: int, size: int, width: int, threads: int) -> int:
    """float32 numbers: rows of x, and of `width` columns that are gated, and each thread's sums."""
    return rows * (size + width) + threads * 2 * ROWS * MOST


def kernel(stored: np.dtype, threads: int) -> Callable[[Any], int]:
    """A custom call: `given` -> `made` of `_multiply`."""

    def run(frame: Any) -> int:
        if is_call(frame):
            _multiply(arguments(frame), results(frame), threads, stored)
        return NO_ERROR

    return run
