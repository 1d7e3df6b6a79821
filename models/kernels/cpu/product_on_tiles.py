"""Matrix products on a CPU's matrix units, compiled by Numba: bfloat16 weights, as they are stored, by float32 rows.

The rows are rounded to bfloat16 and packed as the units take one factor; the weights, which are larger, are the other
factor and are read straight from where they lie. What is computed for a row does not depend on the other rows.

    a tile of sums      16 columns of a result by 16 rows of x
    a panel             packed rows that stay in a core's cache while all weights meet them
    a block             two tiles of columns, neighbours or the same columns of gate and up, by the rows of a panel
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any, NamedTuple

import numpy as np
from numba import float32, prange, uint16

from dcpjax.models.kernels.cpu.compile import both, compiled, shared_with_python
from dcpjax.models.kernels.cpu.product import normalize, read_call
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
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, Handler, array, error, is_call

PANEL_BYTES = 2**20  # of packed rows
SEQUENTIAL_TILES = 4  # so many tiles of rows are packed by one thread: a second one costs more to wake
SCRATCH = 5 * SIZE  # float32 numbers for a thread's four tiles of sums and one transposed tile


class Factors(NamedTuple):
    """Weights of a block."""

    left: Any  # pointer to those of the first tile of columns
    right: Any  # pointer to those of the second one
    step: int  # how much further those of the next block are, which are requested from memory meanwhile


class Result(NamedTuple):
    """Where a block's sums go."""

    y: np.ndarray  # [rows, columns] float32
    addend: np.ndarray  # [rows, columns] float32
    hidden: Any  # pointer to gated rows, packed
    width: int  # columns of the gated rows


def _multiply(call: Any, threads: int) -> None:
    """Fill in the results of a ProductCall; columns at least TILE, inner sizes multiples of TERMS.

    Nothing in a thread allocates or raises, so no exception can be lost there.
    """
    # prange counts in uint64, for which the functions would be compiled once more
    if _tiles(call.x.shape[0]) <= SEQUENTIAL_TILES:
        _pack_rows(0, 1, call)
    else:
        for thread in prange(threads):
            _pack_rows(np.int64(thread), threads, call)
    if call.gated:
        for thread in prange(threads):
            _gate_columns(np.int64(thread), threads, call)
    for thread in prange(threads):
        _multiply_columns(np.int64(thread), threads, call)


_multiply_parallel, _multiply_sequential = both(_multiply)


