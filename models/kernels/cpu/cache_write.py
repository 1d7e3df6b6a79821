"""A step's keys and values written to the paged cache, compiled by Numba.

XLA's CPU backend scatters number by number and waits for each cache line in turn: keys lie transposed, so that of one
token every number is in a line of its own. Here the next token's lines are asked for first, and neighbours in a block
are written together.

Works on plain arrays: knows blocks and slots, knows nothing about JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int32, njit, prange

from dcpjax.models.kernels.cpu.compile import compiled
from dcpjax.models.kernels.cpu.vector import COLUMNS, pointer, prefetch, prefetch_columns
from dcpjax.models.kernels.cpu.xla_call import NO_ERROR, arguments, array, is_call, results

RUN = 32  # tokens at most that are written together: their lines stay in the inner cache
ALONE = 8  # tokens that one thread writes: a second one costs more to wake


@njit(inline="always")
def _write_all(keys: Any, values: Any, k: Any, v: Any, block: np.ndarray, slot: np.ndarray) -> None:
    """Store k and v [N, K, D] at (block, slot) [N] of keys [B, 1, K, D, P] and values [B, 1, K, P, D]; a block past
    the end is dropped."""
    tokens = block.shape[0]
    if tokens <= ALONE:
        _write(keys, values, k, v, block, slot, 0, tokens)
    else:
        for share in prange(-(-tokens // RUN)):
            first = np.int64(share) * RUN  # for prange's uint64 `_write` would be compiled once more
            _write(keys, values, k, v, block, slot, first, min(first + RUN, tokens))


@compiled
def _write(keys: Any, values: Any, k: Any, v: Any, block: np.ndarray, slot: np.ndarray, first: int, end: int) -> None:
    """Tokens from `first` to `end`, neighbours of one block together."""
    while first < end:
        after = first + 1
        while after < min(end, first + RUN) and block[after] == block[first] and slot[after] == slot[after - 1] + 1:
            after += 1
        if after < end and block[after] < keys.shape[0]:
            _ask(keys, values, block[after], slot[after])
        if block[first] < keys.shape[0]:
            _write_run(keys, values, k[first:after], v[first:after], block[first], slot[first])
        first = after


@compiled
def _write_run(keys: Any, values: Any, k: np.ndarray, v: np.ndarray, block: int, slot: int) -> None:
    """k and v [S, K, D] at neighbouring slots."""
    tokens, heads, dims = k.shape
    for head in range(heads):
        for dim in range(dims):
            for token in range(tokens):
                keys[block, 0, head, dim, slot + token] = k[token, head, dim]
        for token in range(tokens):
            for dim in range(dims):
                values[block, 0, head, slot + token, dim] = v[token, head, dim]


@compiled
def _ask(keys: Any, values: Any, block: int, slot: int) -> None:
    """For the cache lines of one slot."""
    _, _, heads, dims, slots = keys.shape
    for head in range(heads):
        own = (block * heads + head) * dims * slots
        at, row = pointer(keys, own + slot), pointer(values, own + slot * dims)
        for dim in range(dims):
            prefetch(at, dim * slots)
        for dim in range(0, dims, COLUMNS):
            prefetch_columns(row, dim)


def kernel(stored: np.dtype) -> Callable[[Any], int]:
    """A custom call (keys, values, k, v, block, slot), the first two of which are its results."""

    def run(frame: Any) -> int:
        if is_call(frame):
            given, made = arguments(frame), results(frame)
            keys, values = array(made[0], 5, stored), array(made[1], 5, stored)
            k, v = array(given[2], 3, stored), array(given[3], 3, stored)
            _write_all(keys, values, k, v, array(given[4], 1, int32), array(given[5], 1, int32))
        return NO_ERROR

    return run
