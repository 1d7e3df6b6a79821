"""Mixture of experts: whole experts spread over the mesh, work proportional to the tokens routed.

Every device sees all tokens, computes those that its own experts were chosen for, and one all-reduce adds the
parts up. On a device the (token, expert) pairs are sorted by expert and cut into tiles of one expert each; a loop
visits the tiles in use, however many there are. No token is dropped and no expert computes for nobody.
"""

from functools import partial as bind

import jax
import jax.numpy as jnp
from flax import struct

from dcpjax.models import mlp
from dcpjax.models.checkpoint_names import Stack
from dcpjax.models.config import ModelConfig, MoEConfig
from dcpjax.models.layers import Normed, dot
from dcpjax.models.mlp import MLPWeights, swiglu
from dcpjax.models.router import route
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.mesh import Layout
from dcpjax.sharding.platform import on_cpu
from dcpjax.sharding.pool import pool_rank, sum_over_pool
from dcpjax.sharding.rules import Placement

LEAST_TILE, MOST_TILE = 8, 128  # pairs of one expert that are multiplied together


@struct.dataclass
class MoEWeights:
    # [E, M] float32
    router: Leaf
    # [E] float32, or None: added to the scores when experts are chosen, not when they are weighed
    bias: Leaf
    # [E, F, M], [E, F, M], [E, M, F]
    gate: Leaf
    up: Leaf
    down: Leaf
    # experts that every token visits, or None
    shared: MLPWeights | None


def specs(config: ModelConfig, layout: Layout, dtype: str) -> MoEWeights:
    moe = _config(config)
    model, ffn = Axis(config.hidden_size), Axis(moe.intermediate_size)
    experts = Axis(moe.experts, "experts", multiple=layout.devices)
    rising = ArraySpec(axes=(experts, ffn, model), dtype=dtype)
    return MoEWeights(
        router=ArraySpec(axes=(Axis(moe.experts), model), dtype="float32"),
        bias=ArraySpec(axes=(Axis(moe.experts),), dtype="float32") if moe.correction_bias else None,
        gate=rising,
        up=rising,
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


def run(weights: MoEWeights, x: Normed, config: ModelConfig, place: Placement) -> jax.Array:
    """x [N, M] -> its stream [N, M] with what this adds.

    Per device: router (all), own experts and own slice of the shared ones, all-reduce.
    """
    moe, normed = _config(config), x.array()
    with jax.named_scope("router"):
        ids, shares = route(dot(normed, weights.router), weights.bias, moe)
    replicated, experts = place.spec(), place.spec("experts", None, None)
    rising, falling = place.spec("ffn", None), place.spec(None, "ffn")
    shared = None if weights.shared is None else MLPWeights(gate=rising, up=rising, down=falling)
    return x.stream + jax.shard_map(
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
    """A power of two near the pairs an expert gets on average, and no more than there are tokens."""
    average = -(-tokens * moe.experts_per_token // moe.experts)
    wanted = min(max(average, LEAST_TILE), MOST_TILE, tokens)
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
    """The weighted sum of this device's experts over each token: x [N, M], ids and shares [N, k] -> [N, M].

    ids count from this device's first expert; those outside [0, E) belong to other devices.

        order   | e0 e0 e0 | e1 | e3 e3 e3 e3 e3 | elsewhere ... |      pairs sorted by expert
        tiles   [ e0 e0 e0 -][e1 - - -][e3 e3 e3 e3][e3 - - -]          four pairs each, one expert each
    """
    (tokens, k), experts = ids.shape, gate.shape[0]
    here = (ids >= 0) & (ids < experts)
    expert_of = jnp.where(here, ids, experts).reshape(-1)
    order = jnp.argsort(expert_of, stable=True)
    counts = jnp.sum(expert_of[None, :] == jnp.arange(experts)[:, None], axis=1)
    starts = jnp.cumsum(counts) - counts
    tiles = -(-counts // tile)
    ends = jnp.cumsum(tiles)
    padded = jnp.pad(order, (0, tile))

    def visit(index: jax.Array, results: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= index)
        first = starts[expert] + (index - (ends[expert] - tiles[expert])) * tile
        pairs = jax.lax.dynamic_slice_in_dim(padded, first, tile)
        chosen = jnp.take(x, pairs // k, axis=0)
        own_gate, own_up, own_down = (_matrix(stack, expert) for stack in (gate, up, down))
        result = dot(swiglu(chosen, own_gate, own_up), own_down)
        return jax.lax.dynamic_update_slice_in_dim(results, result, first, 0)  # overhang is overwritten or unused

    results = jax.lax.fori_loop(0, ends[-1], visit, jnp.zeros((tokens * k + tile, x.shape[1]), jnp.float32))
    place = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k)).reshape(tokens, k)

    def add(choice: jax.Array, total: jax.Array) -> jax.Array:
        """In the order of the token's own choices: what other tokens chose changes nothing."""
        mine, share = place[:, choice], jnp.where(here[:, choice], shares[:, choice], 0.0)
        return total + jnp.where(here[:, choice, None], jnp.take(results, mine, axis=0) * share[:, None], 0.0)

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
