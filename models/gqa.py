"""Grouped-query attention (Ainslie et al. 2023): projections, head norms and rope around the paged cache."""

from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import jax

from dcpjax.models.attention.dispatch import attend_and_merge, attend_on_device, attend_to_whole, rows_of
from dcpjax.models.attention.gathered_keys import OwnHeads, attend_to_gathered, own_heads
from dcpjax.models.attention.work import Runtime, Work
from dcpjax.models.config import ModelConfig
from dcpjax.models.kv_cache import LayerCache
from dcpjax.models.layers import NormedInput, add_bias, dot, dots, rms_norm
from dcpjax.models.rotary import Rotary, rotate
from dcpjax.sharding import struct
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.merge import gather_over_dcp
from dcpjax.sharding.mesh import Layout


@struct.dataclass
class GQAWeights:
    """Projections are [out, in]; a bias or head norm that the family does not have is None."""

    # [H * D, M], [K * D, M], [K * D, M]
    q: Leaf
    k: Leaf
    v: Leaf
    # [H * D], [K * D], [K * D] or None
    q_bias: Leaf
    k_bias: Leaf
    v_bias: Leaf
    # [D] or None
    q_norm: Leaf
    k_norm: Leaf
    # [M, H * D], [M] or None
    o: Leaf
    o_bias: Leaf


def specs(config: ModelConfig, layout: Layout, dtype: str) -> GQAWeights:
    model, head = Axis(config.hidden_size), Axis(config.head_dim)
    q_size = config.num_heads * config.head_dim
    query = Axis(q_size, "query", groups=layout.tp, multiple=layout.dcp)
    heads = Axis(q_size, "heads", groups=layout.tp, multiple=layout.dcp)
    kv = _kv_axis(config, layout, config.head_dim)

    def matrix(rows: Axis, columns: Axis) -> ArraySpec:
        return ArraySpec(axes=(rows, columns), dtype=dtype)

    def vector(axis: Axis, used: bool, init: Any = "normal") -> ArraySpec | None:
        return ArraySpec(axes=(axis,), dtype=dtype, init=init) if used else None

    return GQAWeights(
        q=matrix(query, model),
        k=matrix(kv, model),
        v=matrix(kv, model),
        q_bias=vector(query, config.qkv_bias),
        k_bias=vector(kv, config.qkv_bias),
        v_bias=vector(kv, config.qkv_bias),
        q_norm=vector(head, config.qk_norm, "ones"),
        k_norm=vector(head, config.qk_norm, "ones"),
        o=matrix(model, heads),
        o_bias=vector(model, config.o_bias),
    )


def names(config: ModelConfig, root: str) -> GQAWeights:
    def biases(used: bool, *parts: str) -> list[str | None]:
        return [f"{root}.{part}" if used else None for part in parts]

    q_bias, k_bias, v_bias = biases(config.qkv_bias, "q_proj.bias", "k_proj.bias", "v_proj.bias")
    q_norm, k_norm = biases(config.qk_norm, "q_norm.weight", "k_norm.weight")
    (o_bias,) = biases(config.o_bias, "o_proj.bias")
    return GQAWeights(
        q=f"{root}.q_proj.weight",
        k=f"{root}.k_proj.weight",
        v=f"{root}.v_proj.weight",
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        q_norm=q_norm,
        k_norm=k_norm,
        o=f"{root}.o_proj.weight",
        o_bias=o_bias,
    )


def cache_specs(config: ModelConfig, layout: Layout, num_blocks: int, slots: int, dtype: Any) -> LayerCache:
    heads, feature = _kv_axis(config, layout, 1), Axis(config.head_dim)
    blocks, ranks, slot = Axis(num_blocks), Axis(layout.dcp, "kv_context"), Axis(slots)
    return LayerCache(
        keys=ArraySpec(axes=(blocks, ranks, heads, feature, slot), dtype=dtype, init="zeros"),
        values=ArraySpec(axes=(blocks, ranks, heads, slot, feature), dtype=dtype, init="zeros"),
    )


def _kv_axis(config: ModelConfig, layout: Layout, size: int) -> Axis:
    """`size` entries per KV head; heads are copied if there are fewer of them than `tp` groups."""
    copies = layout.duplication(config.num_kv_heads)
    return Axis(config.num_kv_heads * size, "kv_heads", groups=config.num_kv_heads, repeat=copies)


