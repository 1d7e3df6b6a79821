"""Dense decoders with grouped-query attention: Llama 2 and 3, SmolLM2, Qwen2, Qwen3.

Declares the weights once and runs them; a model is functions over a plain tree of arrays. Names logical axes,
never mesh axes; knows nothing about requests or sampling.
"""

from typing import Any

import jax
from flax import struct

from dcpjax.models.attention import HeadNorms, LayerCache, Runtime, Work, attend
from dcpjax.models.config import ModelConfig
from dcpjax.models.layers import Rotary, dot, lookup, rms_norm, rotary
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.mesh import Layout
from dcpjax.sharding.rules import Placement


@struct.dataclass
class LayerWeights:
    """One decoder layer. Projections are [out, in]; a family without a bias or head norm holds None there."""

    # [M]
    input_norm: Leaf
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
    # [M]
    post_norm: Leaf
    # [F, M], [F, M], [M, F]
    gate: Leaf
    up: Leaf
    down: Leaf


@struct.dataclass
class Weights:
    # [V, M]
    embed: Leaf
    layers: tuple[LayerWeights, ...]
    # [M]
    norm: Leaf
    # [V, M], None where the embedding is used again
    head: Leaf


def weight_specs(config: ModelConfig, layout: Layout, dtype: str) -> Weights:
    """Every weight as an `ArraySpec`, padded and repeated so that it fits the layout."""
    model = Axis(config.hidden_size)
    vocab = Axis(config.vocab_size, "vocab", multiple=layout.devices)
    table = ArraySpec(axes=(vocab, model), dtype=dtype)
    return Weights(
        embed=table,
        layers=(_layer_specs(config, layout, dtype),) * config.num_layers,
        norm=ArraySpec(axes=(model,), dtype=dtype, init="ones"),
        head=None if config.tie_word_embeddings else table,
    )


def _layer_specs(config: ModelConfig, layout: Layout, dtype: str) -> LayerWeights:
    model, head = Axis(config.hidden_size), Axis(config.head_dim)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query = Axis(q_size, "query", groups=layout.tp, multiple=layout.dcp)
    heads = Axis(q_size, "heads", groups=layout.tp, multiple=layout.dcp)
    copies = layout.duplication(config.num_kv_heads)
    kv = Axis(kv_size, "kv_heads", groups=config.num_kv_heads, repeat=copies)
    ffn = Axis(config.intermediate_size, "ffn", multiple=layout.devices)

    def matrix(rows: Axis, columns: Axis) -> ArraySpec:
        return ArraySpec(axes=(rows, columns), dtype=dtype)

    def vector(axis: Axis, used: bool = True, ones: bool = False) -> ArraySpec | None:
        return ArraySpec(axes=(axis,), dtype=dtype, init="ones" if ones else "normal") if used else None

    return LayerWeights(
        input_norm=vector(model, ones=True),
        q=matrix(query, model),
        k=matrix(kv, model),
        v=matrix(kv, model),
        q_bias=vector(query, config.qkv_bias),
        k_bias=vector(kv, config.qkv_bias),
        v_bias=vector(kv, config.qkv_bias),
        q_norm=vector(head, config.qk_norm, ones=True),
        k_norm=vector(head, config.qk_norm, ones=True),
        o=matrix(model, heads),
        o_bias=vector(model, config.o_bias),
        post_norm=vector(model, ones=True),
        gate=matrix(ffn, model),
        up=matrix(ffn, model),
        down=matrix(model, ffn),
    )


