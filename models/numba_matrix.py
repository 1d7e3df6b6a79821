"""Matrix products on a CPU's matrix units, compiled by Numba: bfloat16 weights, as they are stored, by float32 rows.

The rows are rounded to bfloat16 and packed as the units want one factor; the weights, which are larger, are the other
and are read straight from where they lie. What is computed for a row does not depend on the others.

    a tile of sums      16 columns of a result by 16 rows of x
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
    paired,
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
    [`workspace_size`] float32. `gated`: before the others gate and up [F, I] are given; what meets them [F, N], F a
    multiple of TERMS, is silu(x gate) * (x up), rounded to bfloat16. All on one core.
    """
    _pack_share(0, 1, given, made)
    if gated:
        _gate_share(0, 1, given, made)
    _multiply_share(0, 1, given, made, gated)


@njit(error_model="numpy", nogil=True, cache=True, parallel=True)
def multiply_in_parallel(given: np.ndarray, made: np.ndarray, threads: int, gated: bool) -> None:
    if _tiles(_rows_at(given[0]).shape[0]) <= ALONE:
        _pack_share(0, 1, given, made)
    else:
        for thread in prange(threads):
            _pack_share(thread, threads, given, made)
    if gated:
        for thread in prange(threads):
            _gate_share(thread, threads, given, made)
    for thread in prange(threads):
        _multiply_share(thread, threads, given, made, gated)


@_compile
def _pack_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray) -> None:
    """Rows of x as the other factor of `multiply_tiles`."""
    x, workspace = _rows_at(given[0]), _numbers_at(made[-1])
    rows, size = x.shape
    for tile in range(thread, _tiles(rows), threads):
        source, packed = pointer(x, tile * TILE * size), pointer(workspace, tile * TILE * size // 2)
        for term in range(0, size, TERMS):
            pack_pairs(shifted(source, term), size, rows - tile * TILE, shifted(packed, term // TERMS * SIZE))


@_compile
def _gate_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray) -> None:
    """One thread's columns of gate and up. What becomes of them is packed, after the rows of x."""
    x, gate, up, workspace = _rows_at(given[0]), _weight_at(given[1]), _weight_at(given[2]), _numbers_at(made[-1])
    (rows, size), width = x.shape, gate.shape[0]
    packed, hidden, scratch = _regions(workspace, rows, size, width, thread)
    blocks, panel = width // TILE, _panel(size)
    configure_tiles()
    for tile in range(0, _tiles(rows), panel):
        tiles = tile, min(tile + panel, _tiles(rows))
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            column = block * TILE
            factors = pointer(gate, column * size), pointer(up, column * size), TILE * size
            _multiply_block(factors, packed, size, tiles, scratch, (x, hidden, width), (column, column), True)
    release_tiles()


@_compile
def _multiply_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray, gated: bool) -> None:
    """One thread's columns of all results: neighbours, as they lie in memory."""
    x, workspace, weights = _rows_at(given[0]), _numbers_at(made[-1]), given[3:] if gated else given[1:]
    rows, width = x.shape[0], _weight_at(given[1]).shape[0] if gated else 0
    packed, hidden, scratch = _regions(workspace, rows, x.shape[1], width, thread)
    size, blocks = _weight_at(weights[0]).shape[1], 0
    factor, panel = hidden if gated else packed, _panel(size)
    for weight in weights:
        blocks += _blocks(_weight_at(weight))
    first, end = blocks * thread // threads, blocks * (thread + 1) // threads
    configure_tiles()
    for tile in range(0, _tiles(rows), panel):
        passed, tiles = 0, (tile, min(tile + panel, _tiles(rows)))
        for index, place in enumerate(weights):
            weight, y = _weight_at(place), _rows_at(made[index])
            count, last = _blocks(weight), weight.shape[0] - TILE
            for block in range(max(first - passed, 0), min(end - passed, count)):
                columns = min(2 * block * TILE, last), min((2 * block + 1) * TILE, last)
                factors = pointer(weight, columns[0] * size), pointer(weight, columns[1] * size), 2 * TILE * size
                _multiply_block(factors, factor, size, tiles, scratch, (y, hidden, width), columns, False)
            passed += count
    release_tiles()


@_compile
def _multiply_block(
    factors: Any,
    packed: Any,
    size: int,
    tiles: tuple[int, int],
    scratch: Any,
    to: Any,
    columns: tuple[int, int],
    gated: bool,
) -> None:
    """Two tiles of columns by tiles of rows, the first and the one after the last.

    `factors`: weights of either tile, and how much further those of the next block are. They are asked for meanwhile.
    `to`: y; what is gated, which has so many columns.
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
        store_tile(0, scratch, ROW)
        store_tile(1, shifted(scratch, SIZE), ROW)
        store_tile(2, shifted(scratch, 2 * SIZE), ROW)
        store_tile(3, shifted(scratch, 3 * SIZE), ROW)
        for half in range(1 + other - tile):
            sums, turned = shifted(scratch, half * 2 * SIZE), shifted(scratch, 4 * SIZE)
            if gated:
                place = (tile + half) * TILE * to[2] // 2 + columns[0] // 2 * TILE
                _gate(sums, shifted(to[1], place))
            else:
                _put(sums, turned, to[0], (tile + half) * TILE, columns[0])
                _put(shifted(sums, SIZE), turned, to[0], (tile + half) * TILE, columns[1])


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
def _gate(sums: Any, packed: Any) -> None:
    """A tile's silu times the next one, columns two by two, which is how they are packed."""
    for column in range(0, SIZE, 2 * LANES):
        first, second = _gated(sums, column), _gated(sums, column + LANES)
        store(packed, column // 2, paired(first, second))


@_compile
def _gated(sums: Any, at: int) -> Any:
    return multiply(silu(load(sums, at)), load(sums, SIZE + at))


@_compile
def _put(sums: Any, turned: Any, y: np.ndarray, row: int, column: int) -> None:
    """A tile of sums to its place."""
    transpose(sums, turned)
    columns = y.shape[1]
    to = pointer(y, row * columns + column)
    for i in range(min(TILE, y.shape[0] - row)):
        store(to, i * columns, load(turned, i * LANES))


@_compile
def _regions(workspace: np.ndarray, rows: int, size: int, width: int, thread: int) -> tuple[Any, Any, Any]:
    """Packed rows of x, packed rows of what is gated, a thread's scratch."""
    packed = pointer(workspace, 0)
    hidden = shifted(packed, _tiles(rows) * TILE * size // 2)
    return packed, hidden, shifted(hidden, _tiles(rows) * TILE * width // 2 + thread * SCRATCH)


@_compile
def _panel(size: int) -> int:
    """Tiles of packed rows, an even number."""
    return max(PANEL_BYTES // (4 * TILE * size), 1) * 2


@_compile
def _blocks(weight: np.ndarray) -> int:
    return -(-weight.shape[0] // (2 * TILE))


@_compile
def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def workspace_size(rows: int, size: int, width: int, threads: int) -> int:
    """float32 numbers: packed rows of x and of what is gated, `width` columns, which take half as many, and each
    thread's scratch."""
    return -(-rows // TILE) * TILE * (size + width) // 2 + threads * SCRATCH


def kernel(threads: int, gated: bool) -> Any:
    """A custom call (x [N, I] float32, weights bfloat16 ...) -> results [N, O] float32 ... and a workspace."""
    multiply = multiply_in_parallel if threads > 1 else multiply_in_turn

    @njit(inline="always")
    def run(frame: np.ndarray) -> None:
        multiply(arguments(frame), results(frame), threads, gated)

    return run