def run(
    weights: GQAWeights,
    cache: LayerCache,
    x: NormedInput,
    work: Work,
    angles: Rotary,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, LayerCache]:
    """x [T, M] -> the residual stream [T, M] plus the result of attention, and the updated cache.

    Features of a dcp group: H * D / tp, padded so that dcp divides them. Per device:

    1. gather q over dcp                         [T, features / dcp] -> [T, features]; heads [T, H / tp, D], norm, rope
    2. write new keys and values                 to the slots this rank owns
    3. partial attention                         over this rank's slots -> out [T, H / tp, D], lse [T, H / tp]
    4. merge over dcp                            by lse, one of three exchanges
    5. keep the features of the own o_proj rows  [T, features / dcp]

    For prompts that attend to gathered keys, after 2:

    3. gather keys and values over dcp           of the KV heads that the own heads read, piece by piece
    4. attention                                 of the own heads over all positions [T, features / dcp]
    """
    place = runtime.place
    with jax.named_scope("qkv"):
        q, k, v = dots(x, weights.q, weights.k, weights.v, single_cpu=place.single_cpu)
        q = place.constrain(add_bias(q, weights.q_bias), None, "query")
        k = place.constrain(add_bias(k, weights.k_bias), None, "kv_heads")
        v = place.constrain(add_bias(v, weights.v_bias), None, "kv_heads")
    kv_spec, replicated = place.spec(None, "kv_heads"), place.spec()
    cache_spec = LayerCache(
        keys=place.spec(None, "kv_context", "kv_heads", None, None),
        values=place.spec(None, "kv_context", "kv_heads", None, None),
    )
    features, cache = jax.shard_map(
        bind(_run_on_device, config=config, runtime=runtime),
        mesh=place.mesh,
        in_specs=(place.spec(None, "query"), kv_spec, kv_spec, cache_spec, replicated, replicated, replicated),
        out_specs=(place.spec(None, "heads"), cache_spec),
        check_vma=False,
    )(q, k, v, cache, work, angles, (weights.q_norm, weights.k_norm))
    with jax.named_scope("out_projection"):
        hidden = dot(features, weights.o, weights.o_bias, residual=x.residual, single_cpu=place.single_cpu)
        return place.constrain(hidden, None, None), cache


def _run_on_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    work: Work,
    angles: Rotary,
    norms: tuple[jax.Array | None, jax.Array | None],
    *,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, LayerCache]:
    queries = _Queries.of(q, norms[0], angles, work, config, runtime)
    with jax.named_scope("rope"):
        k = rotate(_heads(k, norms[1], config), angles)
    new = k, _heads(v, None, config)

    def gather_queries(cache: LayerCache, work: Work, tokens: jax.Array | None) -> jax.Array:
        return attend_and_merge(queries.of_group(tokens), cache, work, queries.features, runtime)

    def gather_keys(cache: LayerCache) -> jax.Array:
        heads = queries.heads
        attend = attend_to_whole(queries.of_rank(), runtime)
        part = attend_to_gathered(new, cache, work, runtime.geometry, heads, attend)
        return heads.own_features(part.out)

    return attend_on_device(new, cache, work, runtime, gather_queries, gather_keys)


@dataclass(frozen=True)
class _Queries:
    """The queries of a step, with head norm and rope, scaled: of the whole dcp group, or of this rank's heads alone."""

    group: jax.Array | None  # [T, H / tp, D], if they have been gathered for all tokens
    own: jax.Array | None  # [T, heads of this rank, D], if that rank has them without
    heads: OwnHeads
    features: int  # of the dcp group, padded so that dcp divides them
    exchange_dtype: str

    @classmethod
    def of(
        cls,
        q: jax.Array,
        norm: jax.Array | None,
        angles: Rotary,
        work: Work,
        config: ModelConfig,
        runtime: Runtime,
    ) -> "_Queries":
        """q [T, features / dcp], or with `dcp_replicate_q` [T, features]."""
        place, replicated = runtime.place, runtime.dcp_replicate_q
        features = q.shape[1] * (1 if replicated else place.dcp)
        heads, kv_heads = config.num_heads // place.tp, max(1, config.num_kv_heads // place.tp)
        own = own_heads(heads, kv_heads, config.head_dim, features // place.dcp, place.dcp)

        def finished(q: jax.Array) -> jax.Array:
            with jax.named_scope("rope"):
                return rotate(_heads(q, norm, config), angles) * config.head_dim**-0.5

        if work.gathered_keys is not None and own.are_whole and not replicated:
            return cls(None, finished(q), own, features, runtime.dcp_exchange_dtype)
        with jax.named_scope("gather_query"):
            q = q if replicated else gather_over_dcp(q, runtime.dcp_exchange_dtype)
        return cls(finished(q[:, : heads * config.head_dim]), None, own, features, runtime.dcp_exchange_dtype)

    def of_group(self, tokens: jax.Array | None) -> jax.Array:
        """[n, H / tp, D] of some tokens."""
        if self.group is not None:
            return rows_of(self.group, tokens)
        assert self.own is not None
        with jax.named_scope("gather_query"):
            return gather_over_dcp(rows_of(self.own, tokens), self.exchange_dtype)

    def of_rank(self) -> jax.Array:
        """[T, heads of this rank, D]."""
        if self.own is not None:
            return self.own
        assert self.group is not None
        return self.heads.take(self.group)


def _heads(x: jax.Array, norm: jax.Array | None, config: ModelConfig) -> jax.Array:
    """[T, H * D] -> [T, H, D], with the head norm if the family has one."""
    x = x.reshape(x.shape[0], -1, config.head_dim)
    return x if norm is None else rms_norm(x, norm, config.rms_norm_eps)
