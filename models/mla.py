"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), absorbed.

The cache holds one latent of C values and one rope key of R values per token, nothing else. The key projection
is applied to the query instead (`q_nope @ W_uk`), so that every head attends to the latent itself, and the value
projection follows the merge. For attention this is one KV head of C + R values whose first C are also the value. Long
prompts take fewer operations with keys and values up-projected: `attention.up_projected`.
"""

from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.models import layers
from dcpjax.models.attention.dispatch import attend_and_merge, attend_on_device, attend_to_whole, rows_of
from dcpjax.models.attention.gathered_keys import attend_to_gathered
from dcpjax.models.attention.up_projected import UpProjection, prompt_partial, uses_up_projection
from dcpjax.models.attention.work import Runtime, Work
from dcpjax.models.checkpoint_names import HeadRows
from dcpjax.models.config import LATENT_NORM_EPS, MLAConfig, ModelConfig
from dcpjax.models.kv_cache import CacheGeometry, LatentCache
from dcpjax.models.layers import NormedInput, rms_norm
from dcpjax.models.rotary import Rotary, rotate, split_pairs
from dcpjax.sharding import struct
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.merge import Partial, gather_over_dcp, rank
from dcpjax.sharding.mesh import Layout


@struct.dataclass
class MLAWeights:
    """X, R and Y are the head dims without rope, with rope and of values; q_rank the rank of the query's own latent."""

    # [q_rank, M], [q_rank]; None if `q` reads the hidden state itself, as in V2-Lite
    q_down: Leaf
    q_norm: Leaf
    # [H * (X + R), q_rank] or [H * (X + R), M]
    q: Leaf
    # [C + R, M], [C]
    kv_down: Leaf
    kv_norm: Leaf
    # [H, X, C]: latent -> keys without rope, applied to the query
    w_uk: Leaf
    # [H, Y, C]: latent -> values, applied after the merge
    w_uv: Leaf
    # [M, H * Y]
    o: Leaf


def specs(config: ModelConfig, layout: Layout, dtype: str) -> MLAWeights:
    mla, heads = _config(config), config.num_heads
    model, latent = Axis(config.hidden_size), Axis(mla.latent_rank)
    q_input = Axis(mla.q_rank) if mla.q_rank else model
    vector = bind(ArraySpec, dtype=dtype, init="ones")
    return MLAWeights(
        q_down=ArraySpec(axes=(q_input, model), dtype=dtype) if mla.q_rank else None,
        q_norm=vector(axes=(q_input,)) if mla.q_rank else None,
        q=ArraySpec(axes=(Axis(heads * mla.qk_dim, "query"), q_input), dtype=dtype),
        kv_down=ArraySpec(axes=(Axis(mla.cached_dim), model), dtype=dtype),
        kv_norm=vector(axes=(latent,)),
        w_uk=ArraySpec(axes=(Axis(heads, "query"), Axis(mla.nope_dim), latent), dtype=dtype),
        w_uv=ArraySpec(axes=(Axis(heads, "heads"), Axis(mla.value_dim), latent), dtype=dtype),
        o=ArraySpec(axes=(model, Axis(heads * mla.value_dim, "heads")), dtype=dtype),
    )


def names(config: ModelConfig, root: str) -> MLAWeights:
    mla = _config(config)
    rows = mla.nope_dim + mla.value_dim
    return MLAWeights(
        q_down=f"{root}.q_a_proj.weight" if mla.q_rank else None,
        q_norm=f"{root}.q_a_layernorm.weight" if mla.q_rank else None,
        q=f"{root}.q_b_proj.weight" if mla.q_rank else f"{root}.q_proj.weight",
        kv_down=f"{root}.kv_a_proj_with_mqa.weight",
        kv_norm=f"{root}.kv_a_layernorm.weight",
        w_uk=HeadRows(f"{root}.kv_b_proj.weight", rows, 0, mla.nope_dim),
        w_uv=HeadRows(f"{root}.kv_b_proj.weight", rows, mla.nope_dim, rows),
        o=f"{root}.o_proj.weight",
    )