def weight_names(config: ModelConfig) -> Weights:
    """The same tree holding Hugging Face tensor names."""

    def layer(number: int) -> LayerWeights:
        root = f"model.layers.{number}"
        attention, mlp = f"{root}.self_attn", f"{root}.mlp"
        return LayerWeights(
            input_norm=f"{root}.input_layernorm.weight",
            q=f"{attention}.q_proj.weight",
            k=f"{attention}.k_proj.weight",
            v=f"{attention}.v_proj.weight",
            q_bias=f"{attention}.q_proj.bias" if config.qkv_bias else None,
            k_bias=f"{attention}.k_proj.bias" if config.qkv_bias else None,
            v_bias=f"{attention}.v_proj.bias" if config.qkv_bias else None,
            q_norm=f"{attention}.q_norm.weight" if config.qk_norm else None,
            k_norm=f"{attention}.k_norm.weight" if config.qk_norm else None,
            o=f"{attention}.o_proj.weight",
            o_bias=f"{attention}.o_proj.bias" if config.o_bias else None,
            post_norm=f"{root}.post_attention_layernorm.weight",
            gate=f"{mlp}.gate_proj.weight",
            up=f"{mlp}.up_proj.weight",
            down=f"{mlp}.down_proj.weight",
        )

    return Weights(
        embed="model.embed_tokens.weight",
        layers=tuple(layer(number) for number in range(config.num_layers)),
        norm="model.norm.weight",
        head=None if config.tie_word_embeddings else "lm_head.weight",
    )


def cache_specs(config: ModelConfig, layout: Layout, num_blocks: int, slots: int, dtype: Any) -> tuple[LayerCache, ...]:
    """One `LayerCache` of specs per layer for `num_blocks` blocks of `slots` slots per rank."""
    blocks, ranks = Axis(num_blocks), Axis(layout.dcp, "kv_context")
    copies = layout.duplication(config.num_kv_heads)
    heads = Axis(config.num_kv_heads, "kv_heads", groups=config.num_kv_heads, repeat=copies)
    slot, feature = Axis(slots), Axis(config.head_dim)
    layer = LayerCache(
        keys=ArraySpec(axes=(blocks, ranks, heads, feature, slot), dtype=dtype, init="zeros"),
        values=ArraySpec(axes=(blocks, ranks, heads, slot, feature), dtype=dtype, init="zeros"),
    )
    return (layer,) * config.num_layers


def forward(
    weights: Weights,
    cache: tuple[LayerCache, ...],
    tokens: jax.Array,
    work: Work,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Advance every request by its query tokens: tokens [N] -> hidden [N, M] float32, and the updated cache."""
    place = runtime.place
    hidden = place.constrain(lookup(weights.embed, tokens), None, None)
    angles = rotary(work.positions, config.head_dim, config.rope)
    updated = []
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        hidden, layer_cache = _layer(layer, layer_cache, hidden, work, angles, config, runtime)
        updated.append(layer_cache)
    return rms_norm(hidden, weights.norm, config.rms_norm_eps), tuple(updated)


def logits(weights: Weights, hidden: jax.Array, config: ModelConfig, place: Placement) -> jax.Array:
    """hidden [R, M] -> float32 [R, V] on every device; ids that only pad the vocabulary are cut off."""
    head = weights.embed if weights.head is None else weights.head
    scores = place.constrain(dot(hidden, head), None, "vocab")
    return place.constrain(scores, None, None)[:, : config.vocab_size]


def _layer(
    weights: LayerWeights,
    cache: LayerCache,
    hidden: jax.Array,
    work: Work,
    angles: Rotary,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, LayerCache]:
    place = runtime.place
    x = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
    with jax.named_scope("qkv"):
        q = place.constrain(dot(x, weights.q, weights.q_bias), None, "query")
        k = place.constrain(dot(x, weights.k, weights.k_bias), None, "kv_heads")
        v = place.constrain(dot(x, weights.v, weights.v_bias), None, "kv_heads")
    norms = HeadNorms(weights.q_norm, weights.k_norm, config.rms_norm_eps)
    features, cache = attend(q, k, v, cache, work, angles, norms, config.head_dim, config.num_heads, runtime)
    with jax.named_scope("out_projection"):
        hidden = hidden + place.constrain(dot(features, weights.o), None, None)
        if weights.o_bias is not None:
            hidden = hidden + weights.o_bias.astype(hidden.dtype)[None, :]
    with jax.named_scope("mlp"):
        x = rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
        gated = jax.nn.silu(dot(x, weights.gate)) * dot(x, weights.up)
        gated = place.constrain(gated, None, "ffn")
        return hidden + place.constrain(dot(gated, weights.down), None, None), cache
