"""Bytes of a model's weights and cache on each device, computed from the declared arrays without any device.

For float32 and bfloat16 they equal what the engine allocates. fp8 and nvfp4, which the engine cannot run, are counted
as published checkpoints store them:

    fp8     matrices of the layers: 1 byte per value, a float32 scale per 128 x 128 (DeepSeek-V3, arXiv:2412.19437)
    nvfp4   routed experts, or without experts the matrices of the layers: 4 bits per value, an fp8 scale per 16 values
            of a row and two float32 scales per matrix (NVIDIA ModelOpt)
    cache   fp8: 1 byte per value; nvfp4: 4 bits per value and an fp8 scale per 16 values of a head

All other weights stay bfloat16, the router float32 as in the engine.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from dcpjax.models import decoder
from dcpjax.models.config import ModelConfig
from dcpjax.models.moe import MoEWeights
from dcpjax.planning.options import RUNNABLE
from dcpjax.sharding.arrays import ArraySpec, bytes_per_device, is_spec
from dcpjax.sharding.mesh import DCP, TP, Layout
from dcpjax.sharding.rules import Placement, Rules

Kind = Literal["embedding", "head", "norm", "attention", "dense", "router", "experts"]
Shape = tuple[int, ...]
Part = tuple[Kind, ArraySpec]

FP8_EDGE = 128  # rows and columns of a block of fp8 values that share a scale
FP4_RUN = 16  # neighbouring fp4 values of a row that share a scale
ONE = Layout()  # a single device


def abstract_place(layout: Layout, *, replicate_q: bool = False) -> Placement:
    """The engine's placement on a mesh without devices."""
    axis_types = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((layout.tp, layout.dcp), (TP, DCP), axis_types=axis_types)
    return Placement(cast(Mesh, mesh), Rules.for_attention(replicate_q=replicate_q))


@lru_cache(maxsize=64)
def weight_parts(config: ModelConfig, layout: Layout, dtype: str) -> Counter[Part]:
    """(kind, spec) of every weight -> how many weights have the same."""
    declared = dtype if dtype in RUNNABLE else "bfloat16"
    return Counter(_kinds_and_specs(decoder.weight_specs(config, layout, declared)))


def weight_bytes(config: ModelConfig, layout: Layout, dtype: str, *, replicate_q: bool = False) -> int:
    """Bytes of all weights on each device."""
    place = abstract_place(layout, replicate_q=replicate_q)
    parts = weight_parts(config, layout, dtype).items()
    return sum(count * part_bytes(part, place, dtype, config) for part, count in parts)


def part_bytes(part: Part, place: Placement, dtype: str, config: ModelConfig) -> int:
    """Bytes of one weight on each device."""
    kind, spec = part
    if _is_quantised(kind, spec, dtype, config):
        return _quantised_bytes(local_shape(spec, place), dtype)
    return spec.bytes_per_device(place)


def checkpoint_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all tensors of a checkpoint of this dtype, without file headers.

    What is not quantised takes 2 bytes per value, or 4 in float32; a router's bias always takes 4.
    """
    total = 0
    for (kind, spec), count in weight_parts(config, ONE, dtype).items():
        shape = spec.checkpoint_shape
        if _is_quantised(kind, spec, dtype, config):
            total += count * _quantised_bytes(shape, dtype)
        else:
            total += count * math.prod(shape) * (4 if dtype == "float32" or _is_router_bias(kind, shape) else 2)
    return total


def block_bytes(config: ModelConfig, layout: Layout, block_size: int, dtype: str) -> int:
    """Bytes of one block of the cache on each device: all layers, copied KV heads included."""
    place = abstract_place(layout)
    declared = dtype if dtype in RUNNABLE else "uint8"
    layers = decoder.cache_specs(config, layout, 1, block_size // layout.dcp, declared)
    values = bytes_per_device(layers, place)
    if dtype != "nvfp4":
        return values
    width = config.head_dim if config.mla is None else config.mla.cached_dim
    return values // width * (_half(width) + math.ceil(width / FP4_RUN))


def cached_value_bytes(dtype: str) -> float:
    """Of one value of the cache; an fp4 value has a share of its scale."""
    return {"float32": 4, "bfloat16": 2, "fp8": 1, "nvfp4": 0.5 + 1 / FP4_RUN}[dtype]


def local_shape(spec: ArraySpec, place: Placement) -> Shape:
    return spec.sharding(place).shard_shape(spec.shape)


def _kinds_and_specs(weights: decoder.Weights) -> Iterator[Part]:
    yield "embedding", weights.embed
    yield "norm", weights.norm
    if weights.head is not None:
        yield "head", weights.head
    for layer in weights.layers:
        yield from _with_kind("norm", replace(layer, attention=None, mlp=None))
        yield from _with_kind("attention", layer.attention)
        if not isinstance(layer.mlp, MoEWeights):
            yield from _with_kind("dense", layer.mlp)
            continue
        yield from _with_kind("dense", layer.mlp.shared)
        yield from _with_kind("router", (layer.mlp.router, layer.mlp.bias))
        yield from _with_kind("experts", (layer.mlp.gate, layer.mlp.up, layer.mlp.down))


def _with_kind(kind: Kind, tree: Any) -> Iterator[Part]:
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
    """Bytes that hold this many 4-bit values."""
    return -(-values // 2)


def _is_router_bias(kind: Kind, shape: Shape) -> bool:
    return kind == "router" and len(shape) == 1