def cache_specs(config: ModelConfig, layout: Layout, num_blocks: int, slots: int, dtype: Any) -> LatentCache:
    axes = (Axis(num_blocks), Axis(layout.dcp, "kv_context"), Axis(slots), Axis(_config(config).cached_dim))
    return LatentCache(latents=ArraySpec(axes=axes, dtype=dtype, init="zeros"))


def run(
    weights: MLAWeights,
    cache: LatentCache,
    x: NormedInput,
    work: Work,
    angles: Rotary,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, LatentCache]:
    """x [T, M] -> the residual stream [T, M] plus the result of attention, and the updated cache.

    Heads are split over all devices: H / devices on each. Per device:

    1. own heads' queries, rope, absorb W_uk     [T, H / devices, C + R]; gather over dcp -> [T, H / tp, C + R]
    2. write new latents                         to the slots this rank owns
    3. partial attention                         over this rank's slots -> out [T, H / tp, C], lse [T, H / tp]
    4. merge over dcp                            by lse, one of three exchanges
    5. keep the own heads, W_uv                  [T, H / devices, C] -> [T, H / devices * Y], the own rows of o_proj

    With long prompts up-projected, W_uk and W_uv of H / tp heads are gathered over dcp, and instead:

    1. own heads' queries, rope                  [T, H / devices, X + R]; gather over dcp -> [T, H / tp, X + R]
    3. partial attention                         over this rank's slots -> out [T, H / tp, Y], lse [T, H / tp]
    4. merge over dcp                            by lse -> [T, H / devices * Y], the own rows of o_proj

    For prompts that attend to gathered keys, after 2:

    3. gather latents over dcp                   piece by piece
    4. attention                                 of the own heads over all positions [T, H / devices * Y]
    """
    place, mla = runtime.place, _config(config)
    dot = bind(layers.dot, single_cpu=place.single_cpu)
    with jax.named_scope("qkv"):
        q_input = x
        if weights.q_down is not None:
            q_input = NormedInput(dot(x, weights.q_down), weights.q_norm, LATENT_NORM_EPS)
        q = place.constrain(dot(q_input, weights.q), None, "query")
        latent, rope_key = jnp.split(dot(x, weights.kv_down), [mla.latent_rank], axis=-1)
        rope_key = rotate(split_pairs(rope_key)[:, None, :], angles)[:, 0]
        latent = jnp.concatenate([rms_norm(latent, weights.kv_norm, LATENT_NORM_EPS), rope_key], axis=-1)
    replicated = place.spec()
    cache_spec = LatentCache(latents=place.spec(None, "kv_context", None, None))
    features, cache = jax.shard_map(
        bind(_run_on_device, config=config, runtime=runtime),
        mesh=place.mesh,
        in_specs=(
            place.spec(None, "query"),
            replicated,
            cache_spec,
            replicated,
            replicated,
            place.spec("query", None, None),
            place.spec("heads", None, None),
        ),
        out_specs=(place.spec(None, "heads"), cache_spec),
        check_vma=False,
    )(q, latent, cache, work, angles, weights.w_uk, weights.w_uv)
    with jax.named_scope("out_projection"):
        return place.constrain(dot(features, weights.o, residual=x.residual), None, None), cache


def _run_on_device(
    q: jax.Array,
    latent: jax.Array,
    cache: LatentCache,
    work: Work,
    angles: Rotary,
    w_uk: jax.Array,
    w_uv: jax.Array,
    *,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, LatentCache]:
    mla, tokens = _config(config), q.shape[0]
    up = UpProjection(w_uk, w_uv, softmax_scale(config))
    with jax.named_scope("rope"):
        q_nope, q_rope = jnp.split(q.reshape(tokens, -1, mla.qk_dim), [mla.nope_dim], axis=-1)
        q = jnp.concatenate([q_nope, rotate(split_pairs(q_rope), angles)], axis=-1)

    def gather_queries(cache: LatentCache, work: Work, tokens: jax.Array | None) -> jax.Array:
        rows = rows_of(q, tokens)
        if uses_up_projection(work, mla, runtime):
            return _up_projected(rows, cache, work, up, mla, runtime)
        return _absorbed(rows, cache, work, up, mla, runtime)

    def gather_keys(cache: LatentCache) -> jax.Array:
        attend = bind(_attend_to_whole, q, up, mla, runtime)
        part = attend_to_gathered((latent,), cache, work, runtime.geometry, None, attend)
        return part.out.reshape(tokens, -1)

    return attend_on_device((latent,), cache, work, runtime, gather_queries, gather_keys)


