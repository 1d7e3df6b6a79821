"""Multiply-adds per token, counted from the config."""

import math

import jax

from dcpjax.models import decoder
from dcpjax.models.config import ModelConfig
from dcpjax.models.moe import MoEWeights
from dcpjax.sharding.arrays import is_spec
from dcpjax.sharding.mesh import Layout


def per_token(config: ModelConfig) -> int:
    """Products of one token with the layers' weights: every matrix once; of the experts, those it is routed to."""
    layers = decoder.weight_specs(config, Layout(), "bfloat16").layers
    return sum(_weights(layer.attention) + _feed_forward(layer.mlp, config) for layer in layers)


def per_choice(config: ModelConfig) -> int:
    """The logits of one token, from which the next token is chosen."""
    return config.hidden_size * config.vocab_size


def per_position(config: ModelConfig) -> int:
    """Attention of one token to one position, in all layers: the score and the weighted value of each head."""
    dims = 2 * config.head_dim if config.mla is None else config.mla.cached_dim + config.mla.latent_rank
    return config.num_layers * config.num_heads * dims


def _feed_forward(specs: object, config: ModelConfig) -> int:
    if not isinstance(specs, MoEWeights) or config.moe is None:
        return _weights(specs)
    moe = config.moe
    width = moe.experts_per_token * moe.intermediate_size + moe.shared_size
    return config.hidden_size * (3 * width + moe.experts)


def _weights(specs: object) -> int:
    return sum(math.prod(spec.checkpoint_shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))
