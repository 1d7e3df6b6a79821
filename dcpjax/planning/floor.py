"""The lower bound ("floor") of a decode step's time: bytes, operations and exchanges divided by published peaks.

Not a forecast. It leaves out kernels that reach less than the peak, launches, sampling, scheduling, and a network
slower than the links within one machine. Memory traffic and arithmetic overlap completely, exchanges with neither.
The number of experts read is an expected value: tokens are assumed to choose experts independently and evenly.

`models.exchange` and `sharding.merge_cost` count what each device must send at least.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dcpjax.models.config import ModelConfig
from dcpjax.models.exchange import PromptExchange, exchange
from dcpjax.planning.hardware import Hardware
from dcpjax.planning.sizes import abstract_place, local_shape, part_bytes, weight_parts
from dcpjax.sharding.merge_cost import FLOAT32, Merge, send
from dcpjax.sharding.mesh import Layout


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a decode step costs each device: parts per step, per request and per token of context."""

    weight_bytes: int  # read once per step, without routed experts
    expert_bytes: int  # of all routed experts; read once per step if every expert is chosen
    experts_chosen: float  # share of the experts that one token is routed to; 0 without experts
    kv_bytes: float  # per token of context
    weight_flops: float  # per request
    kv_flops: float  # per token of context
    exchange_bytes: float  # per request
    collectives: int  # per step
    attention_exchange_bytes: float  # the part of `exchange_bytes` that attention sends over dcp
    attention_collectives: int  # the part of `collectives` over dcp
    prompts: PromptExchange | None  # for chunks of prompts: what they send in each layer instead, where that is less
    layers: int
    dtype: str
    kv_dtype: str


def step_cost(
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: str,
    kv_dtype: str,
    kv_bytes: float,
    merge: Merge,
    replicate_q: bool = False,
    value_bytes: int = FLOAT32,
    prompts: PromptExchange | None = None,
) -> StepCost:
    """The cost of a step with these dtypes and this merge.

    `kv_bytes` are those of one token on one device, `value_bytes` those of each value of gathered queries and merged
    outputs.
    """
    place, moe = abstract_place(layout, replicate_q=replicate_q), config.moe
    chosen = moe.experts_per_token / moe.experts if moe else 0.0
    read = {"once": 0, "experts": 0}
    flops = 0.0
    for part, count in weight_parts(config, layout, dtype).items():
        kind, spec = part
        if kind == "embedding" and not config.tie_word_embeddings:  # one row is read per request, not the table
            continue
        read["experts" if kind == "experts" else "once"] += count * part_bytes(part, place, dtype, config)
        if len(spec.axes) > 1:
            values = 1
            for size in local_shape(spec, place):
                values *= size
            flops += 2 * count * values * (chosen if kind == "experts" else 1)
    over_dcp = exchange(config, layout, merge, replicate_q=replicate_q, value_bytes=value_bytes)
    sent, collectives = _other_exchange(config, layout)
    return StepCost(
        weight_bytes=read["once"],
        expert_bytes=read["experts"],
        experts_chosen=chosen,
        kv_bytes=kv_bytes,
        weight_flops=flops,
        kv_flops=_attention_flops(config, layout),
        exchange_bytes=sent + config.num_layers * over_dcp.bytes,
        collectives=collectives + config.num_layers * over_dcp.collectives,
        attention_exchange_bytes=config.num_layers * over_dcp.bytes,
        attention_collectives=config.num_layers * over_dcp.collectives,
        prompts=prompts,
        layers=config.num_layers,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def _attention_flops(config: ModelConfig, layout: Layout) -> float:
    """Per device: the scores and the weighted sum of one query against one cached token, in all layers."""
    mla = config.mla
    widths = 2 * config.head_dim if mla is None else mla.cached_dim + mla.latent_rank
    return 2 * config.num_layers * config.num_heads * widths / layout.devices


def _other_exchange(config: ModelConfig, layout: Layout) -> tuple[float, int]:
    """Bytes per request, and collectives per step, over all devices: two all-reduces of the hidden state per layer,
    one of the embedding, and the gather of the logits."""
    devices, layers = layout.devices, config.num_layers
    if devices == 1:
        return 0.0, 0
    hidden = send("all_reduce", config.hidden_size, devices).bytes
    logits = send("all_gather", config.vocab_size / devices, devices).bytes
    return (2 * layers + 1) * hidden + logits, 2 * layers + 2


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Lower bounds of one decode step; see the file's docstring for what they leave out."""

    requests: int
    memory_seconds: float
    compute_seconds: float
    exchange_seconds: float
    latency_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds) + self.exchange_seconds + self.latency_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.requests / self.seconds


def floor(cost: StepCost, hardware: Hardware, requests: int, context: float) -> Floor:
    """A step that generates one token for each of `requests`, each with `context` tokens in the cache."""
    read_experts = cost.expert_bytes * (1 - (1 - cost.experts_chosen) ** requests)
    tokens = requests * context
    return Floor(
        requests=requests,
        memory_seconds=(cost.weight_bytes + read_experts + tokens * cost.kv_bytes) / hardware.bandwidth,
        compute_seconds=requests * cost.weight_flops / hardware.peak(cost.dtype)
        + tokens * cost.kv_flops / hardware.peak(cost.kv_dtype),
        exchange_seconds=requests * cost.exchange_bytes / hardware.link,
        latency_seconds=cost.collectives * hardware.latency,
    )


def smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to `most` for which `holds` is true; None if there is none.

    `holds` must be monotonic: true for every number above one for which it is true.
    """
    low, high = 0, 1  # `holds(low)` is false
    while not holds(min(high, most)):
        if high >= most:
            return None
        low, high = high, high * 2
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
