"""Mixture of experts: each device has whole experts; the work is proportional to the tokens routed to them.

Every device has all tokens and computes the results of its own experts; one all-reduce adds the devices' results. On
a device the (token, expert) pairs are sorted by expert and cut into tiles of one expert each, and a loop runs over the
tiles in use. No token is dropped, and an expert that no token chose costs nothing.
"""

from functools import partial as bind

import jax
import jax.numpy as jnp

from dcpjax.models import mlp
from dcpjax.models.checkpoint_names import Stack
from dcpjax.models.config import ModelConfig, MoEConfig
from dcpjax.models.layers import NormedInput, dot
from dcpjax.models.mlp import MLPWeights, swiglu
from dcpjax.models.router import route
from dcpjax.sharding import struct
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.mesh import Layout
from dcpjax.sharding.platform import on_cpu
from dcpjax.sharding.pool import pool_rank, sum_over_pool
from dcpjax.sharding.rules import Placement

MIN_TILE, MAX_TILE = 8, 128  # pairs of one expert that are multiplied together


@struct.dataclass
class MoEWeights:
    # [E, M] float32
    router: Leaf
    # [E] float32, or None: added to the scores to choose experts, not to weight their results
    bias: Leaf
    # [E, F, M], [E, F, M], [E, M, F]
    gate: Leaf
    up: Leaf
    down: Leaf
    # experts that every token goes to, or None
    shared: MLPWeights | None


def specs(config: ModelConfig, layout: Layout, dtype: str) -> MoEWeights:
    moe = _config(config)
    model, ffn = Axis(config.hidden_size), Axis(moe.intermediate_size)
    experts = Axis(moe.experts, "experts", multiple=layout.devices)
    up = ArraySpec(axes=(experts, ffn, model), dtype=dtype)
    return MoEWeights(
        router=ArraySpec(axes=(Axis(moe.experts), model), dtype="float32"),
        bias=ArraySpec(axes=(Axis(moe.experts),), dtype="float32") if moe.correction_bias else None,
        gate=up,
        up=up,
        down=ArraySpec(axes=(experts, model, ffn), dtype=dtype),
        shared=mlp.specs(config, layout, dtype, moe.shared_size) if moe.shared_size else None,
    )


def names(config: ModelConfig, root: str) -> MoEWeights:
    moe = _config(config)

    def stack(part: str) -> Stack:
        return Stack(tuple(f"{root}.experts.{expert}.{part}_proj.weight" for expert in range(moe.experts)))

    return MoEWeights(
        router=f"{root}.gate.weight",
        bias=f"{root}.gate.e_score_correction_bias" if moe.correction_bias else None,
        gate=stack("gate"),
        up=stack("up"),
        down=stack("down"),
        shared=mlp.names(f"{root}.shared_experts") if moe.shared_size else None,
    )


def run(weights: MoEWeights, x: NormedInput, config: ModelConfig, place: Placement) -> jax.Array:
    """x [T, M] -> the residual stream [T, M] plus the result.

    Per device: the router for all tokens, own experts and own slice of the shared ones, all-reduce.
    """
    moe, normed = _config(config), x.normed()
    with jax.named_scope("router"):
        ids, shares = route(dot(normed, weights.router), weights.bias, moe)
    replicated, experts = place.spec(), place.spec("experts", None, None)
    up, down = place.spec("ffn", None), place.spec(None, "ffn")
    shared = None if weights.shared is None else MLPWeights(gate=up, up=up, down=down)
    return x.residual + jax.shard_map(
        bind(_run_on_device, moe=moe),
        mesh=place.mesh,
        in_specs=(replicated, replicated, replicated, experts, experts, experts, shared),
        out_specs=replicated,
        check_vma=False,
    )(normed, ids, shares, weights.gate, weights.up, weights.down, weights.shared)


def _run_on_device(
    x: jax.Array,
    ids: jax.Array,
    shares: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    shared: MLPWeights | None,
    *,
    moe: MoEConfig,
) -> jax.Array:
    own_ids = ids - pool_rank() * gate.shape[0]
    part = routed(x, own_ids, shares, gate, up, down, tile_size(ids.shape[0], moe))
    if shared is not None:
        part = part + dot(swiglu(x, shared.gate, shared.up), shared.down)
    return sum_over_pool(part)


def tile_size(tokens: int, moe: MoEConfig) -> int:
    """Pairs of a tile: a power of two near the average number per expert, which has at most one pair per token."""
    average = -(-tokens * moe.experts_per_token // moe.experts)
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

        order   | e0 e0 e0 | e1 | e3 e3 e3 e3 e3 | other devices |      pairs sorted by expert
        tiles   [ e0 e0 e0 -][e1 - - -][e3 e3 e3 e3][e3 - - -]          four pairs each, one expert each
    """
    (tokens, k), experts = ids.shape, gate.shape[0]
    is_local = (ids >= 0) & (ids < experts)
    expert_of = jnp.where(is_local, ids, experts).reshape(-1)
    order = jnp.argsort(expert_of, stable=True)
    counts = jnp.sum(expert_of[None, :] == jnp.arange(experts)[:, None], axis=1)
    starts = jnp.cumsum(counts) - counts
    tiles = -(-counts // tile)
    ends = jnp.cumsum(tiles)
    padded = jnp.pad(order, (0, tile))

    def run_tile(index: jax.Array, results: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= index)
        first = starts[expert] + (index - (ends[expert] - tiles[expert])) * tile
        pairs = jax.lax.dynamic_slice_in_dim(padded, first, tile)
        inputs = jnp.take(x, pairs // k, axis=0)
        own_gate, own_up, own_down = (_matrix(stack, expert) for stack in (gate, up, down))
        result = dot(swiglu(inputs, own_gate, own_up), own_down)
        # what this writes beyond the expert's pairs is overwritten by the next tile or not used
        return jax.lax.dynamic_update_slice_in_dim(results, result, first, 0)

    results = jax.lax.fori_loop(0, ends[-1], run_tile, jnp.zeros((tokens * k + tile, x.shape[1]), jnp.float32))
    row_of_pair = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k)).reshape(tokens, k)

    def add(choice: jax.Array, total: jax.Array) -> jax.Array:
        """Add in the order of the token's own choices, so that the sum does not depend on other tokens."""
        rows, share = row_of_pair[:, choice], jnp.where(is_local[:, choice], shares[:, choice], 0.0)
        return total + jnp.where(is_local[:, choice, None], jnp.take(results, rows, axis=0) * share[:, None], 0.0)

    return jax.lax.fori_loop(0, k, add, jnp.zeros(x.shape, jnp.float32))


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


def _config(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None
    return config.moe
