"""Matrix products on a CPU's vector units, compiled by Numba: few rows as fast as weights can be read from memory, many
as fast as the units multiply.

Both factors, x [rows, inner] and weight [columns, inner], lie along the sum: a few rows of either meet in registers and
nothing is packed. What is computed for a row does not depend on the other rows.

    a group     rows of x that meet the same weights in registers
    a block     columns of a result whose weights stay in a core's second cache while all groups meet them
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any, NamedTuple

import numpy as np
from numba import float32, literally, prange

from dcpjax.models.kernels.cpu.compile import both, compiled
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
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, Handler, arguments, array, error, is_call, results

BLOCK_BYTES = 2**17  # of weights, a quarter of the second cache of the smallest cores
LEAST, MOST = 24, 96  # columns of a block
ACROSS = 3  # columns that 4 or ROWS rows meet at once; 1 or 2 rows meet one, so that memory is read in order
AHEAD = 128  # cache lines: how far ahead of use weights are requested from memory where they are used once
TERMS = 768  # summed in registers, of rows that stay in a core's first cache
SEQUENTIAL_ROWS = 16  # so many are prepared by one thread: a second one costs more to wake


class ProductCall(NamedTuple):
    """Arguments and results of one call: each result [rows, columns] = x times its weight [columns, inner].

    If it is `gated`, the first two weights are gate and up [width, inner]; the others, [columns, width], meet
    silu(x gate) * (x up), rounded to their dtype, instead of x.
    """

    x: np.ndarray  # [rows, inner] float32
    norm_weight: np.ndarray  # [inner] of the weights' dtype; not read unless `normed`
    addend: np.ndarray  # [rows, columns] float32, added to the only result; not read unless `added`
    weights: np.ndarray  # int64: addresses of the weights' buffers; float32, or bfloat16 as uint16
    results: np.ndarray  # int64: addresses of the results' buffers, float32
    workspace: np.ndarray  # [`workspace_size`] float32
    gated: bool
    normed: bool  # whether x goes through a root-mean-square norm first
    added: bool
    epsilon: np.float32  # of the norm


@compiled
def read_call(frame: Any, dtype: Any) -> ProductCall:
    """(x, settings, norm weight, addend, weights ...) -> (results ..., workspace). The settings, float32 [4], are
    `gated`, `normed`, `added` and `epsilon`."""
    inputs, outputs = arguments(frame), results(frame)
    settings = array(inputs[1], 1, float32)
    return ProductCall(
        array(inputs[0], 2, float32),
        array(inputs[2], 1, dtype),
        array(inputs[3], 2, float32),
        inputs[4:],
        outputs[:-1],
        array(outputs[-1], 1, float32),
        settings[0] != 0.0,
        settings[1] != 0.0,
        settings[2] != 0.0,
        settings[3],
    )


def _multiply(call: Any, threads: int, dtype: Any) -> None:
    """Fill in the results; inner sizes are multiples of LANES. `dtype` of the weights, to which x is rounded.

    Nothing in a thread allocates or raises, so no exception can be lost there.
    """
    # prange counts in uint64, for which the functions would be compiled once more
    if call.x.shape[0] <= SEQUENTIAL_ROWS:
        _prepare_rows(0, 1, call, dtype)
    else:
        for thread in prange(threads):
            _prepare_rows(np.int64(thread), threads, call, dtype)
    if call.gated:
        for thread in prange(threads):
            _gate_columns(np.int64(thread), threads, call, dtype)
    for thread in prange(threads):
        _multiply_columns(np.int64(thread), threads, call, dtype)


_multiply_parallel, _multiply_sequential = both(_multiply)


@compiled
def _prepare_rows(thread: int, threads: int, call: Any, dtype: Any) -> None:
    """One thread's rows of x as they meet the weights: normed or not, rounded or not."""
    (rows, size), norm = call.x.shape, pointer(call.norm_weight, 0)
    prepared, _, _ = _regions(call.workspace, rows, size, 0, 0)
    narrow = array(call.weights[0], 2, dtype).itemsize == 2
    for row in range(thread, rows, threads):
        source, target = pointer(call.x, row * size), shifted(prepared, row * size)
        if call.normed:
            normalize(source, norm, call.epsilon, size, target)
            source = target
        for i in range(0, size, LANES):
            store(target, i, rounded(load(source, i)) if narrow else load(source, i))


