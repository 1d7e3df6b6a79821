"""The sampler: chooses the next token of each request on the device. Every row can have its own options.

Random draws use the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014). The noise depends only on the request's seed
and on how many tokens it has generated, not on its row, its neighbours or the mesh. Options that no request of the
step uses are not part of the compiled program.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.engine.request import Request
from dcpjax.sampling.argmax import argmax
from dcpjax.sampling.known_tokens import KnownIds, KnownTokens
from dcpjax.sampling.processors import (
    apply_allowed_tokens,
    apply_bans,
    apply_bias,
    apply_known_tokens,
    apply_penalties,
    apply_temperature,
    apply_truncation,
)
from dcpjax.sampling.sampler_arrays import (
    Bias,
    Draw,
    Penalties,
    Truncation,
    build_allowed,
    build_banned,
    build_bias,
    build_draw,
    build_named,
    build_penalties,
    build_truncation,
)
from dcpjax.sampling.scoring import Logprobs, NamedScores, score, score_named, shared_num_logprobs
from dcpjax.sharding import struct


@struct.dataclass
class SamplingBatch:
    """Sampling options of the B rows of a step. A part that no row uses is None; padding rows use no option."""

    # [B] int32, host: the row's index into `latest`, -1 for padding
    seat: jax.Array
    draw: Draw | None
    truncation: Truncation | None
    bias: Bias | None
    # [B, banned] int32, host: tokens that may not be chosen, -1 for padding
    banned: jax.Array | None
    # [B, ceil(V / 32)] uint32, host: a bit for each token that may be chosen, of the known ones
    allowed: jax.Array | None
    # device: the ids that belong to tokens; None: all
    known: KnownIds | None
    penalties: Penalties | None
    # [B, n] int32, host: tokens whose log-probabilities the requests name, -1 for padding
    named: jax.Array | None
    # how many of the most likely tokens are reported; -1 is all
    num_logprobs: int | None = struct.static()

    @classmethod
    def build(
        cls, requests: Sequence[Request], num_rows: int, vocab_size: int, known: KnownTokens | None = None
    ) -> "SamplingBatch":
        """Row i holds the options of requests[i]; the rest of the `num_rows` rows is padding.

        Args:
            known: the ids that may be chosen and listed; None: all `vocab_size`.
        """
        seat = np.full(num_rows, -1, np.int32)
        seat[: len(requests)] = [request.seat for request in requests]
        return cls(
            seat=seat,  # type: ignore[arg-type]
            draw=build_draw(requests, num_rows),
            truncation=build_truncation(requests, num_rows, vocab_size),
            bias=build_bias(requests, num_rows),
            banned=build_banned(requests, num_rows),
            allowed=build_allowed(requests, num_rows, vocab_size, known),
            known=None if known is None else known.ids,
            penalties=build_penalties(requests, num_rows, vocab_size),
            named=build_named(requests, num_rows),
            num_logprobs=shared_num_logprobs(map(_num_logprobs, requests), vocab_size),
        )


@struct.dataclass
class Sampled:
    """The tokens chosen in a step."""

    # [B] int32
    tokens: jax.Array
    # [B] bool: False where the model's logits held NaN or infinity
    finite: jax.Array
    # [B] bool: False where every token is banned; None if no request bans any
    possible: jax.Array | None
    # of the chosen tokens; None if no request wants them
    logprobs: Logprobs | None
    # of the tokens that requests name; None if none does
    named: NamedScores | None = None


def sample(logits: jax.Array, latest: jax.Array, options: SamplingBatch) -> tuple[Sampled, jax.Array]:
    """logits [B, V] float32 -> (next tokens, `latest` updated with them).

    latest [seats] int32 is the newest token of each seat. Options apply in this order: logit_bias; repetition,
    frequency and presence penalties; bans, that is allowed tokens, bad words and min_tokens; then, unless greedy,
    temperature, min_p, top_k, top_p and the random draw. The result is that of vLLM's order, in which bans come first,
    but no arithmetic can undo a ban. Log-probabilities are those of the unprocessed logits.

    Ids that belong to no token are banned too, without a pass over the logits of its own: where a row has allowed
    tokens the host has left such ids out of those, elsewhere `argmax` looks again at the few blocks that hold some,
    and a random draw drops them together with its temperature.
    """
    finite = jnp.isfinite(jnp.max(logits, axis=-1))  # a NaN anywhere in the row makes its maximum NaN
    processed = _process(logits, latest, options)
    known = options.known if options.allowed is None else None
    tokens = argmax(processed, known)
    if options.draw is not None:
        candidates = processed if known is None else apply_known_tokens(processed, known.mask)
        drawn = _draw(candidates, options.draw, options.truncation)
        tokens = jnp.where(options.draw.temperature > 0, drawn, tokens)
    logprobs = None if options.num_logprobs is None else score(logits, tokens, options.num_logprobs, options.known)
    named = None if options.named is None else score_named(logits, options.named, options.known)
    seat = jnp.where(options.seat >= 0, options.seat, latest.shape[0])
    sampled = Sampled(tokens, finite, _possible(processed, tokens, options, known), logprobs, named)
    return sampled, latest.at[seat].set(tokens, mode="drop")


def _num_logprobs(request: Request) -> int | None:
    """How many of the most likely tokens are wanted with each token; none where others are named."""
    return 0 if request.params.logprob_token_ids is not None else request.params.logprobs


def _process(logits: jax.Array, latest: jax.Array, options: SamplingBatch) -> jax.Array:
    """logits [B, V] after the options that greedy rows use too: all but temperature and truncation."""
    if options.bias is not None:
        logits = apply_bias(logits, options.bias)
    if options.penalties is not None:
        logits = apply_penalties(logits, options.penalties, latest[jnp.maximum(options.seat, 0)])
    if options.allowed is not None:
        logits = apply_allowed_tokens(logits, options.allowed)
    if options.banned is not None:
        logits = apply_bans(logits, options.banned)
    return logits


def _possible(
    processed: jax.Array, tokens: jax.Array, options: SamplingBatch, known: KnownIds | None
) -> jax.Array | None:
    """Whether the chosen tokens [B] may be chosen: only a row without any such token has one that may not."""
    if options.allowed is None and options.banned is None:
        return None
    possible = jnp.take_along_axis(processed, tokens[:, None], axis=-1)[:, 0] > -jnp.inf
    return possible if known is None else possible & known.mask[tokens]


def _draw(logits: jax.Array, draw: Draw, truncation: Truncation | None) -> jax.Array:
    """Random tokens [B], by Gumbel-max: the argmax of scaled logits plus Gumbel noise is a sample of their softmax."""
    scaled = apply_temperature(logits, draw.temperature)
    if truncation is not None:
        scaled = apply_truncation(scaled, truncation)
    noise = jax.vmap(_gumbel_noise, in_axes=(0, 0, None))(draw.seed, draw.generated, logits.shape[1])
    return argmax(scaled + noise)


def _gumbel_noise(seed: jax.Array, generated: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise [V] for one token of one request."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), generated)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)
