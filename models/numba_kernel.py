"""Paged attention on a CPU's vector units, compiled by Numba.

A work item is one tile, up to some tokens of one request, and one KV head: the slots of the request are visited chunk
by chunk and folded into a running softmax, as the loop of `attention` does. Items share nothing, and what is computed
for a token does not depend on the others in its tile, so neither threads nor neighbours change a bit. The value of a
slot that is hidden from a token is never multiplied.

Works on plain arrays: knows blocks and slots, knows nothing about JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import carray, from_dtype, literally, njit, prange, types

from dcpjax.models.numba_call import arguments, results
from dcpjax.models.numba_call import array as array_of
from dcpjax.models.numba_here import COLUMNS, LANES
from dcpjax.models.numba_vector import (
    add,
    add_products,
    exponential,
    horizontal_largest,
    horizontal_sum,
    larger,
    load,
    load_block,
    multiply,
    pointer,
    prefetch,
    shifted,
    spread,
    store,
    store_block,
    zeros,
)

CHUNK_SLOTS = 256  # scored before their shares are taken: keys, values and scores stay in the inner caches
TILE_TOKENS = (8, 64)  # least and most of one request that share what is read of its cache
ITEMS = 16  # of which there should be no fewer, for threads to share
SPLIT_TOKENS = 32  # at most, of a step in which a long request's slots are shared by threads
SPAN_SLOTS = 2048  # of such a share
TOGETHER = 8  # rows of sums that are in registers, for queries of many
FEW_TOGETHER = 4  # the same where there are at most
FEW = 8  # queries: these read the cache itself, more of them a copy raised to float32

_compile = njit(error_model="numpy", nogil=True, cache=True)


@_compile
def attend_in_turn(arguments: Any) -> None:
    """All items on one core; `arguments` as `_attend_items` names them."""
    plan = _plan(arguments)
    _attend_items(0, plan, arguments)
    _merge(plan, arguments)


@njit(error_model="numpy", nogil=True, cache=True, parallel=True)
def attend_in_parallel(arguments: Any) -> None:
    """As many threads as have a workspace."""
    plan = _plan(arguments)
    for thread in prange(arguments[2].shape[0]):
        _attend_items(thread, plan, arguments)
    _merge(plan, arguments)


@_compile
def _plan(arguments: Any) -> Any:
    """Slots that each token sees, tiles, those that were split, and room for the results of spans."""
    _, _, _, q, keys, _, positions, rows, _, share = arguments
    seen = _visible(positions, share)
    tiles, split = _tiles(seen, rows, keys.shape[2])
    count = np.sum((split[:, 1] - split[:, 0]) * split[:, 3])
    part_out, part_lse = np.empty((count, *q.shape[1:]), np.float32), np.empty((count, *q.shape[1:3]), np.float32)
    return seen, tiles, split, part_out, part_lse


@_compile
def _tiles(seen: np.ndarray, rows: np.ndarray, kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles [T, 5], those with most work first: first token, the one after its last, first slot, the one after its
    last, and where its results go among the parts, -1 for the results themselves.

    And those that were split [S, 4]: first token, the one after its last, place of the parts, number of spans.
    """
    tokens, starts, splits = rows.shape[0], [0], rows.shape[0] <= SPLIT_TOKENS
    few = min(max(TILE_TOKENS[0], tokens * kv_heads // ITEMS), TILE_TOKENS[1])
    for token in range(1, tokens):
        most = TILE_TOKENS[1] if splits and seen[token] > SPAN_SLOTS else few
        if rows[token] != rows[token - 1] or token - starts[-1] >= most:
            starts.append(token)
    starts.append(tokens)
    tiles, part = [(0, 0, 0, 0, -1) for _ in range(0)], 0
    split, count = np.empty((len(starts), 4), np.int64), 0
    for tile in range(len(starts) - 1):
        first, end, slots = starts[tile], starts[tile + 1], seen[starts[tile + 1] - 1]
        spans = -(-slots // SPAN_SLOTS) if splits else 1
        if spans <= 1:
            tiles.append((first, end, 0, slots, -1))
            continue
        split[count, 0], split[count, 1], split[count, 2], split[count, 3] = first, end, part, spans
        count += 1
        for span in range(spans):
            tiles.append((first, end, span * SPAN_SLOTS, min((span + 1) * SPAN_SLOTS, slots), part))
            part += end - first
    every = np.array(tiles)
    work = (every[:, 1] - every[:, 0]) * (every[:, 3] - every[:, 2])
    return every[np.argsort(-work)], split[:count]


@_compile
def _attend_items(thread: int, plan: Any, arguments: Any) -> None:
    """Fill in `out` [N, K, G, D] and `lse` [N, K, G], or the parts, of one thread's items: the threads deal.

    q [N, K, G, D] float32, scaled; keys [B, 1, K, D, P] and values [B, 1, K, P, D] as cached; positions and rows [N],
    table [R, W]: what `Work` holds. `share` of the positions that is cached here: dcp, interleave, rank. `workspace`
    [threads, `workspace_size`] float32.
    """
    seen, tiles, _, part_out, part_lse = plan
    out, lse, workspace, q, keys, values, _, rows, table, _ = arguments
    (_, kv_heads, group, width), threads, slots = q.shape, workspace.shape[0], keys.shape[4]
    items, own = tiles.shape[0] * kv_heads, group * width
    for item in range(thread, items, threads):
        tile, head = tiles[item // kv_heads], item % kv_heads
        first, tokens = tile[0], tile[1] - tile[0]
        queries, size = pointer(workspace[thread], 0), _round_up(tokens * group, TOGETHER) * width
        sums = shifted(queries, size)
        for token in range(tokens):
            _copy(pointer(q, ((first + token) * kv_heads + head) * own), shifted(queries, token * own), own)
        _clear(shifted(queries, tokens * own), size - tokens * own)
        _clear(sums, size)
        upcoming = min(item + threads, items - 1)
        following = tiles[upcoming // kv_heads]
        after = table[rows[following[0]], following[2] // slots] * kv_heads + upcoming % kv_heads
        own_seen, blocks, span = np.repeat(seen[first : tile[1]], group), table[rows[first]], (tile[2], tile[3])
        lses = _attend_tile(sums, queries, shifted(sums, size), keys, values, head, blocks, own_seen, span, after)
        for token in range(tokens):
            if tile[4] < 0:
                place, made, made_lse = first + token, pointer(out, 0), lse
            else:
                place, made, made_lse = tile[4] + token, pointer(part_out, 0), part_lse
            _copy(shifted(sums, token * own), shifted(made, (place * kv_heads + head) * own), own)
            made_lse[place, head] = lses[token * group : (token + 1) * group]


@_compile
def _merge(plan: Any, arguments: Any) -> None:
    """The spans' results -> those of whole tiles, weighted by their lse as `sharding.merge` does."""
    (_, _, split, part_out, part_lse), (out, lse) = plan, arguments[:2]
    for index in range(split.shape[0]):
        first, end, place, spans = split[index, 0], split[index, 1], split[index, 2], split[index, 3]
        for token in range(first, end):
            rows = place + token - first + (end - first) * np.arange(spans)
            for head in range(lse.shape[1]):
                for one in range(lse.shape[2]):
                    own = np.array([part_lse[row, head, one] for row in rows])
                    top = np.max(own)
                    shift = np.float32(0.0) if top == -np.inf else top
                    weights = np.exp(own - shift)
                    total = np.sum(weights)
                    lse[token, head, one] = top + np.log(total) if total != 0.0 else np.float32(-np.inf)
                    sums = out[token, head, one]
                    sums[:] = np.float32(0.0)
                    for span in range(spans if total != 0.0 else 0):
                        sums += weights[span] / total * part_out[rows[span], head, one]


@_compile
def _round_up(count: int, base: int) -> int:
    return -(-count // base) * base


@_compile
def _copy(source: Any, to: Any, count: int) -> None:
    for i in range(0, count, LANES):
        store(to, i, load(source, i))


@_compile
def _clear(numbers: Any, count: int) -> None:
    for i in range(0, count, LANES):
        store(numbers, i, zeros())


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
    out: Any,
    q: Any,
    workspace: Any,
    keys: np.ndarray,
    values: np.ndarray,
    kv_head: int,
    blocks: np.ndarray,
    seen: np.ndarray,
    span: tuple[int, int],
    after: int,
) -> np.ndarray:
    """One request and KV head, a span of its slots: q [Q, D] of all tokens' heads, blocks [W], seen [Q]; out [Q, D] is
    0 -> lse [Q].

    Arithmetic on one part of the cache hides the wait for the next: keys, their values, the next keys and in the end
    those at `after`, an index into blocks and KV heads, with which the thread's next item begins.
    """
    queries, kv_heads, slots, width = seen.shape[0], keys.shape[2], keys.shape[4], values.shape[4]
    size, few, block_size = min(slots, CHUNK_SLOTS), queries <= FEW, slots * width
    raised_keys, raised_values = workspace, shifted(workspace, size * width)
    shares = shifted(raised_values, size * width)
    top, total = np.full(queries, np.float32(-np.inf), np.float32), np.zeros(queries, np.float32)
    done, last = span
    while done < last:
        offset = done % slots
        count = min(size, slots - offset, last - done)
        first, end = (blocks[done // slots] * kv_heads + kv_head) * block_size, done + count
        ahead = after * block_size
        if end < last:
            ahead = (blocks[end // slots] * kv_heads + kv_head) * block_size + end % slots
        k, v = pointer(keys, first + offset), pointer(values, first + offset * width)
        upcoming, tile = (v, pointer(keys, ahead)), (out, q, width, shares, size)
        if few:
            stored = ((k, slots, COLUMNS), (v, width, COLUMNS))
            _fold(FEW_TOGETHER, tile, top, total, seen - done, count, stored, upcoming)
        else:
            _raise(k, slots, width, count, raised_keys)
            _raise(v, width, count, width, raised_values)
            raised = ((raised_keys, COLUMNS, width * COLUMNS), (raised_values, COLUMNS, count * COLUMNS))
            _fold(TOGETHER, tile, top, total, seen - done, count, raised, upcoming)
        done = end
    return _finish(out, width, top, total)


@_compile
def _raise(stored: Any, stride: int, rows: int, columns: int, to: Any) -> None:
    """Rows of `stored` as float32, COLUMNS of them after another: [columns / COLUMNS, rows, COLUMNS]."""
    at = 0
    for column in range(0, columns, COLUMNS):
        for row in range(rows):
            store(to, at, load(stored, row * stride + column))
            store(to, at + LANES, load(stored, row * stride + column + LANES))
            at += COLUMNS


@_compile
def _fold(
    together: int, tile: Any, top: np.ndarray, total: np.ndarray, seen: np.ndarray, count: int, stored: Any, ahead: Any
) -> None:
    """Fold `count` slots into the running softmax of all queries, so many at a time.

    `stored` keys and values: pointer, distance of rows and of groups of COLUMNS. `ahead`: what is asked for meanwhile.
    """
    out, q, width, shares, size = tile
    for query in range(0, seen.shape[0], literally(together)):
        end = min(query + together, seen.shape[0])
        common, most = min(max(seen[query], 0), count), min(max(seen[end - 1], 0), count)  # later tokens see no less
        if most == 0:
            continue
        columns = _round_up(most, COLUMNS)
        _clear(shares, together * size)
        _accumulate(together, shares, size, shifted(q, query * width), width, width, stored[0], columns, ahead[0])
        for row in range(query, end):
            limit = min(max(seen[row], 0), count)
            if limit > 0:
                top[row], keep, gained = _soften(shifted(shares, (row - query) * size), limit, top[row])
                total[row] = total[row] * keep + gained
                if keep != 1.0:
                    _scale(shifted(out, row * width), width, keep)
        _accumulate(together, shifted(out, query * width), width, shares, size, common, stored[1], width, ahead[1])
        values, stride, step = stored[1]
        rest = (shifted(values, common * stride), stride, step)
        for row in range(query + 1, end):
            more = min(max(seen[row], 0), count) - common
            if more > 0:
                weights = shifted(shares, (row - query) * size + common)
                _accumulate(1, shifted(out, row * width), width, weights, size, more, rest, width, ahead[1])


@_compile
def _accumulate(
    together: int, sums: Any, width: int, weights: Any, terms: int, count: int, stored: Any, columns: int, ahead: Any
) -> None:
    """sums [together, columns] += weights [together, count] times rows of `stored` [count, columns].

    Rows of sums are `width` apart, those of weights `terms`. The sums stay in registers. With each row of `stored` a
    portion of what lies ahead is asked for.
    """
    rows, stride, step = stored
    for column in range(0, columns, COLUMNS):
        to, at = shifted(sums, column), column // COLUMNS * step
        block = load_block(literally(together), to, width)
        for index in range(count):
            prefetch(ahead, index * COLUMNS)
            prefetch(ahead, index * COLUMNS + LANES)
            block = add_products(block, weights, index, terms, load(rows, at), load(rows, at + LANES))
            at += stride
        ahead = shifted(ahead, count * COLUMNS)
        store_block(to, width, block)


@_compile
def _soften(scores: Any, count: int, before: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Scores of one query -> shares in place. Returns the largest score so far, which was `before`, the factor by
    which it shrinks what was summed until now, and the shares' sum.
    """
    columns = _round_up(count, COLUMNS)
    _hide(scores, count, columns)
    top = max(before, _largest(scores, columns))
    shift = np.float32(0.0) if top == -np.inf else top
    keep = horizontal_largest(exponential(spread(before), shift))
    a, b = zeros(), zeros()
    for i in range(0, columns, COLUMNS):
        first, second = exponential(load(scores, i), shift), exponential(load(scores, i + LANES), shift)
        store(scores, i, first)
        store(scores, i + LANES, second)
        a, b = add(a, first), add(b, second)
    return top, keep, horizontal_sum(add(a, b))


@_compile
def _hide(scores: Any, count: int, columns: int) -> None:
    """Vectors are computed whole: what is past `count` gets no share."""
    numbers = carray(scores, columns, np.float32)
    for i in range(count, columns):
        numbers[i] = -np.inf


@_compile
def _largest(scores: Any, columns: int) -> np.float32:
    """The maximum. What it makes of NaN does not matter: the exponentials are NaN then."""
    a, b = load(scores, 0), load(scores, LANES)
    for i in range(COLUMNS, columns, COLUMNS):
        a, b = larger(load(scores, i), a), larger(load(scores, i + LANES), b)
    return horizontal_largest(larger(a, b))


@_compile
def _finish(out: Any, width: int, top: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Running softmax -> partial, `out` in place; what has seen nothing stays 0, its lse is -inf."""
    lse = np.full(top.shape, np.float32(-np.inf), np.float32)
    for query in range(top.shape[0]):
        if total[query] != 0.0:
            lse[query] = top[query] + np.log(total[query])
            _scale(shifted(out, query * width), width, np.float32(1.0) / total[query])
    return lse


@_compile
def _scale(sums: Any, width: int, factor: np.float32) -> None:
    for i in range(0, width, LANES):
        store(sums, i, multiply(load(sums, i), spread(factor)))


def workspace_size(slots: int, group: int, width: int) -> int:
    """float32 numbers that a thread needs: a tile's queries and sums, a chunk of keys, of values, of scores."""
    size = min(slots, CHUNK_SLOTS)
    return 2 * _round_up(TILE_TOKENS[1] * group, TOGETHER) * width + 2 * size * width + TOGETHER * size


def kernel(stored: np.dtype, parallel: bool) -> Any:
    """A custom call for caches of this dtype; arguments and results are those of `_attend_items`."""
    attend, cached = attend_in_parallel if parallel else attend_in_turn, array_of(5, from_dtype(stored))
    workspace, lse, array = (array_of(dimensions, types.float32) for dimensions in (2, 3, 4))
    ints, table = array_of(1, types.int32), array_of(2, types.int32)

    @njit(inline="always")
    def run(frame: np.ndarray) -> None:
        given, made = arguments(frame), results(frame)
        filled = (array(made[0]), lse(made[1]), workspace(made[2]))
        step = (ints(given[3]), ints(given[4]), table(given[5]), ints(given[6]))
        attend((*filled, array(given[0]), cached(given[1]), cached(given[2]), *step))

    return run
