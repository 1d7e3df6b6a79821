"""The lower bound ("floor") of the time of a step with any mix of prompts and decodes.

For steps of decodes alone it equals `planning/floor.py`, which says what it leaves out. In general:

    weights      read once per step; of the experts, those that the step's tokens choose
    cache        each entry reads the tokens it attends to and writes its own, `start + count` in all; a block that two
                 requests share is read for each
    operations   each token is multiplied by the weights and attends to its positions; only sampled tokens need logits
    exchange     the query and partials of each token, as prompts run through the same attention as decodes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.config import ModelConfig
from dcpjax.planning.floor import Floor, StepCost
from dcpjax.planning.hardware import Hardware
from dcpjax.planning.sizes import abstract_place, local_shape, weight_parts
from dcpjax.sharding.merge_cost import send
from dcpjax.sharding.mesh import Layout

StepFloor = Callable[[Sequence[Scheduled]], Floor]


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """Cost of the logits of one token on each device."""

    flops: float
    exchange_bytes: float


def head_cost(config: ModelConfig, layout: Layout, dtype: str) -> HeadCost:
    """The part of `StepCost` per request that is needed only for tokens from which the next one is sampled."""
    place, name = abstract_place(layout), "embedding" if config.tie_word_embeddings else "head"
    values = sum(
        count * math.prod(local_shape(spec, place))
        for (kind, spec), count in weight_parts(config, layout, dtype).items()
        if kind == name
    )
    gather = send("all_gather", config.vocab_size / layout.devices, layout.devices)
    return HeadCost(flops=2 * values, exchange_bytes=gather.bytes)


def step_floor(cost: StepCost, head: HeadCost, hardware: Hardware) -> StepFloor:
    """A function from a step's entries to its floor on this hardware. `cost` is the planner's for a decode step."""

    def floor_of(step: Sequence[Scheduled]) -> Floor:
        tokens = sum(entry.count for entry in step)
        unsampled = tokens - sum(entry.samples for entry in step)
        cached = sum(entry.start + entry.count for entry in step)
        pairs = sum(_pairs(entry.start, entry.count) for entry in step)
        read_experts = cost.expert_bytes * (1 - (1 - cost.experts_chosen) ** tokens)
        matrix_flops = tokens * cost.weight_flops - unsampled * head.flops
        sent_bytes = tokens * cost.exchange_bytes - unsampled * head.exchange_bytes
        return Floor(
            requests=len(step),
            memory_seconds=(cost.weight_bytes + read_experts + cached * cost.kv_bytes) / hardware.bandwidth,
            compute_seconds=matrix_flops / hardware.peak(cost.dtype)
            + pairs * cost.kv_flops / hardware.peak(cost.kv_dtype),
            exchange_seconds=sent_bytes / hardware.link,
            latency_seconds=cost.collectives * hardware.latency,
        )

    return floor_of


def _pairs(start: int, count: int) -> int:
    """(query, key) pairs of `count` queries from position `start` on: the query at position p attends to p + 1 keys."""
    return count * start + count * (count + 1) // 2
