"""A step's keys and values written to the paged cache, compiled by Numba.

XLA's CPU backend scatters number by number and waits for each cache line in turn: keys lie transposed, so each number
of a token's key is in a line of its own. Here the next token's lines are requested first, and neighbours in a block
are written together.
"""

# Numba calls these functions with other types than Python would
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any, NamedTuple

import numpy as np
from numba import int32, prange

from dcpjax.models.kernels.cpu.compile import both, compiled
from dcpjax.models.kernels.cpu.vector import COLUMNS, pointer, prefetch, prefetch_columns
from dcpjax.models.kernels.cpu.xla_call import (
    NO_ERROR,
    Handler,
    arguments,
    array,
    error,
    is_call,
    results,
)

RUN = 32  # tokens at most that are written together: their lines stay in the inner cache
SEQUENTIAL_TOKENS = 8  # so many are written by one thread: a second one costs more to wake


class WriteCall(NamedTuple):
    """Arguments and results of one call."""

    keys: np.ndarray  # [N, 1, K, D, P], written in place
    values: np.ndarray  # [N, 1, K, P, D], written in place
    new_keys: np.ndarray  # [T, K, D]
    new_values: np.ndarray  # [T, K, D]
    block: np.ndarray  # [T] int32; past the end of the cache for a token that is dropped
    slot: np.ndarray  # [T] int32


def _write_all(call: Any) -> None:
    """Store new keys and values at (block, slot). Nothing in a thread allocates or raises."""
    tokens = call.block.shape[0]
    if tokens <= SEQUENTIAL_TOKENS:
        _write(call, 0, tokens)
    else:
        for part in prange(-(-tokens // RUN)):
            first = np.int64(part) * RUN  # prange counts in uint64, for which `_write` would be compiled once more
            _write(call, first, min(first + RUN, tokens))


_write_parallel, _write_sequential = both(_write_all)


@compiled
def _write(call: Any, first: int, end: int) -> None:
    """Tokens from `first` to `end`, neighbours of one block together."""
    block, slot, blocks = call.block, call.slot, call.keys.shape[0]
    while first < end:
        after = first + 1
        while after < min(end, first + RUN) and block[after] == block[first] and slot[after] == slot[after - 1] + 1:
            after += 1
        if after < end and block[after] < blocks:
            _prefetch_slot(call.keys, call.values, block[after], slot[after])
        if block[first] < blocks:
            _write_run(call, first, after)
        first = after


@compiled
def _write_run(call: Any, first: int, end: int) -> None:
    """Tokens from `first` to `end`, which go to neighbouring slots of one block."""
    keys, values, block, slot = call.keys, call.values, call.block[first], call.slot[first]
    k, v = call.new_keys[first:end], call.new_values[first:end]
    tokens, heads, dims = k.shape
    for head in range(heads):
        for dim in range(dims):
            for token in range(tokens):
                keys[block, 0, head, dim, slot + token] = k[token, head, dim]
        for token in range(tokens):
            for dim in range(dims):
                values[block, 0, head, slot + token, dim] = v[token, head, dim]


@compiled
def _prefetch_slot(keys: Any, values: Any, block: int, slot: int) -> None:
    """Request the cache lines of one slot from memory."""
    _, _, heads, dims, slots = keys.shape
    for head in range(heads):
        begin = (block * heads + head) * dims * slots
        column, row = pointer(keys, begin + slot), pointer(values, begin + slot * dims)
        for dim in range(dims):
            prefetch(column, dim * slots)
        for dim in range(0, dims, COLUMNS):
            prefetch_columns(row, dim)


def kernel(dtype: np.dtype, parallel: bool, message: np.ndarray) -> Handler:
    """For caches of this dtype: (keys, values, new keys, new values, block, slot) -> (keys, values), in place."""

    def handler(frame: Any) -> int:
        if not is_call(frame, message):
            return NO_ERROR
        inputs, outputs = arguments(frame), results(frame)
        call = WriteCall(
            array(outputs[0], 5, dtype),
            array(outputs[1], 5, dtype),
            array(inputs[2], 3, dtype),
            array(inputs[3], 3, dtype),
            array(inputs[4], 1, int32),
            array(inputs[5], 1, int32),
        )
        try:
            if parallel:
                _write_parallel(call)
            else:
                _write_sequential(call)
        except Exception:
            return error(frame, message)
        return NO_ERROR

    return handler
