"""Paged attention on a CPU, compiled by Numba.

A work item is one tile, up to some tokens of one request, and one KV head: the slots of the request are visited chunk
by chunk and folded into a running softmax, as the loop of `attention` does. Few queries are computed on the vector
units. Many queries of a bfloat16 cache are computed on matrix units if the CPU has them, with results that differ in
rounding. Items share nothing, so neither threads nor other requests change a bit. The value of a slot that is hidden
from a token never reaches it, NaN or not. For a latent cache `keys` are None: the values of its one head are also its
keys.
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any, NamedTuple

import numpy as np
from numba import carray, float32, int32, prange

from dcpjax.models.kernels.cpu.compile import both, catching, compiled, raise_if, shared_with_python
from dcpjax.models.kernels.cpu.fold import Chunk, Matrix, Prefetch, QueryTile, SoftmaxState, fold, widen_rows
from dcpjax.models.kernels.cpu.fold_on_tiles import fold_pairs, pair_rows, split_queries
from dcpjax.models.kernels.cpu.softmax import clear, copy, round_up, scale
from dcpjax.models.kernels.cpu.tile import PAIRS, PARTS, TERMS, TILE, configure_tiles, release_tiles
from dcpjax.models.kernels.cpu.vector import COLUMNS, ROWS, pointer, prefetch_columns, shifted
from dcpjax.models.kernels.cpu.xla_call import (
    NO_ERROR,
    Handler,
    arguments,
    array,
    data,
    error,
    is_call,
    results,
    sizes,
)

CHUNK_SLOTS = 256  # scored before their weights are computed: keys, values and scores stay in the inner caches
TILE_TOKENS = (8, 64)  # least and most tokens of one request that share what is read of its cache
TILE_QUERIES = 1024  # query rows of a tile, at most: its tokens times their heads
ITEMS = 16  # there should be no fewer, for threads to share
SPLIT_TOKENS = 32  # in steps of at most so many tokens, threads share the slots of a long request
SPAN_SLOTS = 2048  # slots of a long request that one thread visits then
ROWS_AT_ONCE = ROWS  # query rows whose sums are in registers together, of many queries
FEW_ROWS_AT_ONCE = 4  # the same of few queries
FEW_QUERIES = 8  # at most so many read the cache itself, more of them a float32 copy, or matrix units a packed copy


class AttentionCall(NamedTuple):
    """Arguments and results of one call."""

    out: np.ndarray  # [T, K, G, D] float32, result
    lse: np.ndarray  # [T, K, G] float32, result
    workspace: np.ndarray  # [threads, `workspace_size`] float32
    q: np.ndarray  # [T, K, G, D] float32, scaled
    keys: Any  # [N, 1, K, D, P] as cached; None for latents
    values: np.ndarray  # [N, 1, K, P, D] as cached
    positions: np.ndarray  # [T] int32, of `Work`
    rows: np.ndarray  # [T] int32, of `Work`
    block_table: np.ndarray  # [B, W] int32, of `Work`
    ownership: np.ndarray  # [3] int32: dcp, interleave, rank: which positions are cached here
    matrix_units: Any  # True or None: whether the CPU has matrix units


class Plan(NamedTuple):
    """How a call's work is divided."""

    visible: np.ndarray  # [T] int64: slots of this rank that each token sees
    tiles: np.ndarray  # [I, 5] int64: see `Tile`
    split_tiles: np.ndarray  # [., 4] int64: see `SplitTile`
    span_out: np.ndarray  # [rows, K, G, D] float32: results of spans, before they are merged
    span_lse: np.ndarray  # [rows, K, G] float32


class Tile(NamedTuple):
    """Tokens of one request and a span of its slots, all of them unless the tile is split."""

    first_token: int
    end_token: int
    first_slot: int
    end_slot: int
    span_row: int  # where its results go in `span_out`; -1 if they go to `out`


class SplitTile(NamedTuple):
    """Tokens of one request whose slots are divided into several spans."""

    first_token: int
    end_token: int
    span_row: int  # of its first span
    spans: int


class Blocks(NamedTuple):
    """Where one request's blocks lie in the cache, for one KV head."""

    table: np.ndarray  # [W] int32: block ids
    kv_heads: int
    kv_head: int
    size: int  # numbers of one block and KV head


