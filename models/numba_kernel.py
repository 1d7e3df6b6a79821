"""Paged attention of a few query tokens at a time on a CPU's vector units, compiled by Numba.

A work item is one tile and one KV head: the slots of its request are visited chunk by chunk, raised to float32 in
registers and folded into a running softmax, as the loop of `attention` does. Items share nothing, so a result does
not depend on how many threads there are, and the value of a slot that is hidden from a token is never multiplied.

Works on plain arrays: knows tiles, blocks and slots, knows nothing about JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, prange, types
from numba.extending import intrinsic

from dcpjax.models.numba_call import arguments
from dcpjax.models.numba_call import array as array_of
from dcpjax.models.numba_vector import LANES, horizontal_largest, larger, load, multiply_add, prefetch, store

CHUNK_SLOTS = 256  # scored before their shares are taken: keys, values and scores stay in the inner caches
TOGETHER = 4  # queries that meet a row of keys or values while it is in a register
COLUMNS = 2 * LANES  # of their sums that are in registers meanwhile

# sums may be reordered and fused; NaN and infinity keep their meaning
_compile = njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy", nogil=True, cache=True)


@_compile
def _attend_item(
    item: int,
    out: np.ndarray,
    lse: np.ndarray,
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    start: np.ndarray,
    tiles: np.ndarray,
    share: np.ndarray,
) -> None:
    """Fill in `out` and `lse` of the tokens of one tile, for one KV head.

    q [N, K, G, D] float32, scaled; keys [B, 1, K, D, P], values [B, 1, K, P, Y] as cached; positions and rows [N],
    table [R, W], start [T]: what `Work` and `Tiles` hold. `tiles`: how many there are, and tokens of each at most.
    `share` of the positions that is cached here: dcp, interleave, rank. out [N, K, G, Y], lse [N, K, G].
    """
    head, first = item // tiles[0], start[_mixed(item, tiles[0])]
    end = _end(rows, first, tiles[1])
    queries = q[first:end, head].copy()
    seen = np.repeat(_visible(positions[first:end], share), q.shape[2])
    after = table[rows[start[_mixed(item + 1, tiles[0])]], 0]
    part = _attend_tile(queries.reshape(-1, q.shape[3]), keys, values, head, table[rows[first]], seen, after)
    out[first:end, head] = part[0].reshape(queries.shape[0], q.shape[2], -1)
    lse[first:end, head] = part[1].reshape(queries.shape[0], -1)


@_compile
def attend_in_turn(arguments: Any) -> None:
    """All items on one core."""
    for item in range(arguments[9][0] * arguments[3].shape[2]):
        _attend_item(item, *arguments)


@njit(error_model="numpy", nogil=True, cache=True, parallel=True)
def attend_in_parallel(arguments: Any) -> None:
    """Threads get equal shares of the items."""
    for item in prange(arguments[9][0] * arguments[3].shape[2]):
        _attend_item(item, *arguments)


@_compile
def _mixed(item: int, tiles: int) -> int:
    """The tile of an item. Late tiles see more: mixed with early ones they make equal shares for the threads."""
    index = item % tiles
    return index // 2 if index % 2 == 0 else tiles - 1 - index // 2


@_compile
def _end(rows: np.ndarray, first: int, size: int) -> int:
    """Index after the last token of the tile: those of its request, `size` at most."""
    end = first + 1
    while end < min(first + size, rows.shape[0]) and rows[end] == rows[first]:
        end += 1
    return end


@_compile
def _visible(positions: np.ndarray, share: np.ndarray) -> np.ndarray:
    """How many slots of this rank each token sees, as `CacheGeometry.tokens_per_rank` counts: the request's first."""
    dcp, interleave, rank = share[0], share[1], share[2]
    seen = np.empty(positions.shape[0], np.int64)
    for token, position in enumerate(positions):
        stripes, rest = divmod(position + 1, dcp * interleave)
        seen[token] = stripes * interleave + min(max(rest - rank * interleave, 0), interleave)
    return seen


