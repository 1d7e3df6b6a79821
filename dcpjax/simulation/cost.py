"""The lower bound ("floor") of the time of a step with any mix of prompts and decodes.

For steps of decodes alone it equals `planning/floor.py`, which says what it leaves out. In general:

    weights      read once per step; of the experts, those that the step's tokens choose
    cache        each entry reads the tokens it attends to and writes its own, `start + count` in all; a block that two
                 requests share is read for each
    operations   each token is multiplied by the weights and attends to its positions; only sampled tokens need logits
    exchange     for decodes the query and partials; for a chunk of a prompt those, or its cached keys, whichever takes
                 less time (`models.exchange.PromptExchange`)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.config import ModelConfig
from dcpjax.models.exchange import PromptExchange
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
        attention = _attention_exchange(step, cost)
        elsewhere = cost.exchange_bytes - cost.attention_exchange_bytes
        sent_bytes = tokens * elsewhere - unsampled * head.exchange_bytes + attention.bytes
        collectives = cost.collectives - cost.attention_collectives + attention.collectives
        return Floor(
            requests=len(step),
            memory_seconds=(cost.weight_bytes + read_experts + cached * cost.kv_bytes) / hardware.bandwidth,
            compute_seconds=matrix_flops / hardware.peak(cost.dtype)
            + pairs * cost.kv_flops / hardware.peak(cost.kv_dtype),
            exchange_seconds=sent_bytes / hardware.link,
            latency_seconds=collectives * hardware.latency,
        )

    return floor_of


class _Sent(NamedTuple):
    """By each device, in all layers."""

    bytes: float
    collectives: int


def _attention_exchange(step: Sequence[Scheduled], cost: StepCost) -> _Sent:
    """Cached keys of the prompts that gather those, together; of all other tokens the queries and partials."""
    prompts = cost.prompts
    keys = [entry for entry in step if _gathers_keys(entry, prompts)]
    queries = sum(entry.count for entry in step) - sum(entry.count for entry in keys)
    sent, collectives = queries * cost.attention_exchange_bytes, cost.attention_collectives if queries else 0
    if keys and prompts is not None:
        gathered = prompts.key_sends(sum(entry.start for entry in keys), sum(entry.count for entry in keys))
        sent += cost.layers * sum(one.bytes for one in gathered)
        collectives += cost.layers * len(gathered)
    return _Sent(sent, collectives)


def _gathers_keys(entry: Scheduled, prompts: PromptExchange | None) -> bool:
    return prompts is not None and entry.count > 1 and prompts.keys_travel(entry.start, entry.count)


def _pairs(start: int, count: int) -> int:
    """(query, key) pairs of `count` queries from position `start` on: the query at position p attends to p + 1 keys."""
    return count * start + count * (count + 1) // 2
