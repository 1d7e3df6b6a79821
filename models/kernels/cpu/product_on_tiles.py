"""Matrix products on a CPU's matrix units, compiled by Numba: bfloat16 weights, as they are stored, by float32 rows.

The rows are rounded to bfloat16 and packed as the units want one factor; the weights, which are larger, are the other
and are read straight from where they lie. What is computed for a row does not depend on the others.

    a tile of sums      16 columns of a result by 16 rows of x
    a block             two tiles of columns, neighbours or the same columns of gate and up, by the rows of a panel

Works on plain arrays: knows nothing about JAX or models.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, njit, prange, uint16

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.product import WEIGHTS, normalize
from dcpjax.models.kernels.cpu.tile import (
    ROW,
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
from dcpjax.models.kernels.cpu.vector import LANES, add, load, multiply, pointer, prefetch, shifted, silu, store
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, arguments, array, is_call, results

PANEL_BYTES = 2**20  # of packed rows that stay in a core's cache while all weights meet them
ALONE = 4  # tiles of rows at most that are packed by one thread: a second one costs more to wake
SCRATCH = 5 * SIZE  # float32 numbers for a thread's four tiles of sums and one turned


@njit(inline="always")
def _multiply(given: np.ndarray, made: np.ndarray, threads: int) -> None:
    """Each result [N, O] = x [N, I] float32 times its weight [O, I]; O at least TILE, I a multiple of TERMS.

    `given`: addresses of x, of `settings`, of a norm's weight [I], of what is added to the only result, [N, O] float32,
    and of the weights; weights are bfloat16. `made`: those of the results, float32, and of a workspace
    [`workspace_size`] float32.

    Settings, float32 [4]: whether gate and up [F, I] are the first two weights; then what meets the next one [F, N],
    F a multiple of TERMS, is silu(x gate) * (x up), rounded to bfloat16. Whether x is normed, whether something is
    added, the norm's epsilon.
    """
    if _tiles(array(given[0], 2, float32).shape[0]) <= ALONE:
        _pack_share(0, 1, given, made)
    else:
        for thread in prange(threads):
            _pack_share(np.int64(thread), threads, given, made)  # for prange's uint64 it would be compiled once more
    if array(given[1], 1, float32)[0] != 0.0:
        for thread in prange(threads):
            _gate_share(np.int64(thread), threads, given, made)
    for thread in prange(threads):
        _multiply_share(np.int64(thread), threads, given, made)


@compiled
def _pack_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray) -> None:
    """Rows of x, normed or not, as the other factor of `multiply_tiles`."""
    x, settings, norm = array(given[0], 2, float32), array(given[1], 1, float32), pointer(array(given[2], 1, uint16), 0)
    (rows, size), width = x.shape, _gated_width(given)
    packed, _, _, normed = _regions(array(made[-1], 1, float32), rows, size, width, thread)
    for tile in range(thread, _tiles(rows), threads):
        count, source = min(rows - tile * TILE, TILE), pointer(x, tile * TILE * size)
        if settings[1] != 0.0:
            for row in range(count):
                normalize(shifted(source, row * size), norm, settings[3], size, shifted(normed, row * size))
            source = normed
        for term in range(0, size, TERMS):
            pack_pairs(shifted(source, term), size, count, shifted(packed, (tile * size + term) // TERMS * SIZE))


@compiled
def _gate_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray) -> None:
    """One thread's columns of gate and up. What becomes of them is packed, after the rows of x."""
    x, gate, up = array(given[0], 2, float32), array(given[WEIGHTS], 2, uint16), array(given[WEIGHTS + 1], 2, uint16)
    (rows, size), width = x.shape, gate.shape[0]
    packed, hidden, scratch, _ = _regions(array(made[-1], 1, float32), rows, size, width, thread)
    blocks, panel = width // TILE, _panel(size)
    configure_tiles()
    for tile in range(0, _tiles(rows), panel):
        tiles = tile, min(tile + panel, _tiles(rows))
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            column = block * TILE
            factors, to = (pointer(gate, column * size), pointer(up, column * size), TILE * size), (x, x, hidden, width)
            _multiply_block(factors, packed, size, tiles, scratch, to, (column, column), True, False)
    release_tiles()


