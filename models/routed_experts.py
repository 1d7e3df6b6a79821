"""The experts of one device: each multiplies the tokens that chose it, and no others.

The (token, expert) pairs are sorted by expert, those of other devices last. Every token has a result for each of its
choices, and adds up its own. No token is dropped, and an expert that no token chose is not read.

    order   | e0 e0 e0 | e1 | e3 e3 e3 e3 e3 | other devices |      pairs sorted by expert

    tiles   [ e0 e0 e0 -][e1 - - -][e3 e3 e3 e3][e3 - - -]          a loop over tiles of one expert each
    TPU     [ e0 e0 e0   e1   e3 e3 e3 e3 e3             ]          the grouped product of the platform
"""

from functools import partial as bind
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcpjax.models.layers import dot
from dcpjax.models.matmul import grouped_matmul
from dcpjax.models.mlp import swiglu
from dcpjax.sharding.platform import on_cpu

MIN_TILE, MAX_TILE = 8, 128  # pairs of one expert that are multiplied together
PIECE = 2_048  # pairs of a grouped product at most, which bounds the memory of their inputs and results
STACK_ORDER = (0, 2, 1)  # of the axes of [E, out, in] in a TPU's memory: its grouped product would copy any other


class _Pairs(NamedTuple):
    """The choices of all tokens, sorted by expert."""

    order: jax.Array  # [P] int32: number of each pair, token * k + choice
    starts: jax.Array  # [E] int32: index in `order` of each expert's first pair
    counts: jax.Array  # [E] int32: pairs of each expert

    @classmethod
    def of(cls, ids: jax.Array, experts: int) -> "_Pairs":
        """ids [T, k]; those outside [0, experts) come last and are not counted."""
        expert_of = jnp.where(_are_local(ids, experts), ids, experts).reshape(-1)
        counts = jnp.sum(expert_of[None, :] == jnp.arange(experts)[:, None], axis=1)
        return cls(jnp.argsort(expert_of, stable=True), jnp.cumsum(counts) - counts, counts)


def tile_size(tokens: int, experts: int, experts_per_token: int) -> int:
    """Pairs of a tile: a power of two near the average number per expert, which has at most one pair per token."""
    average = -(-tokens * experts_per_token // experts)
    wanted = min(max(average, MIN_TILE), MAX_TILE, tokens)
    return 1 << (wanted - 1).bit_length()


def routed(
    x: jax.Array,
    ids: jax.Array,
    shares: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    tile: int,
) -> jax.Array:
    """The weighted sum of this device's experts for each token: x [T, M], ids and shares [T, k] -> [T, M].

    A token has k experts. ids count from this device's first expert; those outside [0, E) are on other devices.
    """
    pairs, choices = _Pairs.of(ids, gate.shape[0]), ids.shape[1]
    # not on GPUs: there XLA multiplies every pair with every expert for a grouped product
    results = jax.lax.platform_dependent(
        x,
        pairs,
        (gate, up, down),
        tpu=bind(in_groups, choices=choices, rows=ids.size + tile),
        default=bind(in_tiles, choices=choices, tile=tile),
    )
    return _sum_of_choices(results, ids, shares, pairs, gate.shape[0])


def in_tiles(x: jax.Array, pairs: _Pairs, weights: tuple[jax.Array, ...], *, choices: int, tile: int) -> jax.Array:
    """The result of each pair [P + tile, M] in sorted order, by a loop over the tiles that hold any."""
    tiles = -(-pairs.counts // tile)
    ends, padded = jnp.cumsum(tiles), jnp.pad(pairs.order, (0, tile))

    def run_tile(index: jax.Array, results: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= index)
        first = pairs.starts[expert] + (index - (ends[expert] - tiles[expert])) * tile
        inputs = jnp.take(x, jax.lax.dynamic_slice_in_dim(padded, first, tile) // choices, axis=0)
        gate, up, down = (_matrix(stack, expert) for stack in weights)
        result = dot(swiglu(inputs, gate, up), down)
        # what this writes beyond the expert's pairs is overwritten by the next tile or not used
        return jax.lax.dynamic_update_slice_in_dim(results, result, first, 0)

    return jax.lax.fori_loop(0, ends[-1], run_tile, jnp.zeros((len(padded), x.shape[1]), jnp.float32))


def in_groups(x: jax.Array, pairs: _Pairs, weights: tuple[jax.Array, ...], *, choices: int, rows: int) -> jax.Array:
    """The same [rows, M], by grouped products of at most `PIECE` pairs of all experts, as many as hold pairs."""
    ends, size = pairs.starts + pairs.counts, min(len(pairs.order), PIECE)
    gate, up, down = weights

    def run_piece(index: jax.Array | int, results: jax.Array) -> jax.Array:
        first = jnp.minimum(index * size, len(pairs.order) - size)  # the last piece may repeat some pairs
        begin, end = (jnp.clip(edge - first, 0, size) for edge in (pairs.starts, ends))
        own = jax.lax.dynamic_slice_in_dim(pairs.order, first, size)
        inputs = jnp.take(x.astype(gate.dtype), own // choices, axis=0)
        rising, factor = (grouped_matmul(inputs, stack, end - begin) for stack in (gate, up))
        result = grouped_matmul((jax.nn.silu(rising) * factor).astype(down.dtype), down, end - begin)
        return jax.lax.dynamic_update_slice_in_dim(results, result, first, 0)

    results = jnp.zeros((rows, x.shape[1]), jnp.float32)
    if size == len(pairs.order):
        return run_piece(0, results)
    return jax.lax.fori_loop(0, -(-ends[-1] // size), run_piece, results)


def _sum_of_choices(results: jax.Array, ids: jax.Array, shares: jax.Array, pairs: _Pairs, experts: int) -> jax.Array:
    """Each token's own results times their shares, in the order of its choices: whatever other tokens chose."""
    tokens, choices = ids.shape
    row_of_pair = jnp.zeros_like(pairs.order).at[pairs.order].set(jnp.arange(ids.size)).reshape(ids.shape)

    def add(choice: jax.Array, total: jax.Array) -> jax.Array:
        is_local = _are_local(ids[:, choice], experts)
        share = jnp.where(is_local, shares[:, choice], 0.0)
        result = jnp.take(results, row_of_pair[:, choice], axis=0) * share[:, None]
        return total + jnp.where(is_local[:, None], result, 0.0)

    return jax.lax.fori_loop(0, choices, add, jnp.zeros((tokens, results.shape[1]), jnp.float32))


def _are_local(ids: jax.Array, experts: int) -> jax.Array:
    return (ids >= 0) & (ids < experts)


def _matrix(stack: jax.Array, expert: jax.Array) -> jax.Array:
    """One expert's matrix of a stack [E, out, in]."""
    if stack.dtype != jnp.bfloat16:
        return stack[expert]
    return on_cpu(_matrix_by_bits, lambda stack, expert: stack[expert], stack, expert)


def _matrix_by_bits(stack: jax.Array, expert: jax.Array) -> jax.Array:
    """One bfloat16 matrix of a stack, read as integers.

    XLA's CPU backend would convert the whole stack to float32 before the loop over the experts. It does not convert
    integers, and the barrier keeps the bitcast of the stack inside the loop.
    """
    stack, expert = jax.lax.optimization_barrier((stack, expert))
    bits = jax.lax.bitcast_convert_type(stack, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[expert], jnp.bfloat16)
