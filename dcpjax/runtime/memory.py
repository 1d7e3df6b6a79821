"""How many blocks the cache has and how long a request may be: from the user's choice, the model and the memory."""

import math
import os
from dataclasses import dataclass

from dcpjax.api.config import EngineConfig
from dcpjax.engine.limits import step_limits
from dcpjax.engine.scheduler import StepLimits
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.model import MeshModel
from dcpjax.runtime.temporaries import step_temporaries
from dcpjax.sharding.arrays import bytes_per_device

CPU_CACHE_BYTES = 2**30  # default cache of all virtual CPU devices together


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the engine may hold."""

    num_blocks: int
    max_model_len: int
    limits: StepLimits


def resolve_sizes(model: MeshModel, engine: EngineConfig) -> Sizes:
    """Raises ValueError for a cache without a single block, or a `max_model_len` that model or cache cannot hold."""
    limits = step_limits(
        model.config,
        model.platform,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_mixed_prefill_tokens=engine.max_mixed_prefill_tokens,
        enable_prefix_caching=engine.enable_prefix_caching,
        num_decode_steps=engine.num_decode_steps,
    )
    budget = engine.kv_cache_memory_bytes or default_cache_bytes(model, engine, limits)
    num_blocks = count_blocks(budget, block_bytes_per_device(model), model.geometry)
    capacity = num_blocks * model.geometry.block_size
    limit = model.config.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > min(limit, capacity):
        which = (
            f"the model's {limit} positions"
            if limit <= capacity
            else f"the KV cache of {capacity} tokens ({budget} bytes per device; raise kv_cache_memory_bytes)"
        )
        raise ValueError(
            f"max_model_len must be at most {which}, but is {engine.max_model_len}; use {min(limit, capacity)}"
        )
    return Sizes(
        num_blocks=num_blocks,
        max_model_len=engine.max_model_len or min(limit, capacity),
        limits=limits,
    )


def block_bytes_per_device(model: MeshModel) -> int:
    """Bytes that one block takes on each device, over all layers, copies of KV heads included."""
    return bytes_per_device(model.cache_specs(1), model.place)


def default_cache_bytes(model: MeshModel, engine: EngineConfig, limits: StepLimits) -> int:
    """Cache size per device where the user names none.

    On CPU a share of `CPU_CACHE_BYTES`; elsewhere what `gpu_memory_utilization` leaves beside the weights and the
    temporaries of the largest step.
    """
    device = model.place.mesh.devices.flat[0]
    stats = device.memory_stats() if model.platform != "cpu" else None
    if not stats:
        return CPU_CACHE_BYTES // model.layout.devices
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    return cache_budget(
        memory_limit(stats["bytes_limit"], engine.gpu_memory_utilization, reserved_share(model.platform))
        - stats["bytes_in_use"],
        weights=bytes_per_device(model.weight_specs(), model.place),
        temporaries=step_temporaries(
            model.config, model.layout, tokens=tokens, rows=rows, prompts=model.prompt_exchange
        ),
    )


def cache_budget(limit: float, *, weights: int, temporaries: int) -> int:
    """Bytes of each device for the cache, of the `limit` that may be used; negative if the others exceed it. The
    planner uses it too."""
    return math.floor(limit - weights - temporaries)


def memory_limit(reserved: int, utilization: float, share: float) -> float:
    """`utilization` of a device's whole memory, of which XLA has reserved `share`; at most all that it has reserved."""
    return min(reserved, utilization * reserved / share)


def reserved_share(platform: str) -> float:
    """Share of a device's memory that XLA reserves at its start: on GPUs 75 % unless the user has set another."""
    if platform != "gpu":
        return 1.0
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return float(next(filter(None, map(os.environ.get, names)), "0.75"))


def count_blocks(budget: int, block_bytes: int, geometry: CacheGeometry) -> int:
    """Whole blocks in `budget` bytes. Raises ValueError if there is not even one."""
    if budget < block_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes must hold at least one block of {geometry.block_size} tokens "
            f"({block_bytes} bytes per device), but is {budget}; use {block_bytes} or a smaller block_size"
        )
    return budget // block_bytes


def table_width(max_model_len: int, geometry: CacheGeometry) -> int:
    """W: blocks of the longest request, rounded up to whole chunks."""
    return -(-geometry.blocks(max_model_len) // geometry.chunk_blocks) * geometry.chunk_blocks