def _attend(call: Any) -> None:
    """Compute `out` and `lse`, with as many threads as have a workspace."""
    plan = Plan(*_make_plan(call))  # inside `prange` Numba knows a NamedTuple by its constructor
    failed = 0
    for thread in prange(call.workspace.shape[0]):
        # prange counts in uint64, for which the function would be compiled once more
        failed += _attend_items(np.int64(thread), plan, call)
    raise_if(failed)
    _merge_spans(plan, call)


_attend_parallel, _attend_sequential = both(_attend)


@compiled
def _read_call(frame: Any, matrix_units: Any, dtype: Any) -> AttentionCall:
    inputs, outputs = arguments(frame), results(frame)
    return AttentionCall(
        array(outputs[0], 4, float32),
        array(outputs[1], 3, float32),
        array(outputs[2], 2, float32),
        array(inputs[0], 4, float32),
        array(inputs[1], 5, dtype),
        array(inputs[2], 5, dtype),
        array(inputs[3], 1, int32),
        array(inputs[4], 1, int32),
        array(inputs[5], 2, int32),
        array(inputs[6], 1, int32),
        matrix_units,
    )


@compiled
def _read_latent_call(frame: Any, dtype: Any) -> AttentionCall:
    """The same with latents [N, 1, P, D] instead of keys and values."""
    inputs, outputs = arguments(frame), results(frame)
    blocks, _, slots, width = sizes(inputs[1])
    return AttentionCall(
        array(outputs[0], 4, float32),
        array(outputs[1], 3, float32),
        array(outputs[2], 2, float32),
        array(inputs[0], 4, float32),
        None,
        carray(data(inputs[1]), (blocks, 1, 1, slots, width), dtype),
        array(inputs[2], 1, int32),
        array(inputs[3], 1, int32),
        array(inputs[4], 2, int32),
        array(inputs[5], 1, int32),
        None,
    )


@compiled
def _make_plan(call: Any) -> Plan:
    visible = visible_slots(call.positions, call.ownership)
    tokens, span = _most_tokens(call.q.shape[2]), _span_slots(call.values.shape[3])
    tiles, split = _make_tiles(visible, call.rows, call.q.shape[1], tokens, span)
    count = np.sum((split[:, 1] - split[:, 0]) * split[:, 3])
    span_out = np.empty((count, *call.q.shape[1:]), np.float32)
    return Plan(visible, tiles, split, span_out, np.empty((count, *call.q.shape[1:3]), np.float32))


