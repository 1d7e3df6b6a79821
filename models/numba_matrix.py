"""Matrix products on a CPU's matrix units, compiled by Numba: bfloat16 weights, as they are stored, by float32 rows.

The rows are rounded to bfloat16 and packed as the units want one factor; the weights, which are larger, are the other
and are read straight from where they lie. What is computed for a row does not depend on the others.

    a tile of sums      16 columns of the result by 16 rows of x, transposed when it is stored
    a block             two tiles of columns, neighbours or the same columns of gate and up, by the rows of a panel

Works on plain arrays: knows nothing about JAX or models.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import njit, prange, types, uint16

from dcpjax.models.numba_call import arguments, results
from dcpjax.models.numba_call import array as array_of
from dcpjax.models.numba_tile import (
    SIZE,
    TERMS,
    TILE,
    clear_tile,
    configure_tiles,
    load_tile,
    multiply_tiles,
    pack_pairs,
    release_tiles,
    store_tile,
    transpose,
)
from dcpjax.models.numba_vector import LANES, load, multiply, pointer, prefetch, shifted, silu, store

PANEL_BYTES = 2**20  # of packed rows that stay in a core's cache while all weights meet them
ALONE = 4  # tiles of rows at most that are packed by one thread: a second one costs more to wake
ROW = 4 * LANES  # bytes in a row of packed tiles and of sums
SCRATCH = 5 * SIZE  # float32 numbers for a thread's four tiles of sums and one turned

_compile = njit(error_model="numpy", nogil=True, cache=True)
_rows_at, _weight_at, _numbers_at = array_of(2, types.float32), array_of(2, uint16), array_of(1, types.float32)


@_compile
def multiply_in_turn(given: np.ndarray, made: np.ndarray, threads: int, gated: bool) -> None:
    """Each result [N, O] = x [N, I] float32 times its weight [O, I]; O at least TILE, I a multiple of TERMS.

    `given`: addresses of x and of the weights, bfloat16; `made`: those of the results, float32, and of a workspace
    [`workspace_size`] float32. `gated`: the weights are gate and up, the only result is silu(x gate) * (x up).
    """
    for tile in range(_tiles(_rows_at(given[0]).shape[0])):
        _pack(tile, given, made)
    _multiply_share(0, 1, given, made, gated)


@njit(error_model="numpy", nogil=True, cache=True, parallel=True)
def multiply_in_parallel(given: np.ndarray, made: np.ndarray, threads: int, gated: bool) -> None:
    tiles = _tiles(_rows_at(given[0]).shape[0])
    if tiles <= ALONE:
        for tile in range(tiles):
            _pack(tile, given, made)
    else:
        for tile in prange(tiles):
            _pack(tile, given, made)
    for thread in prange(threads):
        _multiply_share(thread, threads, given, made, gated)


@_compile
def _pack(tile: int, given: np.ndarray, made: np.ndarray) -> None:
    """TILE rows of x as the other factor of `multiply_tiles`."""
    x, workspace = _rows_at(given[0]), _numbers_at(made[-1])
    first, size = tile * TILE, x.shape[1]
    rows, packed = pointer(x, first * size), pointer(workspace, first * size // 2)
    for term in range(0, size, TERMS):
        pack_pairs(shifted(rows, term), size, x.shape[0] - first, shifted(packed, term // TERMS * SIZE))


@_compile
def _multiply_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray, gated: bool) -> None:
    """One thread's blocks of all results: neighbours, as they lie in memory."""
    workspace, (rows, size) = _numbers_at(made[-1]), _rows_at(given[0]).shape
    width, blocks = TILE if gated else 2 * TILE, 0
    for y in made[:-1]:
        blocks += _blocks(_rows_at(y), width)
    first, end = blocks * thread // threads, blocks * (thread + 1) // threads
    scratch = pointer(workspace, _tiles(rows) * TILE * size // 2 + thread * SCRATCH)
    panel = max(PANEL_BYTES // (4 * TILE * size), 1) * 2
    configure_tiles()
    for tile in range(0, _tiles(rows), panel):
        passed, tiles = 0, (tile, min(tile + panel, _tiles(rows)))
        for index, place in enumerate(made[:-1]):
            y, weight, other = _rows_at(place), _weight_at(given[1 + index]), _weight_at(given[1 + index + gated])
            count = _blocks(y, width)
            for block in range(max(first - passed, 0), min(end - passed, count)):
                at, last = block * width, y.shape[1] - TILE
                columns = min(at, last), min(at if gated else at + TILE, last)
                factors = pointer(weight, columns[0] * size), pointer(other, columns[1] * size), width * size
                _multiply_block(y, factors, pointer(workspace, 0), size, tiles, columns, gated, scratch)
            passed += count
    release_tiles()


@_compile
def _multiply_block(
    y: np.ndarray,
    factors: Any,
    packed: Any,
    size: int,
    tiles: tuple[int, int],
    columns: tuple[int, int],
    gated: bool,
    scratch: Any,
) -> None:
    """Two tiles of columns by tiles of rows, the first and the one after the last.

    `factors`: weights of either tile, and how much further those of the next block are. They are asked for meanwhile.
    """
    left, right, step = factors
    pairs = (tiles[1] - tiles[0] + 1) // 2
    lines, ahead = max(TILE // pairs, 1), (shifted(left, step), shifted(right, step))
    for pair in range(pairs):
        tile = tiles[0] + 2 * pair
        other = min(tile + 1, tiles[1] - 1)
        rows = shifted(packed, tile * TILE * size // 2), shifted(packed, other * TILE * size // 2)
        _multiply_pair(left, right, rows, size, ahead, lines)
        ahead = shifted(ahead[0], lines * size), shifted(ahead[1], lines * size)
        for half in range(1 + other - tile):
            sums = shifted(scratch, half * 2 * SIZE)
            if half == 0:
                store_tile(0, sums, ROW)
                store_tile(1, shifted(sums, SIZE), ROW)
            else:
                store_tile(2, sums, ROW)
                store_tile(3, shifted(sums, SIZE), ROW)
            row, turned = (tile + half) * TILE, shifted(scratch, 4 * SIZE)
            if gated:
                _gate(sums)
            else:
                _put(shifted(sums, SIZE), turned, y, row, columns[1])
            _put(sums, turned, y, row, columns[0])


@_compile
def _multiply_pair(left: Any, right: Any, rows: Any, size: int, ahead: Any, lines: int) -> None:
    """Two tiles of columns by two of rows: sums 0 and 1 are those of the first rows. Asks for so many cache lines of
    either side ahead with each step."""
    clear_tile(0)
    clear_tile(1)
    clear_tile(2)
    clear_tile(3)
    for term in range(0, size, TERMS):
        for line in range(lines):
            prefetch(ahead[0], term * lines + line * TERMS)
            prefetch(ahead[1], term * lines + line * TERMS)
        at = term // TERMS * SIZE
        load_tile(4, shifted(left, term), 2 * size)
        load_tile(6, shifted(rows[0], at), ROW)
        multiply_tiles(0, 4, 6)
        load_tile(5, shifted(right, term), 2 * size)
        multiply_tiles(1, 5, 6)
        load_tile(7, shifted(rows[1], at), ROW)
        multiply_tiles(2, 4, 7)
        multiply_tiles(3, 5, 7)


@_compile
def _gate(sums: Any) -> None:
    """The first tile becomes its silu times the second."""
    for i in range(0, SIZE, LANES):
        store(sums, i, multiply(silu(load(sums, i)), load(sums, SIZE + i)))


@_compile
def _put(sums: Any, turned: Any, y: np.ndarray, row: int, column: int) -> None:
    """A tile of sums to its place."""
    transpose(sums, turned)
    columns = y.shape[1]
    to = pointer(y, row * columns + column)
    for i in range(min(TILE, y.shape[0] - row)):
        store(to, i * columns, load(turned, i * LANES))


@_compile
def _blocks(y: np.ndarray, width: int) -> int:
    return -(-y.shape[1] // width)


@_compile
def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def workspace_size(rows: int, size: int, threads: int) -> int:
    """float32 numbers: packed rows, which take half as many, and each thread's scratch."""
    return -(-rows // TILE) * TILE * size // 2 + threads * SCRATCH


def kernel(threads: int, gated: bool) -> Any:
    """A custom call (x [N, I] float32, weights [O, I] bfloat16 ...) -> results [N, O] float32 ... and a workspace."""
    multiply = multiply_in_parallel if threads > 1 else multiply_in_turn

    @njit(inline="always")
    def run(frame: np.ndarray) -> None:
        multiply(arguments(frame), results(frame), threads, gated)

    return run
