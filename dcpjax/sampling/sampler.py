"""Choosing the next token on the device, per request, whatever mixture of options a batch holds.

The draw is a Gumbel-max (Gumbel 1954; Maddison et al. 2014) whose noise depends on the request's seed and on how
many tokens it has generated, on nothing else: not on its row, its neighbours or the mesh. What nobody in the batch
asks for is not part of the program.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dcpjax.engine.request import Request
from dcpjax.sampling.processors import add, allow, cut, likeliest, penalize
from dcpjax.sampling.sampler_arrays import (
    Bias,
    Cut,
    Draw,
    Penalties,
    allowed_of,
    bias_of,
    cut_of,
    draw_of,
    penalties_of,
)
from dcpjax.sampling.scoring import Logprobs, score, shared_count


@struct.dataclass
class SamplingBatch:
    """Options of R choices. Parts that nobody asks for are None; rows past the last request ask for nothing."""

    # [R] int32, host: where `latest` keeps the row's newest token, -1 for padding
    seat: jax.Array
    draw: Draw | None
    cut: Cut | None
    bias: Bias | None
    # [R, W] uint32, host: a bit for each token that may be chosen
    allowed: jax.Array | None
    penalties: Penalties | None
    # how many of the most likely tokens are reported; -1 is all
    num_logprobs: int | None = struct.field(pytree_node=False)

    @classmethod
    def build(cls, requests: Sequence[Request], rows: int, vocab_size: int) -> "SamplingBatch":
        """One row per request that chooses, in order."""
        asking = list(enumerate(requests))
        seat = np.full(rows, -1, np.int32)
        seat[: len(requests)] = [request.seat for request in requests]
        return cls(
            seat=seat,  # type: ignore[arg-type]
            draw=draw_of(asking, rows),
            cut=cut_of(asking, rows, vocab_size),
            bias=bias_of(asking, rows),
            allowed=allowed_of(asking, rows, vocab_size),
            penalties=penalties_of(asking, rows, vocab_size),
            num_logprobs=shared_count((request.params.logprobs for _, request in asking), vocab_size),
        )


@struct.dataclass
class Sampled:
    """What a step chose."""

    # [R] int32
    tokens: jax.Array
    # [R] bool: False where the model's logits held NaN or infinity
    finite: jax.Array
    # of the chosen tokens, if a row asks
    logprobs: Logprobs | None


def sample(logits: jax.Array, latest: jax.Array, options: SamplingBatch) -> tuple[Sampled, jax.Array]:
    """logits [R, V] float32 -> next tokens; latest [S] int32, each seat's newest token, is brought up to date.

    In the order of vLLM: allowed tokens; bad words, min_tokens and logit_bias; repetition, frequency and presence
    penalties; then, unless greedy, temperature, min_p, top_k, top_p and the draw. Log-probabilities are of the
    logits as they came.
    """
    finite = jnp.isfinite(jnp.max(logits, axis=-1))  # a NaN anywhere in the row makes its maximum NaN
    processed = _process(logits, latest, options)
    tokens = likeliest(processed)
    if options.draw is not None:
        drawn = _draw(processed, options.draw, options.cut)
        tokens = jnp.where(options.draw.temperature > 0, drawn, tokens)
    logprobs = None if options.num_logprobs is None else score(logits, tokens, options.num_logprobs)
    seat = jnp.where(options.seat >= 0, options.seat, latest.shape[0])
    return Sampled(tokens, finite, logprobs), latest.at[seat].set(tokens, mode="drop")


def _process(logits: jax.Array, latest: jax.Array, options: SamplingBatch) -> jax.Array:
    """The logits that greedy rows choose from."""
    if options.allowed is not None:
        logits = allow(logits, options.allowed)
    if options.bias is not None:
        biased = add(logits, options.bias)
        # A guide may allow nothing but what a ban forbids (the end, before min_tokens): then the guide wins.
        left = jnp.any(biased > -jnp.inf, axis=-1, keepdims=True)
        logits = biased if options.allowed is None else jnp.where(left, biased, logits)
    if options.penalties is not None:
        logits = penalize(logits, options.penalties, latest[jnp.maximum(options.seat, 0)])
    return logits


def _draw(logits: jax.Array, draw: Draw, options: Cut | None) -> jax.Array:
    scaled = logits / jnp.where(draw.temperature > 0, draw.temperature, 1.0)[:, None]
    if options is not None:
        scaled = cut(scaled, options)
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(draw.seed, draw.generated, logits.shape[1])
    return likeliest(scaled + noise)


def _noise(seed: jax.Array, generated: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise [V] for one token of one request."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), generated)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