@compiled
def _multiply_share(thread: int, threads: int, given: np.ndarray, made: np.ndarray) -> None:
    """One thread's columns of all results: neighbours, as they lie in memory."""
    x, settings, onto = array(given[0], 2, float32), array(given[1], 1, float32), array(given[3], 2, float32)
    width = _gated_width(given)
    packed, hidden, scratch, _ = _regions(array(made[-1], 1, float32), x.shape[0], x.shape[1], width, thread)
    tiles, weights, factor = _tiles(x.shape[0]), given[WEIGHTS + 2 if width else WEIGHTS :], hidden if width else packed
    size, blocks = array(weights[0], 2, uint16).shape[1], 0
    for weight in weights:
        blocks += _blocks(array(weight, 2, uint16))
    first, end, panel = blocks * thread // threads, blocks * (thread + 1) // threads, _panel(size)
    configure_tiles()
    for tile in range(0, tiles, panel):
        passed, own = 0, (tile, min(tile + panel, tiles))
        for index, place in enumerate(weights):
            weight, to = array(place, 2, uint16), (array(made[index], 2, float32), onto, hidden, width)
            count, last = _blocks(weight), weight.shape[0] - TILE
            for block in range(max(first - passed, 0), min(end - passed, count)):
                columns = min(2 * block * TILE, last), min((2 * block + 1) * TILE, last)
                factors = pointer(weight, columns[0] * size), pointer(weight, columns[1] * size), 2 * TILE * size
                _multiply_block(factors, factor, size, own, scratch, to, columns, False, settings[2] != 0.0)
            passed += count
    release_tiles()


@compiled
def _multiply_block(
    factors: Any,
    packed: Any,
    size: int,
    tiles: tuple[int, int],
    scratch: Any,
    to: Any,
    columns: tuple[int, int],
    gated: bool,
    added: bool,
) -> None:
    """Two tiles of columns by tiles of rows, the first and the one after the last.

    `factors`: weights of either tile, and how much further those of the next block are. They are asked for meanwhile.
    `to`: y and what is added to it; what is gated, which has so many columns.
    """
    y, onto, hidden, width = to
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
                _gate(sums, shifted(hidden, (tile + half) * TILE * width // 2 + columns[0] // 2 * TILE))
            else:
                _put(sums, turned, y, onto, added, (tile + half) * TILE, columns[0])
                _put(shifted(sums, SIZE), turned, y, onto, added, (tile + half) * TILE, columns[1])


@compiled
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


@compiled
def _gate(sums: Any, packed: Any) -> None:
    """A tile's silu times the next one, columns two by two, which is how they are packed."""
    for column in range(0, SIZE, 2 * LANES):
        first, second = _gated(sums, column), _gated(sums, column + LANES)
        store(packed, column // 2, paired(first, second))


@compiled
def _gated(sums: Any, at: int) -> Any:
    return multiply(silu(load(sums, at)), load(sums, SIZE + at))


@compiled
def _put(sums: Any, turned: Any, y: np.ndarray, onto: np.ndarray, added: bool, row: int, column: int) -> None:
    """A tile of sums to its place."""
    transpose(sums, LANES, turned, LANES)
    columns = y.shape[1]
    first = row * columns + column
    for i in range(min(TILE, y.shape[0] - row)):
        own, at = load(turned, i * LANES), first + i * columns
        store(pointer(y, at), 0, add(own, load(pointer(onto, at), 0)) if added else own)


@compiled
def _regions(workspace: np.ndarray, rows: int, size: int, width: int, thread: int) -> tuple[Any, Any, Any, Any]:
    """Packed rows of x, packed rows of what is gated, a thread's scratch, its TILE normed rows."""
    packed = pointer(workspace, 0)
    hidden = shifted(packed, _tiles(rows) * TILE * size // 2)
    scratch = shifted(hidden, _tiles(rows) * TILE * width // 2 + thread * (SCRATCH + TILE * size))
    return packed, hidden, scratch, shifted(scratch, SCRATCH)


@compiled
def _gated_width(given: np.ndarray) -> int:
    return array(given[WEIGHTS], 2, uint16).shape[0] if array(given[1], 1, float32)[0] != 0.0 else 0


@compiled
def _panel(size: int) -> int:
    """Tiles of packed rows, an even number."""
    return max(PANEL_BYTES // (4 * TILE * size), 1) * 2


@compiled
def _blocks(weight: np.ndarray) -> int:
    return -(-weight.shape[0] // (2 * TILE))


@compiled
def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def workspace_size(rows: int, size: int, width: int, threads: int) -> int:
    """float32 numbers: packed rows of x and of what is gated, `width` columns, which take half as many, and each
    thread's scratch and normed rows."""
    return _tiles(rows) * TILE * (size + width) // 2 + threads * (SCRATCH + TILE * size)


def kernel(threads: int) -> Callable[[Any], int]:
    """A custom call: `given` -> `made` of `_multiply`."""

    def run(frame: Any) -> int:
        if is_call(frame):
            _multiply(arguments(frame), results(frame), threads)
        return NO_ERROR

    return run