@compiled
def normalize(row: Any, weight: Any, epsilon: np.float32, size: int, target: Any) -> None:
    """Root-mean-square norm of one row, as `layers.rms_norm`."""
    squares = zeros()
    for i in range(0, size, LANES):
        number = load(row, i)
        squares = multiply_add(number, number, squares)
    scale = np.float32(1.0) / np.sqrt(horizontal_sum(squares) / np.float32(size) + epsilon)
    for i in range(0, size, LANES):
        store(target, i, multiply(multiply(load(row, i), spread(scale)), load(weight, i)))


@compiled
def _gate_columns(thread: int, threads: int, call: Any, dtype: Any) -> None:
    """One thread's columns of silu(x gate) * (x up)."""
    gate, up = array(call.weights[0], 2, dtype), array(call.weights[1], 2, dtype)
    (rows, size), width = call.x.shape, gate.shape[0]
    prepared, hidden, gate_sums = _regions(call.workspace, rows, size, width, thread)
    columns, narrow, blocks = _columns(gate), gate.itemsize == 2, _blocks(gate)
    up_sums = shifted(gate_sums, ROWS * MOST)
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        first, count = _block_columns(block, columns, width)
        left, right, row = pointer(gate, first * size), pointer(up, first * size), 0
        while row < rows:
            group, x = _group(rows - row), shifted(prepared, row * size)
            _multiply_group(group, row == 0, x, left, size, count, gate_sums)
            _multiply_group(group, row == 0, x, right, size, count, up_sums)
            for index in range(group):
                target, sums = shifted(hidden, (row + index) * width + first), index * MOST
                for column in range(0, count, LANES):
                    at = min(column, count - LANES)
                    gated = multiply(silu(load(gate_sums, sums + at)), load(up_sums, sums + at))
                    store(target, at, rounded(gated) if narrow else gated)
            row += group


@compiled
def _multiply_columns(thread: int, threads: int, call: Any, dtype: Any) -> None:
    """One thread's columns of all results: neighbours, as they lie in memory."""
    rows, size = call.x.shape
    width = array(call.weights[0], 2, dtype).shape[0] if call.gated else 0
    prepared, hidden, scratch = _regions(call.workspace, rows, size, width, thread)
    weights, factor = call.weights[2 if call.gated else 0 :], hidden if call.gated else prepared
    blocks, passed = 0, 0
    for address in weights:
        blocks += _blocks(array(address, 2, dtype))
    first, end = blocks * thread // threads, blocks * (thread + 1) // threads
    for index, address in enumerate(weights):
        weight, y = array(address, 2, dtype), array(call.results[index], 2, float32)
        count = _blocks(weight)
        for block in range(max(first - passed, 0), min(end - passed, count)):
            _multiply_block(y, call.addend, call.added, factor, weight, block, scratch)
        passed += count


@compiled
def _multiply_block(
    y: np.ndarray, addend: np.ndarray, added: bool, factor: Any, weight: np.ndarray, block: int, scratch: Any
) -> None:
    """One block's columns of y [rows, columns] = factor [rows, inner] times weight [columns, inner], with the addend
    [rows, columns] or not."""
    (rows, width), size, row = y.shape, weight.shape[1], 0
    first, count = _block_columns(block, _columns(weight), width)
    while row < rows:
        group = _group(rows - row)
        x, begin = shifted(factor, row * size), pointer(weight, first * size)
        _multiply_group(group, row == 0, x, begin, size, count, scratch)
        for index in range(group):
            sums, at = shifted(scratch, index * MOST), (row + index) * width + first
            _store_row(sums, count, pointer(y, 0), pointer(addend, 0), added, at)
        row += group


@compiled
def _store_row(sums: Any, count: int, y: Any, addend: Any, added: bool, at: int) -> None:
    """y[at : at + count] = sums, plus the addend or not."""
    whole = count // LANES * LANES
    for column in range(0, whole, LANES):
        vector = load(sums, column)
        store(y, at + column, add(vector, load(addend, at + column)) if added else vector)
    for column in range(whole, count):
        y[at + column] = sums[column] + addend[at + column] if added else sums[column]


