"""Mixture of experts: each device has whole experts; the work is proportional to the tokens routed to them.

Every device has all tokens and computes the results of its own experts (see `routed_experts`); one all-reduce adds the
devices' results.
"""

from functools import partial as bind

import jax

from dcpjax.models import mlp
from dcpjax.models.checkpoint_names import Stack
from dcpjax.models.config import ModelConfig, MoEConfig
from dcpjax.models.layers import NormedInput, dot
from dcpjax.models.mlp import MLPWeights, swiglu
from dcpjax.models.routed_experts import STACK_ORDER, routed, tile_size
from dcpjax.models.router import route
from dcpjax.sharding import struct
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.mesh import Layout
from dcpjax.sharding.pool import pool_rank, sum_over_pool
from dcpjax.sharding.rules import Placement


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
    up = ArraySpec(axes=(experts, ffn, model), dtype=dtype, tpu_order=STACK_ORDER)
    return MoEWeights(
        router=ArraySpec(axes=(Axis(moe.experts), model), dtype="float32"),
        bias=ArraySpec(axes=(Axis(moe.experts),), dtype="float32") if moe.correction_bias else None,
        gate=up,
        up=up,
        down=ArraySpec(axes=(experts, model, ffn), dtype=dtype, tpu_order=STACK_ORDER),
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
    part = routed(x, own_ids, shares, gate, up, down, tile_size(ids.shape[0], moe.experts, moe.experts_per_token))
    if shared is not None:
        part = part + dot(swiglu(x, shared.gate, shared.up), shared.down)
    return sum_over_pool(part)


def _config(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None
    return config.moe
