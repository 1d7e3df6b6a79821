"""What runs on the device in a step. Programs follow each other without the host between them:

    copy      blocks of which a request reuses a part, before all else; most steps have none
    forward   all layers: tokens [T] -> hidden [T, M]; donates the cache and updates it in place
    gather    hidden [T, M] -> [B, M], of the tokens from which a next one is sampled; nearly nothing to compile
    sample    head and sampling: [B, M] -> tokens [B]; another program for each combination of options in use
    score     head and log-probabilities of prompt tokens, where these are wanted

    decode    in place of forward, gather and sample: several decode steps, see `decode_loop`

Each is compiled once for each shape. Only the rows that are sampled from or scored meet the head: a step in which no
request is at its newest token ends after `forward`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.engine.request import UNKNOWN
from dcpjax.models import decoder
from dcpjax.models.attention.work import Runtime
from dcpjax.models.config import ModelConfig
from dcpjax.runtime.batch import Batch
from dcpjax.runtime.decode_loop import decode_steps
from dcpjax.sampling.known_tokens import KnownIds
from dcpjax.sampling.sampler import Sampled, SamplingBatch, sample
from dcpjax.sampling.scoring import Logprobs, score
from dcpjax.sharding.rules import Placement

# A collective waits for its slowest device; many virtual devices on few cores can keep it waiting for long.
CPU_OPTIONS = {"xla_cpu_collective_call_terminate_timeout_seconds": 3600}

Program = Callable[..., Any]


class Programs:
    """The jitted programs of one model. Each compiles at its first call with arrays of new shapes."""

    def __init__(self, config: ModelConfig, runtime: Runtime, cache: Any) -> None:
        """`cache`: its arrays, or anything with their shardings."""
        place, shardings = runtime.place, jax.tree.map(lambda array: array.sharding, cache)
        everywhere, options = place.sharding(), compiler_options(place)
        self.forward = compile_on_demand(forward, config, runtime, cache)
        self.gather = jax.jit(gather_rows, out_shardings=everywhere, compiler_options=options)
        self.sample = jax.jit(
            bind(sample_next, config=config, place=place), out_shardings=everywhere, compiler_options=options
        )
        self.score = jax.jit(
            bind(score_prompt, config=config, place=place),
            static_argnums=3,
            out_shardings=everywhere,
            compiler_options=options,
        )
        self.decode = jax.jit(
            bind(decode_steps, config=config, runtime=runtime),
            donate_argnums=(1,),
            out_shardings=(everywhere, everywhere, shardings),
            compiler_options=options,
        )
        self.copy = jax.jit(copy_blocks, donate_argnums=(0,), out_shardings=shardings, compiler_options=options)


def compile_on_demand(function: Program, config: ModelConfig, runtime: Runtime, cache: Any) -> Program:
    """Jit `forward`, or a function like it; each batch shape compiles at its first use, then never again."""
    return jax.jit(
        bind(function, config=config, runtime=runtime),
        donate_argnums=(1,),
        out_shardings=(runtime.place.sharding(), jax.tree.map(lambda array: array.sharding, cache)),
        compiler_options=compiler_options(runtime.place),
    )


def compiler_options(place: Placement) -> dict[str, Any] | None:
    return CPU_OPTIONS if place.platform == "cpu" else None


def forward(
    weights: Any, cache: Any, latest: jax.Array, batch: Batch, *, config: ModelConfig, runtime: Runtime
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """((hidden [T, M] float32, whether that of each request's last token is finite [B]), the updated cache).

    `latest` [seats] holds each seat's newest token: the next input of a request whose token has not reached the host.
    """
    tokens = known_tokens(batch, latest)
    hidden, cache = decoder.forward(weights, cache, tokens, batch.work, config, runtime)
    return (hidden, jnp.all(jnp.isfinite(hidden[batch.last]), axis=-1)), cache


def known_tokens(batch: Batch, latest: jax.Array) -> jax.Array:
    """The step's tokens [T], those that only the device knows filled in."""
    return jnp.where(batch.tokens == UNKNOWN, latest[batch.seats[batch.work.rows]], batch.tokens)


def head_weights(weights: Any) -> Any:
    """The weights without the layers: the head's programs do not need them, and each array passed costs host time."""
    return replace(weights, layers=())


def gather_rows(hidden: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows `indices` [B] of hidden [T, M]."""
    return hidden[indices]


def sample_next(
    head: Any, hidden: jax.Array, latest: jax.Array, options: SamplingBatch, *, config: ModelConfig, place: Placement
) -> tuple[Sampled, jax.Array]:
    """hidden [B, M] -> the tokens that follow, and `latest` brought up to date."""
    with jax.named_scope("logits"):
        logits = decoder.logits(head, hidden, config, place)
    return sample(logits, latest, options)


def score_prompt(
    head: Any,
    hidden: jax.Array,
    targets: jax.Array,
    num_logprobs: int,
    known: KnownIds | None,
    *,
    config: ModelConfig,
    place: Placement,
) -> Logprobs:
    """hidden [n, M] -> the log-probabilities of `targets` [n], the prompt tokens that follow.

    `known`: the ids that may be listed; None: all.
    """
    with jax.named_scope("logits"):
        logits = decoder.logits(head, hidden, config, place)
    return score(logits, targets, num_logprobs, known)


def copy_blocks(cache: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """Copy blocks `sources` [n] to `targets` [n] in every layer; a target past the end is dropped."""
    return jax.tree.map(lambda array: array.at[targets].set(array[sources], mode="drop"), cache)


def padded_pairs(pairs: list[tuple[int, int]], num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources, targets) of 1, 8, 64 ... pairs; the surplus targets lie past the end."""
    size = 1
    while size < len(pairs):
        size *= 8
    sources, targets = np.zeros(size, np.int32), np.full(size, num_blocks, np.int32)
    for index, (source, target) in enumerate(pairs):
        sources[index], targets[index] = source, target
    return sources, targets
