"""A pre-norm decoder: embedding, layers of attention and feed-forward, final norm, head.

The config says which attention (grouped-query or latent) and which feed-forward block (dense or mixture of experts) a
layer has; all families share this file. A model is functions over a plain tree of arrays: `weight_specs` declares
them, `weight_names` names them in a checkpoint, `forward` computes with them.
"""

from functools import partial as bind
from types import ModuleType
from typing import Any

import jax

from dcpjax.models import gqa, mla, mlp, moe
from dcpjax.models.attention.work import Runtime, Work
from dcpjax.models.checkpoint_names import embedding_name, head_name
from dcpjax.models.config import ModelConfig
from dcpjax.models.kv_cache import Cache
from dcpjax.models.layers import NormedInput, dot, lookup, rms_norm
from dcpjax.models.rotary import Rotary, shared_rotary
from dcpjax.sharding import struct
from dcpjax.sharding.arrays import ArraySpec, Axis, Leaf
from dcpjax.sharding.mesh import Layout
from dcpjax.sharding.rules import Placement


@struct.dataclass
class LayerWeights:
    # [M]
    attention_norm: Leaf
    attention: gqa.GQAWeights | mla.MLAWeights
    # [M]
    mlp_norm: Leaf
    mlp: mlp.MLPWeights | moe.MoEWeights


@struct.dataclass
class Weights:
    # [V, M]
    embed: Leaf
    layers: tuple[LayerWeights, ...]
    # [M]
    norm: Leaf
    # [V, M], None if the embedding is used instead
    head: Leaf


def weight_specs(config: ModelConfig, layout: Layout, dtype: str) -> Weights:
    """Every weight as an `ArraySpec`, padded and repeated to fit the layout."""
    model = Axis(config.hidden_size)
    norm = ArraySpec(axes=(model,), dtype=dtype, init="ones")
    table = ArraySpec(axes=(Axis(config.vocab_size, "vocab", multiple=layout.devices), model), dtype=dtype)
    attention = _attention(config).specs(config, layout, dtype)
    layers = tuple(
        LayerWeights(
            attention_norm=norm,
            attention=attention,
            mlp_norm=norm,
            mlp=(moe if config.is_moe(layer) else mlp).specs(config, layout, dtype),
        )
        for layer in range(config.num_layers)
    )
    return Weights(embed=table, layers=layers, norm=norm, head=None if config.tie_word_embeddings else table)


def weight_names(config: ModelConfig) -> Weights:
    """The same tree with the names of a Hugging Face checkpoint."""

    def layer(number: int) -> LayerWeights:
        root = f"{config.prefix}model.layers.{number}"
        feed_forward = f"{root}.mlp"
        return LayerWeights(
            attention_norm=f"{root}.input_layernorm.weight",
            attention=_attention(config).names(config, f"{root}.self_attn"),
            mlp_norm=f"{root}.post_attention_layernorm.weight",
            mlp=moe.names(config, feed_forward) if config.is_moe(number) else mlp.names(feed_forward),
        )

    return Weights(
        embed=embedding_name(config),
        layers=tuple(layer(number) for number in range(config.num_layers)),
        norm=f"{config.prefix}model.norm.weight",
        head=None if config.tie_word_embeddings else head_name(config),
    )


def cache_specs(config: ModelConfig, layout: Layout, num_blocks: int, slots: int, dtype: Any) -> tuple[Cache, ...]:
    """The cache of each layer as specs, for `num_blocks` blocks of `slots` slots per rank."""
    return (_attention(config).cache_specs(config, layout, num_blocks, slots, dtype),) * config.num_layers


def forward(
    weights: Weights,
    cache: tuple[Cache, ...],
    tokens: jax.Array,
    work: Work,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """Advance every request by its query tokens: tokens [T] -> hidden [T, M] float32, and the updated cache."""
    hidden = runtime.place.constrain(lookup(weights.embed, tokens), None, None)
    angles = shared_rotary(work.positions, config.rope_dim, config.rope)
    # a call, so that layers of equal shapes are traced once; XLA inlines it
    run = jax.jit(bind(_layer, config=config, runtime=runtime))
    updated = []
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        hidden, layer_cache = run(layer, layer_cache, hidden, work, angles)
        updated.append(layer_cache)
    return rms_norm(hidden, weights.norm, config.rms_norm_eps), tuple(updated)


def logits(weights: Weights, hidden: jax.Array, config: ModelConfig, place: Placement) -> jax.Array:
    """hidden [rows, M] -> float32 [rows, V] on every device, without the padding of the vocabulary."""
    head = weights.embed if weights.head is None else weights.head
    scores = place.constrain(dot(hidden, head, single_cpu=place.single_cpu), None, "vocab")
    return place.constrain(scores, None, None)[:, : config.vocab_size]


def _layer(
    weights: LayerWeights,
    cache: Cache,
    hidden: jax.Array,
    work: Work,
    angles: Rotary,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[jax.Array, Cache]:
    # both parts add their result to the residual stream themselves: on CPUs that is part of a product's kernel
    x = NormedInput(hidden, weights.attention_norm, config.rms_norm_eps)
    hidden, cache = _attention(config).run(weights.attention, cache, x, work, angles, config, runtime)
    x = NormedInput(hidden, weights.mlp_norm, config.rms_norm_eps)
    with jax.named_scope("mlp"):
        if isinstance(weights.mlp, moe.MoEWeights):
            return moe.run(weights.mlp, x, config, runtime.place), cache
        return mlp.run(weights.mlp, x, runtime.place), cache


def _attention(config: ModelConfig) -> ModuleType:
    return gqa if config.mla is None else mla
