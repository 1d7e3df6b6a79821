"""What runs on the device in a step: copy blocks, forward, sample. The cache is donated and updated in place.

Two programs follow each other without the host between them: `forward` is compiled once for each batch shape, and
sampling, which compiles in a moment, once for each combination of options in use. Knows models and batches; knows
nothing about requests or scheduling.
"""

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.batch import Batch
from dcpjax.models import decoder
from dcpjax.models.attention import Runtime
from dcpjax.models.config import ModelConfig
from dcpjax.request import UNKNOWN
from dcpjax.sampling import sample
from dcpjax.scoring import score
from dcpjax.sharding.rules import Placement

# A collective waits for its slowest device; many virtual devices on few cores can keep it waiting for long.
CPU_OPTIONS = {"xla_cpu_collective_call_terminate_timeout_seconds": 3600}


def forward(
    weights: Any, cache: Any, latest: jax.Array, batch: Batch, *, config: ModelConfig, runtime: Runtime
) -> tuple[jax.Array, Any]:
    """float32 logits [R, V] of the tokens in `batch.last`, and the updated cache.

    `latest` [S] holds each seat's newest token: the next input of a request whose token the host has not seen yet.
    """
    tokens = known_tokens(batch, latest)
    hidden, cache = decoder.forward(weights, cache, tokens, batch.work, config, runtime)
    with jax.named_scope("logits"):
        return decoder.logits(weights, hidden[batch.last], config, runtime.place), cache


def known_tokens(batch: Batch, latest: jax.Array) -> jax.Array:
    """The step's tokens [N], those that only the device knows filled in."""
    return jnp.where(batch.tokens == UNKNOWN, latest[batch.seats[batch.work.rows]], batch.tokens)


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


def compile_sampler(place: Placement) -> Callable[..., Any]:
    return jax.jit(sample, out_shardings=place.sharding(), compiler_options=compiler_options(place))


def compile_prompt_scores(place: Placement) -> Callable[..., Any]:
    return jax.jit(score, static_argnums=2, compiler_options=compiler_options(place))


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
