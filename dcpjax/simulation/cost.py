"""The lower bound ("floor") of the time of a step with any mix of prompts and decodes.

For steps of decodes alone it equals `planning/floor.py`, which says what it leaves out. In general:

    weights      read once per step; of the experts, those that the step's tokens choose
    cache        each entry reads the tokens it attends to and writes its own, `start + count` in all; a block that two
                 requests share is read for each; gathered keys are written and read once more by each device
    operations   each token is multiplied by the weights and attends to its positions; only sampled tokens need logits
    exchange     for decodes the query and partials; for a chunk of a prompt those, or its cached keys, whichever takes
                 less time (`models.exchange.PromptExchange`), in whole pieces; nothing hides behind anything else
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
        read_experts = cost.expert_bytes * (1 - (1 - cost.experts_chosen) ** tokens)
        matrix_flops = tokens * cost.weight_flops - unsampled * head.flops
        attention = _attention(step, cost)
        elsewhere = cost.exchange_bytes - cost.attention_exchange_bytes
        sent_bytes = tokens * elsewhere - unsampled * head.exchange_bytes + attention.sent_bytes
        collectives = cost.collectives - cost.attention_collectives + attention.collectives
        read_bytes = cost.weight_bytes + read_experts + cached * cost.kv_bytes + attention.gathered_bytes
        return Floor(
            requests=len(step),
            memory_seconds=read_bytes / hardware.bandwidth,
            compute_seconds=matrix_flops / hardware.peak(cost.dtype)
            + attention.pairs * cost.kv_flops / hardware.peak(cost.kv_dtype),
            exchange_seconds=sent_bytes / hardware.link,
            latency_seconds=collectives * hardware.latency,
        )

    return floor_of


class _Attention(NamedTuple):
    """What attention costs each device, in all layers."""

    pairs: float  # (query, key) pairs that the heads of one device have to compute
    gathered_bytes: float  # gathered keys, written and read
    sent_bytes: float
    collectives: int


def _attention(step: Sequence[Scheduled], cost: StepCost) -> _Attention:
    """Some prompts gather their cached keys, together; all other tokens send queries and partials."""
    keys = [entry for entry in step if _gathers_keys(entry, cost.prompts)]
    pairs = sum(_pairs(entry.start, entry.count) for entry in step)
    queries = sum(entry.count for entry in step) - sum(entry.count for entry in keys)
    sent, collectives = queries * cost.attention_exchange_bytes, cost.attention_collectives if queries else 0
    if not keys or cost.prompts is None:
        return _Attention(pairs, 0.0, sent, collectives)
    cached = sum(entry.start for entry in keys)
    gathered = cost.prompts.key_sends(cached, sum(entry.count for entry in keys))
    return _Attention(
        pairs=pairs + (cost.prompts.repeated_heads - 1) * sum(_pairs(entry.start, entry.count) for entry in keys),
        gathered_bytes=2 * cost.layers * cached * cost.prompts.position_bytes,
        sent_bytes=sent + cost.layers * sum(one.bytes for one in gathered),
        collectives=collectives + cost.layers * len(gathered),
    )


def _gathers_keys(entry: Scheduled, prompts: PromptExchange | None) -> bool:
    return prompts is not None and entry.count > 1 and prompts.keys_travel(entry.start, entry.count)


def _pairs(start: int, count: int) -> int:
    """(query, key) pairs of `count` queries from position `start` on: the query at position p attends to p + 1 keys."""
    return count * start + count * (count + 1) // 2
