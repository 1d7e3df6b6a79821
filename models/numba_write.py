"""A step's keys and values written to the paged cache, compiled by Numba.

XLA's CPU backend scatters number by number and waits for each cache line in turn: keys lie transposed, so that of one
token every number is in a line of its own. Here the next token's lines are asked for first, and neighbours in a block
are written together.

Works on plain arrays: knows blocks and slots, knows nothing about JAX.
"""

# Numba calls these functions otherwise than they are defined
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from numba import from_dtype, njit, prange, types

from dcpjax.models.numba_call import arguments, results
from dcpjax.models.numba_call import array as array_of
from dcpjax.models.numba_compile import compiled
from dcpjax.models.numba_here import COLUMNS
from dcpjax.models.numba_vector import pointer, prefetch, prefetch_columns

RUN = 32  # tokens at most that are written together: their lines stay in the inner cache
ALONE = 8  # tokens that one thread writes: a second one costs more to wake


@compiled
def write_in_turn(keys: Any, values: Any, k: Any, v: Any, block: np.ndarray, slot: np.ndarray) -> None:
    """Store k and v [N, K, D] at (block, slot) [N] of keys [B, 1, K, D, P] and values [B, 1, K, P, D]; a block past
    the end is dropped."""
    _write(keys, values, k, v, block, slot, 0, block.shape[0])


@compiled(parallel=True)
def write_in_parallel(keys: Any, values: Any, k: Any, v: Any, block: np.ndarray, slot: np.ndarray) -> None:
    tokens = block.shape[0]
    if tokens <= ALONE:
        _write(keys, values, k, v, block, slot, 0, tokens)
    else:
        for share in prange(-(-tokens // RUN)):
            _write(keys, values, k, v, block, slot, share * RUN, min((share + 1) * RUN, tokens))


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


def kernel(stored: np.dtype, parallel: bool) -> Any:
    """A custom call (keys, values, k, v, block, slot), the first two of which are its results."""
    write = write_in_parallel if parallel else write_in_turn
    cached, new, ints = array_of(5, from_dtype(stored)), array_of(3, from_dtype(stored)), array_of(1, types.int32)

    @njit(inline="always")
    def run(frame: np.ndarray) -> None:
        given, made = arguments(frame), results(frame)
        write(cached(made[0]), cached(made[1]), new(given[2]), new(given[3]), ints(given[4]), ints(given[5]))

    return run