def _absorbed(
    q: jax.Array, cache: LatentCache, work: Work, up: UpProjection, mla: MLAConfig, runtime: Runtime
) -> jax.Array:
    """Per device: q [T, H / devices, X + R], rotated -> [T, H / devices * Y]."""
    with jax.named_scope("absorb"):
        q = up.absorb(q)
    with jax.named_scope("gather_query"):
        q = q if runtime.dcp_replicate_q else gather_over_dcp(q, runtime.dcp_exchange_dtype)
    features = q.shape[1] * mla.latent_rank
    merged = attend_and_merge(q, cache, work, features, runtime, value_dim=mla.latent_rank)
    with jax.named_scope("up_projection"):
        values = up.values_of(merged.reshape(len(q), -1, mla.latent_rank))
    return values.reshape(len(q), -1)


def _up_projected(
    q: jax.Array, cache: LatentCache, work: Work, up: UpProjection, mla: MLAConfig, runtime: Runtime
) -> jax.Array:
    """The same with the keys and values of each head."""
    with jax.named_scope("gather_query"):
        q = q if runtime.dcp_replicate_q else gather_over_dcp(q, runtime.dcp_exchange_dtype)
    with jax.named_scope("gather_up_projection"):
        up = _gather_up_projection(up, mla, runtime)
    attention = bind(prompt_partial, up=up, mla=mla, runtime=runtime)
    return attend_and_merge(q, cache, work, q.shape[1] * mla.value_dim, runtime, attention=attention)


def _attend_to_whole(
    q: jax.Array,
    up: UpProjection,
    mla: MLAConfig,
    runtime: Runtime,
    cache: LatentCache,
    work: Work,
    geometry: CacheGeometry,
) -> Partial:
    """Attention of the own heads over a cache that is not split: q [T, H / devices, X + R] -> out [T, H / devices, Y].

    With `dcp_replicate_q`, q and W_uk are those of all heads of the dcp group.
    """
    own = up.w_uv.shape[0]
    if runtime.dcp_replicate_q:
        q, w_uk = (jax.lax.dynamic_slice_in_dim(x, rank() * own, own, axis) for x, axis in ((q, 1), (up.w_uk, 0)))
        up = up._replace(w_uk=w_uk)
    if uses_up_projection(work, mla, runtime):
        return prompt_partial(q, cache, work, geometry, jnp.int32(0), up=up, mla=mla, runtime=runtime)
    out, lse = attend_to_whole(up.absorb(q), runtime)(cache, work, geometry)
    return Partial(up.values_of(out), lse)


def _gather_up_projection(up: UpProjection, mla: MLAConfig, runtime: Runtime) -> UpProjection:
    """W_uk and W_uv of all heads of the dcp group, in one exchange; W_uk is there already if queries are replicated."""
    if runtime.dcp_replicate_q:
        return up._replace(w_uv=gather_over_dcp(up.w_uv[None])[0])
    both = gather_over_dcp(jnp.concatenate([up.w_uk, up.w_uv], axis=1)[None])[0]
    w_uk, w_uv = jnp.split(both, [mla.nope_dim], axis=1)
    return up._replace(w_uk=w_uk, w_uv=w_uv)


def softmax_scale(config: ModelConfig) -> float:
    """1 / sqrt(X + R), times the square of YaRN's mscale if the checkpoint has `mscale_all_dim`."""
    return _config(config).qk_dim ** -0.5 * config.rope.softmax_mscale**2


def _config(config: ModelConfig) -> MLAConfig:
    assert config.mla is not None
    return config.mla
