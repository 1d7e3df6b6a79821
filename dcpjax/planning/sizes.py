"""Bytes of a model's weights and cache on each device, from its declared arrays alone: no device, no backend.

float32 and bfloat16 are what the engine allocates, to the byte. fp8 and nvfp4 are the published forms of such
checkpoints, which the engine cannot run:

    fp8     matrices of the layers in 1 byte, a float32 scale per 128 x 128 (DeepSeek-V3, arXiv:2412.19437)
    nvfp4   routed experts (the layers' matrices where there are none) in 4 bits, an fp8 scale per 16 along a row and
            two float32 scales per matrix (NVIDIA ModelOpt)
    cache   fp8 1 byte; nvfp4 4 bits and an fp8 scale per 16 of a head's values

What is not quantised stays bfloat16, the router float32 as in the engine.
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from dcpjax.models import decoder
from dcpjax.models.config import ModelConfig
from dcpjax.models.moe import MoEWeights
from dcpjax.planning.options import RUNNABLE
from dcpjax.sharding.arrays import ArraySpec, is_spec
from dcpjax.sharding.mesh import DCP, TP, Layout
from dcpjax.sharding.rules import Placement, Rules

Kind = Literal["embedding", "head", "norm", "attention", "dense", "router", "experts"]
Shape = tuple[int, ...]
Part = tuple[Kind, ArraySpec]

FP8_EDGE, FP4_RUN = 128, 16  # values that share a scale: rows and columns of a block; neighbours in a row
ONE = Layout()


def abstract_place(layout: Layout, *, replicate_q: bool = False) -> Placement:
    """The engine's placement on a mesh without devices."""
    axis_types = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((layout.tp, layout.dcp), (TP, DCP), axis_types=axis_types)
    return Placement(cast(Mesh, mesh), Rules.for_attention(replicate_q=replicate_q))


@lru_cache(maxsize=64)
def weight_parts(config: ModelConfig, layout: Layout, dtype: str) -> Counter[Part]:
    """Every weight's declaration and what it is for, equal ones counted."""
    declared = dtype if dtype in RUNNABLE else "bfloat16"
    return Counter(_walk(decoder.weight_specs(config, layout, declared)))


def weight_bytes(config: ModelConfig, layout: Layout, dtype: str, *, replicate_q: bool = False) -> int:
    """All weights, on each device."""
    place = abstract_place(layout, replicate_q=replicate_q)
    parts = weight_parts(config, layout, dtype).items()
    return sum(count * part_bytes(part, place, dtype, config) for part, count in parts)


def part_bytes(part: Part, place: Placement, dtype: str, config: ModelConfig) -> int:
    """One array, on each device."""
    kind, spec = part
    if _is_quantised(kind, spec, dtype, config):
        return _quantised_bytes(local_shape(spec, place), dtype)
    return spec.bytes_per_device(place)


def checkpoint_bytes(config: ModelConfig, dtype: str) -> int:
    """All tensors of a checkpoint of this dtype, without file headers; routers are stored as the other weights."""
    total = 0
    for (kind, spec), count in weight_parts(config, ONE, dtype).items():
        shape = spec.checkpoint_shape
        if _is_quantised(kind, spec, dtype, config):
            total += count * _quantised_bytes(shape, dtype)
        else:
            total += count * math.prod(shape) * (4 if dtype == "float32" or _is_bias_of_router(kind, shape) else 2)
    return total


def block_bytes(config: ModelConfig, layout: Layout, block_size: int, dtype: str) -> int:
    """One block of the cache, on each device: all layers, copies of KV heads included."""
    place = abstract_place(layout)
    declared = dtype if dtype in RUNNABLE else "uint8"
    layers = decoder.cache_specs(config, layout, 1, block_size // layout.dcp, declared)
    values = sum(spec.bytes_per_device(place) for spec in jax.tree.leaves(layers, is_leaf=is_spec))
    if dtype != "nvfp4":
        return values
    width = config.head_dim if config.mla is None else config.mla.cached_dim
    return values // width * (_half(width) + math.ceil(width / FP4_RUN))


def local_shape(spec: ArraySpec, place: Placement) -> Shape:
    return spec.sharding(place).shard_shape(spec.shape)


def _walk(weights: decoder.Weights) -> Iterator[Part]:
    yield "embedding", weights.embed
    yield "norm", weights.norm
    if weights.head is not None:
        yield "head", weights.head
    for layer in weights.layers:
        yield from _all("norm", layer.replace(attention=None, mlp=None))  # type: ignore[attr-defined]
        yield from _all("attention", layer.attention)
        if not isinstance(layer.mlp, MoEWeights):
            yield from _all("dense", layer.mlp)
            continue
        yield from _all("dense", layer.mlp.shared)
        yield from _all("router", (layer.mlp.router, layer.mlp.bias))
        yield from _all("experts", (layer.mlp.gate, layer.mlp.up, layer.mlp.down))


def _all(kind: Kind, tree: Any) -> Iterator[Part]:
    return ((kind, spec) for spec in jax.tree.leaves(tree, is_leaf=is_spec))


def _is_quantised(kind: Kind, spec: ArraySpec, dtype: str, config: ModelConfig) -> bool:
    if dtype in RUNNABLE or len(spec.axes) < 2:
        return False
    if dtype == "nvfp4" and config.moe is not None:
        return kind == "experts"
    return kind in ("attention", "dense", "experts")


def _quantised_bytes(shape: Shape, dtype: str) -> int:
    *stacked, rows, columns = shape
    if dtype == "fp8":
        scales = math.ceil(rows / FP8_EDGE) * math.ceil(columns / FP8_EDGE)
        return math.prod(stacked) * (rows * columns + 4 * scales)
    row = _half(columns) + math.ceil(columns / FP4_RUN)
    return math.prod(stacked) * (rows * row + 2 * 4)


def _half(values: int) -> int:
    """Bytes of so many 4-bit values."""
    return -(-values // 2)


def _is_bias_of_router(kind: Kind, shape: Shape) -> bool:
    return kind == "router" and len(shape) == 1