@compiled
def _multiply_group(group: int, new: bool, x: Any, weight: Any, size: int, count: int, target: Any) -> None:
    """`target` [group, count], its rows MOST apart: x [group, inner] times weight [count, inner]. The weight is `new`
    if the caches do not hold it yet."""
    if count % ACROSS != 0:
        for index in range(group):
            row, to = shifted(x, index * size), shifted(target, index * MOST)
            _multiply_rows(1, 1, new, row, weight, size, (0, size), count, to)
    elif group == ROWS:
        span = size if new else TERMS
        for first in range(0, size, span):
            _multiply_rows(ROWS, ACROSS, new, x, weight, size, (first, min(first + span, size)), count, target)
    elif group == 4:
        _multiply_rows(4, ACROSS, new, x, weight, size, (0, size), count, target)
    elif group == 2:
        _multiply_rows(2, 1, new, x, weight, size, (0, size), count, target)
    else:
        _multiply_rows(1, 1, new, x, weight, size, (0, size), count, target)


@compiled
def _multiply_rows(
    group: int, across: int, new: bool, x: Any, weight: Any, size: int, span: tuple[int, int], count: int, target: Any
) -> None:
    """The same `across` columns at a time, which must divide `count`, and for a span of the inner terms, which are
    summed TERMS at a time and added to what earlier terms gave. Each cache line of a new weight is requested once."""
    (first, end), line = span, numbers_of_line(weight)
    for column in range(0, count, literally(across)):
        lines, sums = shifted(weight, column * size), shifted(target, column)
        for begin in range(first, end, TERMS):
            after, block = min(begin + TERMS, end), zeros_block(literally(group), literally(across))
            whole = after - (after - begin) % line if new else begin
            for i in range(begin, whole, line):
                prefetch_rows(literally(across), shifted(lines, i * across + AHEAD * line), line)
                for j in range(i, i + line, LANES):
                    block = add_lanes(block, shifted(x, j), size, shifted(lines, j), size)
            for i in range(whole, after, LANES):
                block = add_lanes(block, shifted(x, i), size, shifted(lines, i), size)
            if begin > 0:
                add_sums(sums, MOST, 1, block)
            else:
                store_sums(sums, MOST, 1, block)


@compiled
def _group(left: int) -> int:
    """Rows of the next group, of `left` ones."""
    if left >= ROWS:
        return ROWS
    return 4 if left >= 4 else min(left, 2)


@compiled
def _block_columns(block: int, columns: int, width: int) -> tuple[int, int]:
    """First column of a block and their number. The last block overlaps the one before, with the same results."""
    first = max(min(block * columns, width - columns), 0)
    return first, min(columns, width - first)


@compiled
def _columns(weight: np.ndarray) -> int:
    """Columns of a block: a multiple of ACROSS, or all of them if they are very few."""
    width, size = weight.shape
    fit = BLOCK_BYTES // (size * weight.itemsize) // ACROSS * ACROSS
    return width if width < LEAST else min(max(fit, LEAST), MOST, width // ACROSS * ACROSS)


@compiled
def _blocks(weight: np.ndarray) -> int:
    return -(-weight.shape[0] // _columns(weight))


@compiled
def _regions(workspace: np.ndarray, rows: int, size: int, width: int, thread: int) -> tuple[Any, Any, Any]:
    """Of the workspace: prepared rows of x, gated rows, and a thread's sums of a group, twice."""
    prepared = pointer(workspace, 0)
    hidden = shifted(prepared, rows * size)
    return prepared, hidden, shifted(hidden, rows * width + thread * 2 * ROWS * MOST)


def workspace_size(rows: int, size: int, width: int, threads: int) -> int:
    """float32 numbers: rows of x [rows, size], gated rows [rows, width], each thread's sums."""
    return rows * (size + width) + threads * 2 * ROWS * MOST


def kernel(dtype: np.dtype, threads: int, parallel: bool, message: np.ndarray) -> Handler:
    """For weights of this dtype; `read_call` lists arguments and results."""

    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        call = read_call(frame, dtype)
        try:
            if parallel:
                _multiply_parallel(call, threads, dtype)
            else:
                _multiply_sequential(call, threads, dtype)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler
