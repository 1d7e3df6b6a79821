"""The dense feed-forward block: SwiGLU (Shazeer 2020), its width split over the whole mesh."""

import jax
from flax import struct

from dcpjax.models.config import ModelConfig
from dcpjax.models.kernels.cpu import product_calls
from dcpjax.models.layers import Normed, dot, dots, fused_dots
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.mesh import Layout
from dcpjax.sharding.rules import Placement


@struct.dataclass
class MLPWeights:
    # [F, M], [F, M], [M, F]
    gate: Leaf
    up: Leaf
    down: Leaf


def specs(config: ModelConfig, layout: Layout, dtype: str, width: int | None = None) -> MLPWeights:
    model = Axis(config.hidden_size)
    ffn = Axis(width or config.intermediate_size, "ffn", multiple=layout.devices)
    rising, falling = ArraySpec(axes=(ffn, model), dtype=dtype), ArraySpec(axes=(model, ffn), dtype=dtype)
    return MLPWeights(gate=rising, up=rising, down=falling)


def names(root: str) -> MLPWeights:
    return MLPWeights(*(f"{root}.{part}_proj.weight" for part in ("gate", "up", "down")))


def run(weights: MLPWeights, x: Normed, place: Placement) -> jax.Array:
    """x [N, M] -> its stream [N, M] with what this adds."""
    own = weights.gate, weights.up, weights.down
    if place.single_cpu and product_calls.suits(x.stream.shape[0], *own):
        return place.constrain(fused_dots(x, *own, gated=True, onto=x.stream)[0], None, None)
    gated = place.constrain(swiglu(x, weights.gate, weights.up, single_cpu=place.single_cpu), None, "ffn")
    return place.constrain(dot(gated, weights.down, onto=x.stream, single_cpu=place.single_cpu), None, None)


def swiglu(x: jax.Array | Normed, gate: jax.Array, up: jax.Array, *, single_cpu: bool = False) -> jax.Array:
    """x [N, M], gate and up [F, M] -> [N, F]."""
    gated, risen = dots(x, gate, up, single_cpu=single_cpu)
    return jax.nn.silu(gated) * risen