@compiled
def _make_tiles(
    visible: np.ndarray, rows: np.ndarray, kv_heads: int, most_tokens: int, span_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """`Tile`s of at most `most_tokens`, those with most work first, and `SplitTile`s, as rows of arrays."""
    tokens, starts, splits = rows.shape[0], [0], rows.shape[0] <= SPLIT_TOKENS
    few = min(max(TILE_TOKENS[0], tokens * kv_heads // ITEMS), most_tokens)
    for token in range(1, tokens):
        size = most_tokens if splits and visible[token] > span_slots else few
        if rows[token] != rows[token - 1] or token - starts[-1] >= size:
            starts.append(token)
    starts.append(tokens)
    tiles, span_row = [(0, 0, 0, 0, -1) for _ in range(0)], 0
    split_tiles, count = np.empty((len(starts), 4), np.int64), 0
    for index in range(len(starts) - 1):
        first, end, slots = starts[index], starts[index + 1], visible[starts[index + 1] - 1]
        spans = -(-slots // span_slots) if splits else 1
        if spans <= 1:
            tiles.append((first, end, 0, slots, -1))
            continue
        split_tiles[count, 0], split_tiles[count, 1] = first, end
        split_tiles[count, 2], split_tiles[count, 3] = span_row, spans
        count += 1
        for span in range(spans):
            tiles.append((first, end, span * span_slots, min((span + 1) * span_slots, slots), span_row))
            span_row += end - first
    every = np.array(tiles)
    work = (every[:, 1] - every[:, 0]) * (every[:, 3] - every[:, 2])
    return every[np.argsort(-work)], split_tiles[:count]


@compiled
def _tile(tiles: np.ndarray, index: int) -> Tile:
    numbers = tiles[index]
    return Tile(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])


@catching
@compiled
def _attend_items(thread: int, plan: Any, call: Any) -> None:
    """One thread's items, every `threads`-th one: fill in their part of `out` and `lse`, or of the spans' results."""
    (_, kv_heads, group, width), threads, slots = call.q.shape, call.workspace.shape[0], call.values.shape[3]
    items, token_size = plan.tiles.shape[0] * kv_heads, group * width
    _begin(call.matrix_units)
    for item in range(thread, items, threads):
        tile, head = _tile(plan.tiles, item // kv_heads), item % kv_heads
        first, tokens = tile.first_token, tile.end_token - tile.first_token
        queries, size = pointer(call.workspace[thread], 0), round_up(tokens * group, TILE) * width
        sums = shifted(queries, size)
        for token in range(tokens):
            source = pointer(call.q, ((first + token) * kv_heads + head) * token_size)
            copy(source, shifted(queries, token * token_size), token_size)
        clear(shifted(queries, tokens * token_size), size - tokens * token_size)
        clear(sums, size)
        upcoming = min(item + threads, items - 1)
        following = _tile(plan.tiles, upcoming // kv_heads)
        block = call.block_table[call.rows[following.first_token], following.first_slot // slots]
        next_block = block * kv_heads + upcoming % kv_heads
        visible = np.repeat(plan.visible[first : tile.end_token], group)
        blocks = Blocks(call.block_table[call.rows[first]], kv_heads, head, slots * width)
        scratch = shifted(sums, size)
        cache, span = (call.keys, call.values), (tile.first_slot, tile.end_slot)
        lse = _attend_tile(call.matrix_units, cache, blocks, span, sums, queries, scratch, visible, next_block)
        for token in range(tokens):
            if tile.span_row < 0:
                row, out, all_lse = first + token, pointer(call.out, 0), call.lse
            else:
                row, out, all_lse = tile.span_row + token, pointer(plan.span_out, 0), plan.span_lse
            target = shifted(out, (row * kv_heads + head) * token_size)
            copy(shifted(sums, token * token_size), target, token_size)
            for query in range(group):
                all_lse[row, head, query] = lse[token * group + query]
    _end(call.matrix_units)


@compiled
def _merge_spans(plan: Any, call: Any) -> None:
    """The spans' results -> those of whole tiles, weighted by their lse as `sharding.merge` does."""
    out, lse = call.out, call.lse
    for index in range(plan.split_tiles.shape[0]):
        numbers = plan.split_tiles[index]
        split = SplitTile(numbers[0], numbers[1], numbers[2], numbers[3])
        tokens = split.end_token - split.first_token
        for token in range(split.first_token, split.end_token):
            rows = split.span_row + token - split.first_token + tokens * np.arange(split.spans)
            for head in range(lse.shape[1]):
                for query in range(lse.shape[2]):
                    span_lse = np.array([plan.span_lse[row, head, query] for row in rows])
                    top = np.max(span_lse)
                    shift = np.float32(0.0) if top == -np.inf else top
                    weights = np.exp(span_lse - shift)
                    total = np.sum(weights)
                    lse[token, head, query] = top + np.log(total) if total != 0.0 else np.float32(-np.inf)
                    sums = out[token, head, query]
                    sums[:] = np.float32(0.0)
                    for span in range(split.spans if total != 0.0 else 0):
                        sums += weights[span] / total * plan.span_out[rows[span], head, query]


@compiled
def visible_slots(positions: np.ndarray, ownership: np.ndarray) -> np.ndarray:
    """int64 [T]: how many slots of this rank each token sees, as `CacheGeometry.tokens_per_rank` counts: the first
    ones of its request."""
    dcp, interleave, rank = ownership[0], ownership[1], ownership[2]
    visible = np.empty(positions.shape[0], np.int64)
    for token, position in enumerate(positions):
        stripes, rest = divmod(position + 1, dcp * interleave)
        visible[token] = stripes * interleave + min(max(rest - rank * interleave, 0), interleave)
    return visible


@compiled
def _attend_tile(
    matrix_units: Any,
    cache: tuple[Any, np.ndarray],
    blocks: Any,
    span: tuple[int, int],
    sums: Any,
    queries: Any,
    scratch: Any,
    visible: np.ndarray,
    next_block: int,
) -> np.ndarray:
    """One tile and KV head: queries [Q, D] of all tokens' heads, which see `visible` [Q] slots; sums [Q, D] are 0 and
    become the output -> lse [Q].

    Arithmetic on one part of the cache hides the wait for the next: keys, their values, the next keys and in the end
    those of `next_block`, an index into blocks and KV heads, with which the thread's next item begins.
    """
    keys, values = cache
    rows, slots, width = visible.shape[0], values.shape[3], values.shape[4]
    size, few = chunk_size(slots), rows <= FEW_QUERIES
    maximum, total = np.full(rows, np.float32(-np.inf), np.float32), np.zeros(rows, np.float32)
    state, pieces = SoftmaxState(visible, maximum, total), max(1, size // slots)
    offsets = np.zeros(2 * pieces, np.int64)
    query_tile = QueryTile(sums, width, queries, width, scratch, size)
    if not few:
        _split(matrix_units, queries, rows, width, _query_parts(scratch, size, width))
    first, last = span
    _locate(offsets[pieces:], blocks, first // slots)
    while first < last:
        offset = first % slots
        count = min(pieces * slots, size, slots - offset if pieces == 1 else size, last - first)
        end = first + count
        offsets[:pieces] = offsets[pieces:]
        if end < last:
            _locate(offsets[pieces:], blocks, end // slots)
        else:
            offsets[pieces:] = next_block * blocks.size
        key_matrix = _key_matrix(keys, offset, slots)
        value_matrix = Matrix(pointer(values, offset * width), width, COLUMNS)
        following = _first_read(keys, values, end % slots if end < last else 0)
        chunk, prefetch = (
            Chunk(first, count, key_matrix, value_matrix, slots, offsets),
            Prefetch(value_matrix.start, following),
        )
        if few:
            fold(FEW_ROWS_AT_ONCE, query_tile, state, chunk, prefetch)
            whole = pieces == 1 and (end >= last or min(size, slots - end % slots, last - end) == size)
            for line in range(count * width // COLUMNS, size * width // COLUMNS if whole else 0):  # what is left
                prefetch_columns(shifted(following, offsets[1]), line * COLUMNS)
        else:
            _fold_many(matrix_units, query_tile, state, chunk, prefetch)
        first = end
    return finish(sums, width, maximum, total)


@compiled
def _locate(offsets: np.ndarray, blocks: Any, first: int) -> None:
    """Offsets in the cache of the request's blocks from number `first` on, for this KV head."""
    for piece in range(offsets.shape[0]):
        block = blocks.table[min(first + piece, blocks.table.shape[0] - 1)]
        offsets[piece] = (block * blocks.kv_heads + blocks.kv_head) * blocks.size


@compiled
def _first_read(keys: Any, values: Any, slot: int) -> Any:
    """Pointer to what is read first of the first block from some slot on: keys, or values that are also the keys."""
    if keys is None:
        return pointer(values, slot * values.shape[4])
    return pointer(keys, slot)


@compiled
def _key_matrix(keys: Any, slot: int, slots: int) -> Any:
    """Keys of the first block from some slot on, as `fold` takes them."""
    if keys is None:
        return None
    return Matrix(pointer(keys, slot), slots, COLUMNS)


# Whether there are matrix units is an argument's type (None or not): of a condition on a value Numba would compile both
# branches, one of them with instructions that the CPU may not have.


@compiled
def _begin(matrix_units: Any) -> None:
    if matrix_units is not None:
        configure_tiles()


@compiled
def _end(matrix_units: Any) -> None:
    if matrix_units is not None:
        release_tiles()


@compiled
def _split(matrix_units: Any, queries: Any, rows: int, width: int, parts: Any) -> None:
    if matrix_units is not None:
        split_queries(queries, rows, width, parts)


@compiled
def _fold_many(matrix_units: Any, tile: Any, state: Any, chunk: Any, prefetch: Any) -> None:
    """A chunk for many queries: paired for matrix units, which need finite values, or widened to float32."""
    width, scratch, size = tile.value_dim, tile.scores, tile.score_stride
    widened = shifted(scratch, TILE * size)
    if _fold_paired(matrix_units, tile, state, chunk):
        return
    keys = _widen(chunk.keys, chunk, width, size, widened)
    values = _widened_values(keys, widened, width, size)
    whole = Chunk(chunk.first, chunk.slots, keys, values, size, np.zeros(2, np.int64))
    fold(ROWS_AT_ONCE, tile, state, whole, prefetch)


@compiled
def _widen(keys: Any, chunk: Any, width: int, size: int, target: Any) -> Any:
    """The pieces of a chunk in float32, keys before values. Returns the keys as `fold` takes them."""
    _, count, _, values, slots, offsets = chunk
    if keys is None:
        for piece in range(-(-count // slots)):
            first = piece * slots
            source = shifted(values.start, offsets[piece])
            copy(source, shifted(target, first * width), min(slots, count - first) * width)
        return None
    target_values = shifted(target, size * width)
    for piece in range(-(-count // slots)):
        first, offset = piece * slots, offsets[piece]
        rows = min(slots, count - first)
        source, to = shifted(keys.start, offset), shifted(target, first * width)
        widen_rows(source, keys.row_stride, width, rows, to, width * COLUMNS)
        source, to = shifted(values.start, offset), shifted(target_values, first * COLUMNS)
        widen_rows(source, values.row_stride, rows, width, to, size * COLUMNS)
    return Matrix(target, COLUMNS, width * COLUMNS)


@compiled
def _widened_values(keys: Any, widened: Any, width: int, size: int) -> Matrix:
    """Values that `_widen` left at `widened`, as `fold` takes them."""
    if keys is None:
        return Matrix(widened, width, COLUMNS)
    return Matrix(shifted(widened, size * width), COLUMNS, size * COLUMNS)


@compiled
def _fold_paired(matrix_units: Any, tile: Any, state: Any, chunk: Any) -> bool:
    """Fold on matrix units, if there are any and all values are finite. Returns whether that was so."""
    if matrix_units is not None:
        sums, width, _, _, scratch, size = tile
        first, count, k, v, slots, offsets = chunk
        keys, finite = shifted(scratch, TILE * size), True
        values, column_stride = shifted(keys, size * width), round_up(count, TERMS) // 2 * PAIRS
        for piece in range(-(-count // slots)):
            slot, offset = piece * slots, offsets[piece]
            rows = min(slots, count - slot)
            to = shifted(keys, slot * width // 2)
            pair_rows(shifted(k.start, offset), k.row_stride, width, round_up(rows, COLUMNS), to, width // 2 * PAIRS)
            to = shifted(values, slot // 2 * PAIRS)
            finite &= pair_rows(shifted(v.start, offset), v.row_stride, rows, width, to, column_stride)
        if finite:
            paired = QueryTile(sums, width, _query_parts(scratch, size, width), width, scratch, size)
            fold_pairs(paired, state, first, count, keys, values, shifted(values, size * width))
        return finite
    return False


@compiled
def _query_parts(scratch: Any, size: int, width: int) -> Any:
    """Where a thread keeps the parts of its queries: after scores, a chunk of the cache and parts of weights."""
    return shifted(scratch, TILE * size + 2 * size * width + PARTS * TILE * size // 2)


@compiled
def finish(sums: Any, width: int, maximum: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Running softmax -> partial: sums [Q, width] become the output in place, returns lse [Q]. Of a row that has seen
    nothing the output stays 0 and lse is -inf."""
    lse = np.full(maximum.shape, np.float32(-np.inf), np.float32)
    for query in range(maximum.shape[0]):
        if total[query] != 0.0:
            lse[query] = maximum[query] + np.log(total[query])
            scale(shifted(sums, query * width), width, np.float32(1.0) / total[query])
    return lse


@shared_with_python
def chunk_size(slots: int) -> int:
    """Slots that are visited together, in whole vectors: of one block, or all of several short ones."""
    return round_up(max(1, CHUNK_SLOTS // slots) * min(slots, CHUNK_SLOTS), COLUMNS)


@compiled
def _span_slots(slots: int) -> int:
    """Slots of a span, whole blocks where these are short."""
    return SPAN_SLOTS if slots > CHUNK_SLOTS else SPAN_SLOTS // slots * slots


@shared_with_python
def _most_tokens(group: int) -> int:
    """Tokens of a tile, at most."""
    return max(1, min(TILE_TOKENS[1], TILE_QUERIES // group))


def workspace_size(slots: int, group: int, width: int) -> int:
    """float32 numbers that a thread needs: a tile's queries and sums, scores, a chunk of keys and of values, and the
    parts of weights and of queries, which are bfloat16."""
    size, queries = chunk_size(slots), round_up(_most_tokens(group) * group, TILE)
    return 2 * queries * width + TILE * size + 2 * size * width + PARTS * (TILE * size + queries * width) // 2


def kernel(dtype: np.dtype, matrix_units: bool, parallel: bool, message: np.ndarray) -> Handler:
    """For caches of this dtype; `_read_call` lists arguments and results. Matrix units take bfloat16 caches alone."""
    units = True if matrix_units else None

    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        call = _read_call(frame, units, dtype)
        try:
            if parallel:
                _attend_parallel(call)
            else:
                _attend_sequential(call)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler


def latent_kernel(dtype: np.dtype, parallel: bool, message: np.ndarray) -> Handler:
    """The same for latents; `_read_latent_call` lists arguments and results."""

    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        call = _read_latent_call(frame, dtype)
        try:
            if parallel:
                _attend_parallel(call)
            else:
                _attend_sequential(call)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler
