"""The dense feed-forward block: SwiGLU (Shazeer 2020), its width F split over all devices."""

import jax

from dcpjax.models.config import ModelConfig
from dcpjax.models.kernels.cpu import product_calls
from dcpjax.models.layers import NormedInput, dot, dots, fused_dots
from dcpjax.sharding import struct
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
    up, down = ArraySpec(axes=(ffn, model), dtype=dtype), ArraySpec(axes=(model, ffn), dtype=dtype)
    return MLPWeights(gate=up, up=up, down=down)


def names(root: str) -> MLPWeights:
    return MLPWeights(*(f"{root}.{part}_proj.weight" for part in ("gate", "up", "down")))


def run(weights: MLPWeights, x: NormedInput, place: Placement) -> jax.Array:
    """x [T, M] -> the residual stream [T, M] plus the result."""
    matrices = weights.gate, weights.up, weights.down
    if place.single_cpu and product_calls.suits(x.residual.shape[0], *matrices):
        return place.constrain(fused_dots(x, *matrices, gated=True, residual=x.residual)[0], None, None)
    gated = place.constrain(swiglu(x, weights.gate, weights.up, single_cpu=place.single_cpu), None, "ffn")
    return place.constrain(dot(gated, weights.down, residual=x.residual, single_cpu=place.single_cpu), None, None)


def swiglu(x: jax.Array | NormedInput, gate: jax.Array, up: jax.Array, *, single_cpu: bool = False) -> jax.Array:
    """x [T, M], gate and up [F, M] -> silu(x gate) * (x up) [T, F]."""
    gate_out, up_out = dots(x, gate, up, single_cpu=single_cpu)
    return jax.nn.silu(gate_out) * up_out
