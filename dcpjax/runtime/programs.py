"""What runs on the device in a step. Programs follow each other without the host between them:

    copy      blocks of which a request reuses a part, before all else; most steps have none
    forward   all layers: tokens [N] -> hidden [N, M]; donates the cache and updates it in place
    pick      hidden [N, M] -> [C, M], of the tokens from which a next one is chosen; nearly nothing to compile
    choose    head and sampling: [C, M] -> tokens [C]; another program for each combination of options in use
    score     head and log-probabilities of prompt tokens, for those who want them

Each is compiled once for each shape. Only what is chosen from or scored meets the head: a step of which no request
is at its newest token ends after `forward`. Knows models and batches; knows nothing about requests or scheduling.
"""

from collections.abc import Callable
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
from dcpjax.sampling.sampler import Sampled, SamplingBatch, sample
from dcpjax.sampling.scoring import Logprobs, score
from dcpjax.sharding.rules import Placement

# A collective waits for its slowest device; many virtual devices on few cores can keep it waiting for long.
CPU_OPTIONS = {"xla_cpu_collective_call_terminate_timeout_seconds": 3600}


def forward(
    weights: Any, cache: Any, latest: jax.Array, batch: Batch, *, config: ModelConfig, runtime: Runtime
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """((hidden [N, M] float32, whether that of each request's last token is finite [R]), the updated cache).

    `latest` [S] holds each seat's newest token: the next input of a request whose token the host has not seen yet.
    """
    tokens = known_tokens(batch, latest)
    hidden, cache = decoder.forward(weights, cache, tokens, batch.work, config, runtime)
    return (hidden, jnp.all(jnp.isfinite(hidden[batch.last]), axis=-1)), cache


def known_tokens(batch: Batch, latest: jax.Array) -> jax.Array:
    """The step's tokens [N], those that only the device knows filled in."""
    return jnp.where(batch.tokens == UNKNOWN, latest[batch.seats[batch.work.rows]], batch.tokens)


def head_of(weights: Any) -> Any:
    """What the head needs of a model's weights: passing the layers along would cost the host hundreds of leaves."""
    return weights.replace(layers=())


def pick(hidden: jax.Array, indices: jax.Array) -> jax.Array:
    """[C, M] of hidden [N, M]."""
    return hidden[indices]


def choose(
    head: Any, hidden: jax.Array, latest: jax.Array, options: SamplingBatch, *, config: ModelConfig, place: Placement
) -> tuple[Sampled, jax.Array]:
    """hidden [C, M] -> the tokens that follow, and `latest` brought up to date."""
    with jax.named_scope("logits"):
        logits = decoder.logits(head, hidden, config, place)
    return sample(logits, latest, options)


def score_prompt(
    head: Any, hidden: jax.Array, targets: jax.Array, num_logprobs: int, *, config: ModelConfig, place: Placement
) -> Logprobs:
    """hidden [C, M] -> the log-probabilities of `targets` [C], the prompt tokens that follow."""
    with jax.named_scope("logits"):
        logits = decoder.logits(head, hidden, config, place)
    return score(logits, targets, num_logprobs)


def copy_blocks(cache: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """Give blocks `targets` [C] the content of `sources` [C] in every layer; a target past the end is dropped."""
    return jax.tree.map(lambda array: array.at[targets].set(array[sources], mode="drop"), cache)


def compile_on_demand(
    function: Callable[..., tuple[Any, Any]],
    config: ModelConfig,
    runtime: Runtime,
    cache: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Jit `forward`, or a function like it; each batch shape compiles at its first use, then never again."""
    return jax.jit(
        bind(function, config=config, runtime=runtime),
        donate_argnums=(1,),
        out_shardings=(runtime.place.sharding(), _shardings(cache)),
        compiler_options=compiler_options(runtime.place),
    )


def compile_copy(cache: Any, place: Placement) -> Callable[..., Any]:
    return jax.jit(
        copy_blocks, donate_argnums=(0,), out_shardings=_shardings(cache), compiler_options=compiler_options(place)
    )


def compile_pick(place: Placement) -> Callable[..., Any]:
    return jax.jit(pick, out_shardings=place.sharding(), compiler_options=compiler_options(place))


def compile_choice(config: ModelConfig, place: Placement) -> Callable[..., Any]:
    return jax.jit(
        bind(choose, config=config, place=place),
        out_shardings=place.sharding(),
        compiler_options=compiler_options(place),
    )


def compile_prompt_scores(config: ModelConfig, place: Placement) -> Callable[..., Any]:
    return jax.jit(
        bind(score_prompt, config=config, place=place),
        static_argnums=3,
        out_shardings=place.sharding(),
        compiler_options=compiler_options(place),
    )


def compiler_options(place: Placement) -> dict[str, Any] | None:
    return CPU_OPTIONS if place.mesh.devices.flat[0].platform == "cpu" else None


def padded_pairs(pairs: list[tuple[int, int]], num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources, targets) of 1, 8, 64 ... pairs; the surplus targets lie past the end."""
    size = 1
    while size < len(pairs):
        size *= 8
    sources, targets = np.zeros(size, np.int32), np.full(size, num_blocks, np.int32)
    for index, (source, target) in enumerate(pairs):
        sources[index], targets[index] = source, target
    return sources, targets


def _shardings(cache: Any) -> Any:
    return jax.tree.map(lambda array: array.sharding, cache)