@compiled
def _pack_rows(thread: int, threads: int, call: Any) -> None:
    """One thread's tiles of rows of x, normed or not, as the other factor of `multiply_tiles`."""
    (rows, size), norm, width = call.x.shape, pointer(call.norm_weight, 0), _gated_width(call)
    packed, _, _, normed = _regions(call.workspace, rows, size, width, thread)
    for tile in range(thread, _tiles(rows), threads):
        count, source = min(rows - tile * TILE, TILE), pointer(call.x, tile * TILE * size)
        if call.normed:
            for row in range(count):
                normalize(shifted(source, row * size), norm, call.epsilon, size, shifted(normed, row * size))
            source = normed
        for term in range(0, size, TERMS):
            pack_pairs(shifted(source, term), size, count, shifted(packed, (tile * size + term) // TERMS * SIZE))


@compiled
def _gate_columns(thread: int, threads: int, call: Any) -> None:
    """One thread's columns of silu(x gate) * (x up), packed, after the rows of x."""
    x, gate, up = call.x, array(call.weights[0], 2, uint16), array(call.weights[1], 2, uint16)
    (rows, size), width = x.shape, gate.shape[0]
    packed, hidden, scratch, _ = _regions(call.workspace, rows, size, width, thread)
    blocks, panel = width // TILE, _panel(size)
    configure_tiles()
    for tile in range(0, _tiles(rows), panel):
        tiles = tile, min(tile + panel, _tiles(rows))
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            column = block * TILE
            factors = Factors(pointer(gate, column * size), pointer(up, column * size), TILE * size)
            target = Result(x, x, hidden, width)  # only the gated rows are written
            _multiply_block(factors, packed, size, tiles, scratch, target, (column, column), True, False)
    release_tiles()


@compiled
def _multiply_columns(thread: int, threads: int, call: Any) -> None:
    """One thread's columns of all results: neighbours, as they lie in memory."""
    (rows, inner), width = call.x.shape, _gated_width(call)
    packed, hidden, scratch, _ = _regions(call.workspace, rows, inner, width, thread)
    tiles, weights, factor = _tiles(rows), call.weights[2 if width else 0 :], hidden if width else packed
    size, blocks = array(weights[0], 2, uint16).shape[1], 0
    for address in weights:
        blocks += _blocks(array(address, 2, uint16))
    first, end, panel = blocks * thread // threads, blocks * (thread + 1) // threads, _panel(size)
    configure_tiles()
    for tile in range(0, tiles, panel):
        passed, own_tiles = 0, (tile, min(tile + panel, tiles))
        for index, address in enumerate(weights):
            weight = array(address, 2, uint16)
            target = Result(array(call.results[index], 2, float32), call.addend, hidden, width)
            count, last = _blocks(weight), weight.shape[0] - TILE
            for block in range(max(first - passed, 0), min(end - passed, count)):
                columns = min(2 * block * TILE, last), min((2 * block + 1) * TILE, last)
                left, right = pointer(weight, columns[0] * size), pointer(weight, columns[1] * size)
                factors = Factors(left, right, 2 * TILE * size)
                _multiply_block(factors, factor, size, own_tiles, scratch, target, columns, False, call.added)
            passed += count
    release_tiles()


@compiled
def _multiply_block(
    factors: Any,
    packed: Any,
    size: int,
    tiles: tuple[int, int],
    scratch: Any,
    target: Any,
    columns: tuple[int, int],
    gated: bool,
    added: bool,
) -> None:
    """Two tiles of columns (Factors), which begin at `columns`, by packed tiles of rows, from the first of `tiles` to
    before the second, into a Result."""
    y, addend, hidden, width = target
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
            sums, transposed = shifted(scratch, half * 2 * SIZE), shifted(scratch, 4 * SIZE)
            if gated:
                _gate(sums, shifted(hidden, (tile + half) * TILE * width // 2 + columns[0] // 2 * TILE))
            else:
                _store(sums, transposed, y, addend, added, (tile + half) * TILE, columns[0])
                _store(shifted(sums, SIZE), transposed, y, addend, added, (tile + half) * TILE, columns[1])


@compiled
def _multiply_pair(left: Any, right: Any, rows: Any, size: int, ahead: Any, lines: int) -> None:
    """Two tiles of columns by two of rows: tiles 0 and 1 are sums of the first rows. With each step `lines` cache lines
    of either side are requested from memory, at `ahead`."""
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
    """silu of a tile times the next tile, packed: columns two by two."""
    for column in range(0, SIZE, 2 * LANES):
        first, second = _gated(sums, column), _gated(sums, column + LANES)
        store(packed, column // 2, paired(first, second))


@compiled
def _gated(sums: Any, at: int) -> Any:
    return multiply(silu(load(sums, at)), load(sums, SIZE + at))


@compiled
def _store(sums: Any, transposed: Any, y: np.ndarray, addend: np.ndarray, added: bool, row: int, column: int) -> None:
    """A tile of sums -> y from [row, column] on, plus the addend or not."""
    transpose(sums, LANES, transposed, LANES)
    columns = y.shape[1]
    first = row * columns + column
    for i in range(min(TILE, y.shape[0] - row)):
        vector, at = load(transposed, i * LANES), first + i * columns
        store(pointer(y, at), 0, add(vector, load(pointer(addend, at), 0)) if added else vector)


@compiled
def _regions(workspace: np.ndarray, rows: int, size: int, width: int, thread: int) -> tuple[Any, Any, Any, Any]:
    """Of the workspace: packed rows of x, packed gated rows, a thread's scratch and its TILE normed rows."""
    packed = pointer(workspace, 0)
    hidden = shifted(packed, _tiles(rows) * TILE * size // 2)
    scratch = shifted(hidden, _tiles(rows) * TILE * width // 2 + thread * (SCRATCH + TILE * size))
    return packed, hidden, scratch, shifted(scratch, SCRATCH)


@compiled
def _gated_width(call: Any) -> int:
    return array(call.weights[0], 2, uint16).shape[0] if call.gated else 0


@compiled
def _panel(size: int) -> int:
    """Tiles of rows in a panel, an even number."""
    return max(PANEL_BYTES // (4 * TILE * size), 1) * 2


@compiled
def _blocks(weight: np.ndarray) -> int:
    return -(-weight.shape[0] // (2 * TILE))


@shared_with_python
def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def workspace_size(rows: int, size: int, width: int, threads: int) -> int:
    """float32 numbers: packed rows of x [rows, size] and gated rows [rows, width], both bfloat16, and each thread's
    scratch and normed rows."""
    return _tiles(rows) * TILE * (size + width) // 2 + threads * (SCRATCH + TILE * size)


def kernel(threads: int, parallel: bool, message: np.ndarray) -> Handler:
    """For bfloat16 weights; `product.read_call` lists arguments and results."""

    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        call = read_call(frame, uint16)
        try:
            if parallel:
                _multiply_parallel(call, threads)
            else:
                _multiply_sequential(call, threads)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler
