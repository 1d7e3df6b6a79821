"""Which experts a token goes to, and with which weights, in float32.

Softmax routers take the most likely experts (DeepSeek-V2, arXiv:2405.04434, section 2.2; Qwen3). Sigmoid routers
select by score plus a correction bias and weigh by the score alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
With groups, the best groups of experts are chosen first and then experts within them.
"""

import jax
import jax.numpy as jnp

from dcpjax.models.config import MoEConfig


def route(logits: jax.Array, bias: jax.Array | None, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """logits [T, E], bias [E] or None -> ids [T, k] int32 of a token's k experts and their weights [T, k] float32."""
    scores = jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    if config.groups > 1:
        choice = _within_best_groups(choice, config)
    _, ids = jax.lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * config.scale


def _within_best_groups(choice: jax.Array, config: MoEConfig) -> jax.Array:
    """choice [T, E] with -inf for the experts outside the best groups.

    The score of a group is that of its best expert (softmax) or the sum of its best two (sigmoid).
    """
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, config.groups, experts // config.groups)
    counted = 2 if config.scoring == "sigmoid" else 1
    group_scores = jnp.sum(jax.lax.top_k(grouped, counted)[0], axis=-1)
    _, chosen = jax.lax.top_k(group_scores, config.groups_per_token)
    kept = jnp.any(chosen[:, :, None] == jnp.arange(config.groups)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
