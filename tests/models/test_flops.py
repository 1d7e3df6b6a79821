"""Arithmetic of a prefill step per device: what tensor parallelism splits by heads, dcp splits by tokens."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from abstract_arrays import abstract_tree
from compiled_steps import scheduled
from hypothesis import given
from hypothesis import strategies as st
from traced import MODELS, config_of, flops

from dcpjax.models import decoder
from dcpjax.models.attention.work import Runtime
from dcpjax.models.kv_cache import CHUNK_SLOTS, CacheGeometry
from dcpjax.runtime.batch import Batch, ShapeBuckets, build
from dcpjax.runtime.programs import compile_on_demand, forward
from dcpjax.sharding.arrays import is_spec
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import Placement

BLOCK = 1024  # tokens: of eight ranks each stores one chunk of it
QUERIES = 32
LAYOUTS = [(8, 1), (4, 2), (2, 4), (1, 8)]


def prefill(geometry: CacheGeometry, context: int) -> Batch:
    """The last 32 tokens of a prompt."""
    shapes = ShapeBuckets(max_rows=1, max_tokens=QUERIES, table_width=8 * geometry.chunk_blocks)
    return build(scheduled([context], count=QUERIES), shapes, geometry)


@cache
def lowered(kind: str, tp: int, dcp: int, context: int = BLOCK) -> tuple[Any, Batch]:
    """A step of abstract arrays: nothing is computed."""
    config, layout = config_of(kind), Layout(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    assert layout.tp == tp
    place, geometry = Placement(make_mesh(layout)), CacheGeometry(block_size=BLOCK, dcp=dcp)
    runtime = Runtime(place=place, geometry=geometry)

    batch = prefill(geometry, context)
    cache_specs = abstract_tree(decoder.cache_specs(config, layout, 8, geometry.slots, "float32"), place)
    weights = abstract_tree(decoder.weight_specs(config, layout, "float32"), place)
    step = compile_on_demand(forward, config, runtime, cache_specs)
    return step.trace(weights, cache_specs, jax.ShapeDtypeStruct((1,), np.int32), batch), batch


# --- counting


def equations(jaxpr: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every equation with the primitives around it. Inside `shard_map` shapes are those of one device."""
    for equation in jaxpr.eqns:
        yield path, equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                around = equation.primitive.name
                yield from equations(inner, (*path, around) if around in ("shard_map", "while") else path)


def attention_flops(kind: str, tp: int, dcp: int, context: int = BLOCK) -> int:
    """Per device and layer: the dots within the loop over chunks, times the chunks of the step's tiles.

    A step has two groups of tiles, single tokens and many; only the second is in use, and it is the last traced.
    """
    step, batch = lowered(kind, tp, dcp, context)
    found = equations(step.jaxpr.jaxpr)
    per_chunk = [flops(each) for path, each in found if each.primitive.name == "dot_general" and "while" in path]
    assert len(per_chunk) == 4, "scores and values of either group"
    single, many = batch.work.tiles
    assert single.count == 0
    return sum(per_chunk[2:]) * int(np.sum(many.chunks))


@pytest.mark.parametrize("kind", MODELS)
def test_no_device_attends_more_when_dcp_replaces_tp(kind):
    """Whole chunks on every rank: H / tp heads against S / dcp tokens, whatever the layout, KV heads copied or not."""
    config = config_of(kind)
    width = 2 * config.head_dim if config.mla is None else config.mla.cached_dim + config.mla.cached_dim
    exact = 2 * QUERIES * config.num_heads * width * BLOCK // 8
    found = {layout: attention_flops(kind, *layout) for layout in LAYOUTS}
    assert found == dict.fromkeys(LAYOUTS, exact)


@pytest.mark.parametrize("kind", MODELS)
def test_a_short_context_costs_a_whole_chunk_on_every_rank(kind):
    """The cost of dcp: chunks have a fixed number of slots, so eight ranks process at least 1,024 positions."""
    short = 64
    assert attention_flops(kind, 1, 8, short) == 8 * attention_flops(kind, 8, 1, short)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_the_surplus_of_a_tile_is_less_than_one_chunk_of_every_rank(tokens, dcp, interleave):
    geometry = CacheGeometry(block_size=BLOCK, dcp=dcp, interleave=interleave)
    visited = geometry.chunks(tokens) * geometry.chunk_slots * dcp
    assert tokens <= visited < tokens + CHUNK_SLOTS * dcp


@pytest.mark.parametrize("kind", MODELS)
def test_outside_attention_only_the_projections_to_keys_and_values_are_repeated_within_a_dcp_group(kind):
    """Each device multiplies its part of a matrix. MLA's latent is computed on every device."""
    config = config_of(kind)
    per_device = {layout: matrix_values(kind, *layout) for layout in LAYOUTS}
    heads = {(8, 1): 1, (4, 2): 1, (2, 4): 1, (1, 8): 2} if config.mla is None else dict.fromkeys(LAYOUTS, 0)
    kv = {layout: 2 * config.head_dim * config.hidden_size * count for layout, count in heads.items()}
    rest = {per_device[layout] - kv[layout] for layout in LAYOUTS}
    assert len(rest) == 1
    if config.mla is None:
        assert per_device[1, 8] - per_device[8, 1] == 2 * config.head_dim * config.hidden_size


def matrix_values(kind: str, tp: int, dcp: int) -> int:
    """Values of all weight matrices that one device holds."""
    config, layout = config_of(kind), Layout(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    assert layout.tp == tp
    specs = jax.tree.leaves(decoder.weight_specs(config, layout, "float32"), is_leaf=is_spec)
    place = Placement(make_mesh(layout))
    return sum(spec.bytes_per_device(place) // 4 for spec in specs if len(spec.axes) > 1)
