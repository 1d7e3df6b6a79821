"""The shortest time that a step of prompts and decodes can take: the planner's floor, for any mix of both.

A floor and no forecast, see `plan_floor`. A step of decodes alone costs what the planner says. For the rest:

    weights      read once a step, of the experts those that its tokens choose
    cache        each entry reads what it attends to and writes its own tokens, `start + count` in all; a block that
                 two requests share is read for both
    operations   every token meets the weights, and every position before it; only a sampled one meets the head
    exchange     every token's query and partials, as prompts run through the same attention as decodes
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
    """What the logits of one token cost each device."""

    flops: float
    exchange_bytes: float


def head_cost(config: ModelConfig, layout: Layout, dtype: str) -> HeadCost:
    """The part of `StepCost` that a token pays only if the next one is sampled from it."""
    place, name = abstract_place(layout), "embedding" if config.tie_word_embeddings else "head"
    values = sum(
        count * math.prod(local_shape(spec, place))
        for (kind, spec), count in weight_parts(config, layout, dtype).items()
        if kind == name
    )
    gather = send("all_gather", config.vocab_size / layout.devices, layout.devices)
    return HeadCost(flops=2 * values, exchange_bytes=gather.bytes)


def step_floor(cost: StepCost, head: HeadCost, hardware: Hardware) -> StepFloor:
    """What gives the floor of a step on this hardware, in the terms of a decode step of the planner's."""

    def floor_of(step: Sequence[Scheduled]) -> Floor:
        tokens = sum(entry.count for entry in step)
        unsampled = tokens - sum(entry.samples for entry in step)
        touched = sum(entry.start + entry.count for entry in step)
        pairs = sum(_pairs(entry.start, entry.count) for entry in step)
        read_experts = cost.expert_bytes * (1 - (1 - cost.experts_chosen) ** tokens)
        matrices = tokens * cost.weight_flops - unsampled * head.flops
        sent = tokens * cost.exchange_bytes - unsampled * head.exchange_bytes
        return Floor(
            requests=len(step),
            memory_seconds=(cost.weight_bytes + read_experts + touched * cost.kv_bytes) / hardware.bandwidth,
            compute_seconds=matrices / hardware.peak(cost.dtype) + pairs * cost.kv_flops / hardware.peak(cost.kv_dtype),
            exchange_seconds=sent / hardware.link,
            latency_seconds=cost.collectives * hardware.latency,
        )

    return floor_of


def _pairs(start: int, count: int) -> int:
    """Pairs of a query and a key that it sees: the query at position p sees p + 1 keys."""
    return count * start + count * (count + 1) // 2
