"""Paged attention on a CPU, compiled by Numba.

A work item is one tile, up to some tokens of one request, and one KV head: the slots of the request are visited chunk
by chunk and folded into a running softmax, as the loop of `attention` does: few queries on the vector units, many of a
bfloat16 cache on matrix units if the CPU has them, with results that differ in rounding. Items share nothing, so
neither threads nor other requests change a bit. The value of a slot that is hidden from a token never reaches it, NaN
or not. Of a latent cache `keys` are None: its one head's values are also its keys.

Works on plain arrays: knows blocks and slots, knows nothing about JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, float32, int32, njit, prange

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.fold import fold, raise_rows
from dcpjax.models.kernels.cpu.fold_on_tiles import fold_pairs, pair_rows, split_queries
from dcpjax.models.kernels.cpu.softmax import clear, copy, round_up, scale
from dcpjax.models.kernels.cpu.tile import PAIRS, PARTS, TERMS, TILE, configure_tiles, release_tiles
from dcpjax.models.kernels.cpu.vector import COLUMNS, ROWS, pointer, prefetch_columns, shifted
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, arguments, array, data, is_call, results, sizes

CHUNK_SLOTS = 256  # scored before their shares are taken: keys, values and scores stay in the inner caches
TILE_TOKENS = (8, 64)  # least and most of one request that share what is read of its cache
TILE_QUERIES = 1024  # of all their heads, at most
ITEMS = 16  # of which there should be no fewer, for threads to share
SPLIT_TOKENS = 32  # at most, of a step in which a long request's slots are shared by threads
SPAN_SLOTS = 2048  # of such a share
TOGETHER = ROWS  # rows of sums that are in registers, for queries of many
FEW_TOGETHER = 4  # the same where there are at most
FEW = 8  # queries: these read the cache itself, more of them a copy raised to float32, or matrix units a packed one


@njit(inline="always")
def _attend(arguments: Any) -> None:
    """`arguments` as `_attend_items` names them; as many threads as have a workspace."""
    plan = _plan(arguments)
    for thread in prange(arguments[2].shape[0]):
        _attend_items(np.int64(thread), plan, arguments)  # for prange's uint64 it would be compiled once more
    _merge(plan, arguments)


@compiled
def _plan(arguments: Any) -> Any:
    """Slots that each token sees, tiles, those that were split, and room for the results of spans."""
    _, _, _, q, _, values, positions, rows, _, share, _ = arguments
    seen = visible(positions, share)
    tiles, split = _tiles(seen, rows, q.shape[1], _most_tokens(q.shape[2]), _span_slots(values.shape[3]))
    count = np.sum((split[:, 1] - split[:, 0]) * split[:, 3])
    part_out, part_lse = np.empty((count, *q.shape[1:]), np.float32), np.empty((count, *q.shape[1:3]), np.float32)
    return seen, tiles, split, part_out, part_lse


@compiled
def _tiles(seen: np.ndarray, rows: np.ndarray, kv_heads: int, most: int, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles [T, 5] of at most `most` tokens, those with most work first: first token, the one after its last, first
    slot, the one after its last, and where its results go among the parts, -1 for the results themselves.

    And those that were split [S, 4]: first token, the one after its last, place of the parts, number of spans.
    """
    tokens, starts, splits = rows.shape[0], [0], rows.shape[0] <= SPLIT_TOKENS
    few = min(max(TILE_TOKENS[0], tokens * kv_heads // ITEMS), most)
    for token in range(1, tokens):
        size = most if splits and seen[token] > share else few
        if rows[token] != rows[token - 1] or token - starts[-1] >= size:
            starts.append(token)
    starts.append(tokens)
    tiles, part = [(0, 0, 0, 0, -1) for _ in range(0)], 0
    split, count = np.empty((len(starts), 4), np.int64), 0
    for tile in range(len(starts) - 1):
        first, end, slots = starts[tile], starts[tile + 1], seen[starts[tile + 1] - 1]
        spans = -(-slots // share) if splits else 1
        if spans <= 1:
            tiles.append((first, end, 0, slots, -1))
            continue
        split[count, 0], split[count, 1], split[count, 2], split[count, 3] = first, end, part, spans
        count += 1
        for span in range(spans):
            tiles.append((first, end, span * share, min((span + 1) * share, slots), part))
            part += end - first
    every = np.array(tiles)
    work = (every[:, 1] - every[:, 0]) * (every[:, 3] - every[:, 2])
    return every[np.argsort(-work)], split[:count]


@compiled
def _attend_items(thread: int, plan: Any, arguments: Any) -> None:
    """Fill in `out` [N, K, G, D] and `lse` [N, K, G], or the parts, of one thread's items: the threads deal.

    q [N, K, G, D] float32, scaled; keys [B, 1, K, D, P], None of latents, and values [B, 1, K, P, D] as cached;
    positions and rows [N], table [R, W]: what `Work` holds. `share` of the positions that is cached here: dcp,
    interleave, rank. `workspace` [threads, `workspace_size`] float32. `units`: whether there are matrix units, None if
    not.
    """
    seen, tiles, _, part_out, part_lse = plan
    out, lse, workspace, q, keys, values, _, rows, table, _, units = arguments
    (_, kv_heads, group, width), threads, slots = q.shape, workspace.shape[0], values.shape[3]
    items, own = tiles.shape[0] * kv_heads, group * width
    _begin(units)
    for item in range(thread, items, threads):
        tile, head = tiles[item // kv_heads], item % kv_heads
        first, tokens = tile[0], tile[1] - tile[0]
        queries, size = pointer(workspace[thread], 0), round_up(tokens * group, TILE) * width
        sums = shifted(queries, size)
        for token in range(tokens):
            copy(pointer(q, ((first + token) * kv_heads + head) * own), shifted(queries, token * own), own)
        clear(shifted(queries, tokens * own), size - tokens * own)
        clear(sums, size)
        upcoming = min(item + threads, items - 1)
        following = tiles[upcoming // kv_heads]
        after = table[rows[following[0]], following[2] // slots] * kv_heads + upcoming % kv_heads
        own_seen, blocks, span = np.repeat(seen[first : tile[1]], group), table[rows[first]], (tile[2], tile[3])
        room = shifted(sums, size)
        lses = _attend_tile(units, sums, queries, room, keys, values, head, blocks, own_seen, span, after)
        for token in range(tokens):
            if tile[4] < 0:
                place, made, made_lse = first + token, pointer(out, 0), lse
            else:
                place, made, made_lse = tile[4] + token, pointer(part_out, 0), part_lse
            copy(shifted(sums, token * own), shifted(made, (place * kv_heads + head) * own), own)
            for one in range(group):
                made_lse[place, head, one] = lses[token * group + one]
    _end(units)


@compiled
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


@compiled
def visible(positions: np.ndarray, share: np.ndarray) -> np.ndarray:
    """How many slots of this rank each token sees, as `CacheGeometry.tokens_per_rank` counts: the request's first."""
    dcp, interleave, rank = share[0], share[1], share[2]
    seen = np.empty(positions.shape[0], np.int64)
    for token, position in enumerate(positions):
        stripes, rest = divmod(position + 1, dcp * interleave)
        seen[token] = stripes * interleave + min(max(rest - rank * interleave, 0), interleave)
    return seen


@compiled
def _attend_tile(
    units: Any,
    out: Any,
    q: Any,
    workspace: Any,
    keys: Any,
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
    queries, kv_heads, slots, width = seen.shape[0], values.shape[2], values.shape[3], values.shape[4]
    size, few, block_size = chunk_size(slots), queries <= FEW, slots * width
    top, total = np.full(queries, np.float32(-np.inf), np.float32), np.zeros(queries, np.float32)
    state, pieces = (seen, top, total), max(1, size // slots)
    places, own = np.zeros(2 * pieces, np.int64), (kv_heads, kv_head, block_size)
    if not few:
        _split(units, q, queries, width, _parts(workspace, size, width))
    done, last = span
    _find(places[pieces:], blocks, done // slots, own)
    while done < last:
        offset = done % slots
        count = min(pieces * slots, size, slots - offset if pieces == 1 else size, last - done)
        end = done + count
        places[:pieces] = places[pieces:]
        if end < last:
            _find(places[pieces:], blocks, end // slots, own)
        else:
            places[pieces:] = after * block_size
        k, v = _read_first(keys, values, offset), pointer(values, offset * width)
        following = _read_first(keys, values, end % slots if end < last else 0)
        stored = (_transposed(keys, k, slots), (v, width, COLUMNS), slots)
        ahead, tile = (v, following), (out, width, q, width, workspace, size)
        if few:
            fold(FEW_TOGETHER, tile, state, done, count, stored, places, ahead)
            whole = pieces == 1 and (end >= last or min(size, slots - end % slots, last - end) == size)
            for line in range(count * width // COLUMNS, size * width // COLUMNS if whole else 0):  # what is left
                prefetch_columns(shifted(following, places[1]), line * COLUMNS)
        else:
            _fold_many(units, tile, state, done, count, stored, places, ahead)
        done = end
    return finish(out, width, top, total)


@compiled
def _find(places: np.ndarray, blocks: np.ndarray, first: int, own: tuple[int, int, int]) -> None:
    """Where this KV head's part of each block begins, from block number `first` of the request on."""
    kv_heads, kv_head, block_size = own
    for piece in range(places.shape[0]):
        block = blocks[min(first + piece, blocks.shape[0] - 1)]
        places[piece] = (block * kv_heads + kv_head) * block_size


@compiled
def _read_first(keys: Any, values: Any, slot: int) -> Any:
    """Where those numbers of the first block from some slot on lie that are read first: keys, if there are any."""
    if keys is None:
        return pointer(values, slot * values.shape[4])
    return pointer(keys, slot)


@compiled
def _transposed(keys: Any, k: Any, slots: int) -> Any:
    """Keys as `fold` takes them."""
    if keys is None:
        return None
    return k, slots, COLUMNS


@compiled
def _begin(units: Any) -> None:
    if units is not None:  # here and below of an argument: else Numba compiles what the CPU may not know
        configure_tiles()


@compiled
def _end(units: Any) -> None:
    if units is not None:
        release_tiles()


@compiled
def _split(units: Any, q: Any, queries: int, width: int, parts: Any) -> None:
    if units is not None:
        split_queries(q, queries, width, parts)


@compiled
def _fold_many(
    units: Any, tile: Any, state: Any, done: int, count: int, stored: Any, places: np.ndarray, ahead: Any
) -> None:
    """A chunk for many queries: raised to float32 in `room`, or paired for matrix units, which want it finite."""
    _, width, _, _, room, size = tile
    raised = shifted(room, TILE * size)
    if _fold_paired(units, tile, state, done, count, stored, places):
        return
    keys = _raise(stored[0], stored[1], stored[2], width, count, size, places, raised)
    values = _raised_values(keys, raised, width, size)
    fold(TOGETHER, tile, state, done, count, (keys, values, size), np.zeros(2, np.int64), ahead)


@compiled
def _raise(k: Any, v: Any, slots: int, width: int, count: int, size: int, places: np.ndarray, to: Any) -> Any:
    """The pieces of a chunk in float32, keys before values. Returns the keys as `fold` takes them."""
    rows, beside, _ = v
    if k is None:
        for piece in range(-(-count // slots)):
            first = piece * slots
            copy(shifted(rows, places[piece]), shifted(to, first * width), min(slots, count - first) * width)
        return None
    keys, stride, _ = k
    values = shifted(to, size * width)
    for piece in range(-(-count // slots)):
        first, at = piece * slots, places[piece]
        own = min(slots, count - first)
        raise_rows(shifted(keys, at), stride, width, own, shifted(to, first * width), width * COLUMNS)
        raise_rows(shifted(rows, at), beside, own, width, shifted(values, first * COLUMNS), size * COLUMNS)
    return to, COLUMNS, width * COLUMNS


@compiled
def _raised_values(keys: Any, raised: Any, width: int, size: int) -> Any:
    """What `_raise` left, as `fold` takes it."""
    if keys is None:
        return raised, width, COLUMNS
    return shifted(raised, size * width), COLUMNS, size * COLUMNS


@compiled
def _fold_paired(units: Any, tile: Any, state: Any, done: int, count: int, stored: Any, places: np.ndarray) -> bool:
    """On matrix units, if there are any and all values are finite: whether that is so."""
    if units is not None:
        (out, width, _, _, room, size), ((k, stride, _), (v, beside, _), slots) = tile, stored
        keys, finite = shifted(room, TILE * size), True
        values, between = shifted(keys, size * width), round_up(count, TERMS) // 2 * PAIRS
        for piece in range(-(-count // slots)):
            first, at = piece * slots, places[piece]
            rows = min(slots, count - first)
            own = shifted(keys, first * width // 2)
            pair_rows(shifted(k, at), stride, width, round_up(rows, COLUMNS), own, width // 2 * PAIRS)
            own = shifted(values, first // 2 * PAIRS)
            finite &= pair_rows(shifted(v, at), beside, rows, width, own, between)
        if finite:
            shares = shifted(values, size * width)
            tile = out, _parts(room, size, width), width, room, shares, size
            fold_pairs(tile, state, done, count, keys, values)
        return finite
    return False


@compiled
def _parts(room: Any, size: int, width: int) -> Any:
    """Where a thread keeps the parts of its queries: after scores, a chunk of the cache and parts of shares."""
    return shifted(room, TILE * size + 2 * size * width + PARTS * TILE * size // 2)


@compiled
def finish(out: Any, width: int, top: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Running softmax -> partial, `out` in place; what has seen nothing stays 0, its lse is -inf."""
    lse = np.full(top.shape, np.float32(-np.inf), np.float32)
    for query in range(top.shape[0]):
        if total[query] != 0.0:
            lse[query] = top[query] + np.log(total[query])
            scale(shifted(out, query * width), width, np.float32(1.0) / total[query])
    return lse


@compiled
def chunk_size(slots: int) -> int:
    """Slots that are visited together, in whole vectors: of one block, or all of several short ones."""
    return round_up(max(1, CHUNK_SLOTS // slots) * min(slots, CHUNK_SLOTS), COLUMNS)


@compiled
def _span_slots(slots: int) -> int:
    """Slots of a thread's share, whole blocks where these are short."""
    return SPAN_SLOTS if slots > CHUNK_SLOTS else SPAN_SLOTS // slots * slots


@compiled
def _most_tokens(group: int) -> int:
    """Tokens of a tile, at most."""
    return max(1, min(TILE_TOKENS[1], TILE_QUERIES // group))


def workspace_size(slots: int, group: int, width: int) -> int:
    """float32 numbers that a thread needs: a tile's queries and sums, and room for scores, a chunk of keys and of
    values, and the parts of shares and of queries, which take half as many."""
    size, queries = chunk_size(slots), round_up(_most_tokens(group) * group, TILE)
    return 2 * queries * width + TILE * size + 2 * size * width + PARTS * (TILE * size + queries * width) // 2


def kernel(stored: np.dtype, matrix_units: bool) -> Callable[[Any], int]:
    """A custom call for caches of this dtype; arguments and results are those of `_attend_items`. Matrix units take
    bfloat16 caches alone."""
    units = True if matrix_units else None

    def run(frame: Any) -> int:
        if is_call(frame):
            given, made = arguments(frame), results(frame)
            filled = array(made[0], 4, float32), array(made[1], 3, float32), array(made[2], 2, float32)
            q, keys, values = array(given[0], 4, float32), array(given[1], 5, stored), array(given[2], 5, stored)
            step = array(given[3], 1, int32), array(given[4], 1, int32), array(given[5], 2, int32)
            _attend((*filled, q, keys, values, *step, array(given[6], 1, int32), units))
        return NO_ERROR

    return run


def latent_kernel(stored: np.dtype) -> Callable[[Any], int]:
    """The same for latents [B, 1, P, D], given instead of keys and values."""

    def run(frame: Any) -> int:
        if is_call(frame):
            given, made = arguments(frame), results(frame)
            filled = array(made[0], 4, float32), array(made[1], 3, float32), array(made[2], 2, float32)
            blocks, _, slots, width = sizes(given[1])
            latents = carray(data(given[1]), (blocks, 1, 1, slots, width), stored)
            step = array(given[2], 1, int32), array(given[3], 1, int32), array(given[4], 2, int32)
            _attend((*filled, array(given[0], 4, float32), None, latents, *step, array(given[5], 1, int32), None))
        return NO_ERROR

    return run
