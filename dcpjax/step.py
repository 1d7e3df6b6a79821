"""The jitted step: forward, sample, next tokens, in one dispatch. The cache is donated and updated in place.

Knows models and batches; knows nothing about requests or scheduling.
"""

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import jax
from flax import struct

from dcpjax.batch import Batch
from dcpjax.models import decoder
from dcpjax.models.attention import Runtime
from dcpjax.models.config import ModelConfig
from dcpjax.sampling import sample

# A collective waits for its slowest device; many virtual devices on few cores can keep it waiting for long.
CPU_OPTIONS = {"xla_cpu_collective_call_terminate_timeout_seconds": 3600}


@struct.dataclass
class StepOutput:
    # [R] int32: the next token of each request
    tokens: jax.Array
    # [R] bool: False where the logits held NaN or infinity
    finite: jax.Array


def run_step(
    weights: Any, cache: Any, batch: Batch, *, config: ModelConfig, runtime: Runtime
) -> tuple[StepOutput, Any]:
    """Advance every scheduled request by its tokens and choose each one's next token."""
    scores, cache = last_logits(weights, cache, batch, config=config, runtime=runtime)
    with jax.named_scope("sample"):
        tokens, finite = sample(scores, batch.sampling)
    return StepOutput(tokens, finite), cache


def last_logits(
    weights: Any, cache: Any, batch: Batch, *, config: ModelConfig, runtime: Runtime
) -> tuple[jax.Array, Any]:
    """float32 logits [R, V] of each request's last scheduled token, and the updated cache."""
    hidden, cache = decoder.forward(weights, cache, batch.tokens, batch.work, config, runtime)
    with jax.named_scope("logits"):
        return decoder.logits(weights, hidden[batch.last], config, runtime.place), cache


def compile_on_demand(
    function: Callable[..., tuple[Any, Any]],
    config: ModelConfig,
    runtime: Runtime,
    cache: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Jit `run_step` or `last_logits`; each batch shape compiles at its first use, then never again."""
    place = runtime.place
    replicated = place.sharding()
    return jax.jit(
        bind(function, config=config, runtime=runtime),
        donate_argnums=(1,),
        out_shardings=(replicated, jax.tree.map(lambda array: array.sharding, cache)),
        compiler_options=CPU_OPTIONS if place.mesh.devices.flat[0].platform == "cpu" else None,
    )