@_compile
def _attend_tile(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, kv_head: int, blocks: np.ndarray, seen: np.ndarray, after: int
) -> tuple[np.ndarray, np.ndarray]:
    """One request and KV head: q [Q, D] of all tokens' heads, blocks [W], seen [Q] -> out [Q, Y], lse [Q].

    Arithmetic on one part of the cache hides the wait for the next: keys, their values, the next keys and in the end
    those of the block `after`, with which another item begins.
    """
    queries, kv_heads, slots, width = q.shape[0], keys.shape[2], keys.shape[4], values.shape[4]
    size = min(slots, CHUNK_SLOTS)
    scores, out = np.empty((queries, size), np.float32), np.zeros((queries, width), np.float32)
    top, total = np.full(queries, np.float32(-np.inf), np.float32), np.zeros(queries, np.float32)
    all_keys, all_values = keys.reshape(-1), values.reshape(-1)
    done, last = 0, seen[-1]
    while done < last:
        first, offset = (blocks[done // slots] * kv_heads + kv_head) * slots * width, done % slots
        count = min(size, slots - offset, last - done)
        _score(q, all_keys, first + offset, slots, count, scores, all_values, first + offset * width)
        for query in range(queries):
            _soften(scores, query, min(max(seen[query] - done, 0), count), top, total, out)
        end = done + count
        upcoming = blocks[end // slots] if end < last else after
        ahead = (upcoming * kv_heads + kv_head) * slots * width + (end % slots if end < last else 0)
        _add_values(scores, seen - done, all_values, first + offset * width, count, out, all_keys, ahead)
        done = end
    return _finish(out, top, total)


@_compile
def _score(
    q: np.ndarray,
    keys: np.ndarray,
    first: int,
    slots: int,
    count: int,
    scores: np.ndarray,
    values: np.ndarray,
    ahead: int,
) -> None:
    """scores [Q, count or a few more] = q [Q, D] times slots of keys, from index `first` on, `slots` apart."""
    scores[:] = np.float32(0.0)
    columns, last = -(-count // COLUMNS) * COLUMNS, q.shape[0] - 1
    for query in range(0, q.shape[0], TOGETHER):
        end = min(query + TOGETHER - 1, last)
        _accumulate(scores, q, query, end, 0, q.shape[1], keys, first, slots, columns, values, ahead)


@_compile
def _soften(scores: np.ndarray, query: int, count: int, top: np.ndarray, total: np.ndarray, out: np.ndarray) -> None:
    """Scores of one query -> shares, and its running softmax brought up to date."""
    if count == 0:
        return
    before = top[query]
    top[query] = max(before, _largest(scores, query, count))
    shift = np.float32(0.0) if top[query] == -np.inf else top[query]
    keep = _exp(before - shift)
    total[query] = total[query] * keep + _exponentials(scores, query, count, shift)
    if keep != 1.0:
        _scale(out, query, keep)


@_compile
def _add_values(
    shares: np.ndarray,
    seen: np.ndarray,
    values: np.ndarray,
    first: int,
    count: int,
    out: np.ndarray,
    keys: np.ndarray,
    ahead: int,
) -> None:
    """out [Q, Y] += shares [Q, count] times slots of values from index `first` on, for each query what it sees."""
    width = out.shape[1]
    for query in range(0, out.shape[0], TOGETHER):
        last = min(query + TOGETHER, out.shape[0]) - 1
        common = min(max(seen[query], 0), count)  # later tokens of a tile see no less
        _accumulate(out, shares, query, last, 0, common, values, first, width, width, keys, ahead)
        for one in range(query + 1, last + 1):
            rest = min(max(seen[one], 0), count)
            _accumulate(out, shares, one, one, common, rest, values, first, width, width, keys, ahead)


@_compile
def _accumulate(
    sums: np.ndarray,
    weights: np.ndarray,
    query: int,
    last: int,
    row: int,
    end: int,
    stored: np.ndarray,
    first: int,
    stride: int,
    columns: int,
    other: np.ndarray,
    ahead: int,
) -> None:
    """sums [query .. last, columns] += weights [query .. last, row .. end] times rows of `stored`.

    Row 0 of it begins at index `first`, each next one `stride` further. The sums stay in registers. Where there are
    fewer than TOGETHER queries the last is computed repeatedly, and its result stored as often. With each row a
    portion of `other`, from index `ahead` on, is asked for.
    """
    if row >= end:
        return
    flat, factors, terms = sums.reshape(-1), weights.reshape(-1), weights.shape[1]
    b, c, d = min(query + 1, last), min(query + 2, last), last
    for column in range(0, columns, COLUMNS):
        to_a, to_b = query * sums.shape[1] + column, b * sums.shape[1] + column
        to_c, to_d = c * sums.shape[1] + column, d * sums.shape[1] + column
        a0, a1 = load(flat, to_a), load(flat, to_a + LANES)
        b0, b1 = load(flat, to_b), load(flat, to_b + LANES)
        c0, c1 = load(flat, to_c), load(flat, to_c + LANES)
        d0, d1 = load(flat, to_d), load(flat, to_d + LANES)
        for index in range(row, end):
            at = first + index * stride + column
            x0, x1 = load(stored, at), load(stored, at + LANES)
            prefetch(other, ahead)
            prefetch(other, ahead + LANES)
            ahead += COLUMNS
            factor = query * terms + index
            a0, a1 = multiply_add(factors, factor, x0, a0), multiply_add(factors, factor, x1, a1)
            factor = b * terms + index
            b0, b1 = multiply_add(factors, factor, x0, b0), multiply_add(factors, factor, x1, b1)
            factor = c * terms + index
            c0, c1 = multiply_add(factors, factor, x0, c0), multiply_add(factors, factor, x1, c1)
            factor = d * terms + index
            d0, d1 = multiply_add(factors, factor, x0, d0), multiply_add(factors, factor, x1, d1)
        store(flat, to_a, a0)
        store(flat, to_a + LANES, a1)
        store(flat, to_b, b0)
        store(flat, to_b + LANES, b1)
        store(flat, to_c, c0)
        store(flat, to_c + LANES, c1)
        store(flat, to_d, d0)
        store(flat, to_d + LANES, d1)


@_compile
def _finish(out: np.ndarray, top: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Running softmax -> partial; what has seen nothing stays 0, its lse is -inf."""
    lse = np.full(top.shape, np.float32(-np.inf), np.float32)
    for query in range(out.shape[0]):
        if total[query] != 0.0:
            lse[query] = top[query] + np.log(total[query])
            _scale(out, query, np.float32(1.0) / total[query])
    return out, lse


@_compile
def _scale(sums: np.ndarray, query: int, factor: np.float32) -> None:
    for i in range(sums.shape[1]):
        sums[query, i] *= factor


@_compile
def _largest(scores: np.ndarray, query: int, count: int) -> np.float32:
    """The maximum. What it makes of NaN does not matter: the exponentials are NaN then."""
    flat, first, whole = scores.reshape(-1), query * scores.shape[1], count // LANES * LANES
    largest = np.float32(-np.inf)
    if whole > 0:
        lanes = load(flat, first)
        for i in range(LANES, whole, LANES):
            lanes = larger(load(flat, first + i), lanes)
        largest = horizontal_largest(lanes)
    for i in range(whole, count):
        largest = max(largest, scores[query, i])
    return largest


@_compile
def _exponentials(scores: np.ndarray, query: int, count: int, shift: np.float32) -> np.float32:
    """scores [query] -> exp(scores - shift) in place; returns their sum."""
    total = np.float32(0.0)
    for i in range(count):
        scores[query, i] = _exp(scores[query, i] - shift)
        total += scores[query, i]
    return total


_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_HALF, _ONE, _LEAST = np.float32(0.5), np.float32(1.0), np.float32(-87.0)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.66666666e-1), np.float32(4.16666667e-2)
_C5, _C6, _C7 = np.float32(8.33333333e-3), np.float32(1.38888889e-3), np.float32(1.98412698e-4)


@njit(fastmath={"contract"}, inline="always", cache=True)
def _exp(x: np.float32) -> np.float32:
    """exp(x) for x <= 0 in arithmetic alone, so that it becomes vector code; within 2 units of the last place.

    x = n ln 2 + r with ln 2 in two parts (Cody & Waite 1980), and the Taylor series of exp(r) to the seventh power.
    """
    bounded = x if x >= _LEAST else _LEAST  # of NaN there is no whole number
    n = np.floor(bounded * _LOG2_E + _HALF)
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    series = _C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))
    value = (_ONE + (r + r * r * series)) * _power_of_two(n)
    seen = value if x >= _LEAST else x  # NaN stays what it is
    return np.float32(0.0) if x < _LEAST else seen


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 ** n for a whole float32 n: its exponent bits."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(exponent), generate


def kernel(stored: np.dtype, parallel: bool) -> Any:
    """A custom call for caches of this dtype; its arguments are those of `_attend_item`, the first two its results."""
    attend, kind = attend_in_parallel if parallel else attend_in_turn, from_dtype(stored)
    lse_array, array, cache_array = array_of(3, types.float32), array_of(4, types.float32), array_of(5, kind)
    ints, table = array_of(1, types.int32), array_of(2, types.int32)

    @njit(inline="always")
    def run(frame: np.ndarray) -> None:
        given = arguments(frame)
        out, lse, q = array(given[0]), lse_array(given[1]), array(given[2])
        keys, values = cache_array(given[3]), cache_array(given[4])
        step = (ints(given[5]), ints(given[6]), table(given[7]), ints(given[8]), ints(given[9]), ints(given[10]))
        attend((out, lse, q, keys, values, *step))

    return run
