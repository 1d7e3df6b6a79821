"""`plan`: what fits and what a decode step must cost, before any weight is read or any device is asked.

Sizes are exact: they come from the arrays that the engine would declare, and equal what it allocates. Times are
floors, see `plan_floor`. Knows a model's config and published peaks; knows nothing about files of weights.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcpjax.checkpoint.model_config import resolve_dtype
from dcpjax.models.config import ModelConfig
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.floor import Exchange, Floor, StepCost, exchange, floor, smallest, step_cost
from dcpjax.planning.hardware import Hardware, find_hardware
from dcpjax.planning.model_config import Model, read_config
from dcpjax.planning.options import RUNNABLE, SPELLINGS, PlanOptions
from dcpjax.planning.sizes import block_bytes, checkpoint_bytes, weight_bytes
from dcpjax.planning.table import to_dict, to_html, to_text
from dcpjax.runtime.runner import CPU_CACHE_BYTES
from dcpjax.sharding.merge import MERGES
from dcpjax.sharding.mesh import Layout, check_layout, legal_layouts

CONTEXT, OUTPUT = 32768, 1024  # tokens of a prompt and a completion where nobody says
MOST_REQUESTS = 1 << 20  # looked at when asking from how many on a layout is faster


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What requests ask of the cache."""

    context_length: int
    output_length: int
    unique_token_fraction: float

    @property
    def length(self) -> int:
        return self.context_length + self.output_length

    @property
    def mean_length(self) -> float:
        """Tokens that a request has in the cache, averaged over its decode steps."""
        return self.context_length + self.output_length / 2

    def shared_blocks(self, block_size: int) -> int:
        """Whole blocks of the prefix that all requests have in common."""
        return math.floor(self.context_length * (1 - self.unique_token_fraction) / block_size)

    def own_blocks(self, block_size: int) -> int:
        return max(1, -(-self.length // block_size) - self.shared_blocks(block_size))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One legal layout."""

    tp: int
    dcp: int
    copies: int  # devices that store each cached value
    block_size: int
    weight_bytes: int  # per device
    block_bytes: int  # of the cache, per device
    num_blocks: int  # 0 where the weights leave nothing
    memory_needed: int  # per device: weights, workspace and cache
    demand: Demand
    exchanges: Mapping[str, Exchange]  # by merge; per layer and query token
    cost: StepCost
    floor: Floor | None  # at `requests`; None where not even one fits
    faster_from_requests: int | None = None  # than dcp=1, at this context; None: never, or there is no dcp=1
    faster_from_context: int | None = None  # than dcp=1, with one request

    @property
    def kv_bytes_per_token(self) -> float:
        """Per device: a block's share, fractional where a rank holds a part of each token's neighbours."""
        return self.block_bytes / self.block_size

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def requests(self) -> int:
        """How many fit at once. Memory alone decides; the engine's `max_num_seqs` is a limit of its own."""
        free = self.num_blocks - self.demand.shared_blocks(self.block_size)
        return max(0, free) // self.demand.own_blocks(self.block_size)

    def usage(self, requests: int) -> float:
        """Share of the blocks that so many requests take; over 1 where they do not fit."""
        if not self.num_blocks:
            return math.inf
        taken = self.demand.shared_blocks(self.block_size) + requests * self.demand.own_blocks(self.block_size)
        return taken / self.num_blocks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits on each legal layout. Prints as a table; a notebook shows it as one."""

    model: str
    config: ModelConfig
    options: PlanOptions
    hardware: Hardware  # of one device
    dtype: str
    kv_cache_dtype: str
    demand: Demand
    checkpoint_bytes: int
    rows: tuple[Row, ...]  # by rising dcp
    chosen_dcp: int

    @property
    def row(self) -> Row:
        """The layout asked for, else the fewest ranks that store the cache the fewest times."""
        return next(row for row in self.rows if row.dcp == self.chosen_dcp)

    @property
    def useful_dcp(self) -> int:
        return useful_dcp(self.rows)

    @property
    def memory_limit(self) -> float:
        """Bytes of each device that may be used."""
        return self.hardware.memory * self.options.gpu_memory_utilization

    @property
    def fits(self) -> bool:
        row = self.row
        return row.requests >= (self.options.concurrency or 1) and row.memory_needed <= self.memory_limit

    @property
    def runs_here(self) -> bool:
        """Whether the engine computes with these dtypes; others can be planned only."""
        return self.dtype in RUNNABLE and self.kv_cache_dtype in RUNNABLE

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `dcpjax plan --json` prints it."""
        return to_dict(self)

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def plan(model: Model, **options: Any) -> Plan:
    """Plan a model's layouts from its config; options are those of `PlanOptions`.

    `model` is what `LLM` takes, a config.json or its entries; of a hub id only config.json is fetched. Raises
    ValueError for a mistake of the user's; a plan that does not fit is an answer, see `Plan.fits`.
    """
    choice = PlanOptions.from_options(options)
    config = read_config(model, choice)
    devices, heads, kv_heads = choice.tensor_parallel_size, config.num_heads, config.cache_heads
    layouts = legal_layouts(devices, heads, kv_heads)
    asked = Layout(
        tensor_parallel_size=devices,
        decode_context_parallel_size=choice.decode_context_parallel_size or layouts[-1].dcp,
    )
    check_layout(asked, heads, kv_heads, whole_heads=config.mla is not None)
    if choice.decode_context_parallel_size:
        CacheGeometry(block_size=choice.block_size, dcp=asked.dcp)  # refuses blocks that ranks cannot share
    planner = _Planner(config, choice)
    rows = _compared([planner.row(layout) for layout in layouts], planner)
    return Plan(
        model="model" if isinstance(model, Mapping) else os.fspath(model),
        config=config,
        options=choice,
        hardware=planner.hardware,
        dtype=planner.dtype,
        kv_cache_dtype=planner.kv_dtype,
        demand=planner.demand,
        checkpoint_bytes=checkpoint_bytes(config, planner.dtype),
        rows=rows,
        chosen_dcp=choice.decode_context_parallel_size or useful_dcp(rows),
    )


def useful_dcp(rows: tuple[Row, ...]) -> int:
    """The smallest dcp with the fewest copies: more ranks would add exchange and save nothing."""
    return min(rows, key=lambda row: (row.copies, row.dcp)).dcp


class _Planner:
    """What all layouts of a plan have in common."""

    def __init__(self, config: ModelConfig, choice: PlanOptions) -> None:
        self.config, self.choice = config, choice
        self.hardware = find_hardware(choice.hardware).part(choice.tensor_parallel_size)
        self.dtype = resolve_dtype(SPELLINGS.get(choice.dtype, choice.dtype), config)
        same = self.dtype if self.dtype in RUNNABLE else "bfloat16"
        self.kv_dtype = SPELLINGS.get(choice.kv_cache_dtype, choice.kv_cache_dtype)
        self.kv_dtype = same if self.kv_dtype == "auto" else self.kv_dtype
        self.demand = _demand(choice, config)

    def row(self, layout: Layout) -> Row:
        config, choice = self.config, self.choice
        block_size = _shared_out(choice.block_size, layout.dcp)
        weights = weight_bytes(config, layout, self.dtype, replicate_q=choice.dcp_replicate_q)
        block = block_bytes(config, layout, block_size, self.kv_dtype)
        budget = self.cache_budget(weights)
        row = Row(
            tp=layout.tp,
            dcp=layout.dcp,
            copies=layout.duplication(config.cache_heads),
            block_size=block_size,
            weight_bytes=weights,
            block_bytes=block,
            num_blocks=max(0, budget) // block,
            memory_needed=weights + choice.workspace_bytes + max(0, budget),
            demand=self.demand,
            exchanges={merge: exchange(config, layout, merge, replicate_q=choice.dcp_replicate_q) for merge in MERGES},
            cost=step_cost(
                config,
                layout,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                kv_bytes=block / block_size,
                merge=choice.dcp_comm_backend,
                replicate_q=choice.dcp_replicate_q,
            ),
            floor=None,
        )
        requests = row.requests if choice.concurrency is None else min(choice.concurrency, row.requests)
        return replace(row, floor=self.floor(row, requests, self.demand.mean_length)) if requests else row

    def floor(self, row: Row, requests: int, context: float) -> Floor:
        return floor(row.cost, self.hardware, requests, context)

    def cache_budget(self, weights: int) -> int:
        """Bytes of each device for the cache; negative where weights and workspace alone are too many."""
        if self.choice.kv_cache_memory_bytes:
            return self.choice.kv_cache_memory_bytes
        share = self.hardware.memory * self.choice.gpu_memory_utilization
        left = share - weights - self.choice.workspace_bytes
        if self.hardware.shared:  # the engine's own default there
            left = min(left, CPU_CACHE_BYTES // self.choice.tensor_parallel_size)
        return math.floor(left)


def _compared(rows: list[Row], planner: _Planner) -> tuple[Row, ...]:
    """Each layout with what it takes to be faster than dcp=1 on the same devices."""
    first = rows[0]
    if first.dcp != 1:
        return tuple(rows)
    context = planner.demand.mean_length

    def faster(row: Row, requests: int, context: float) -> bool:
        return planner.floor(row, requests, context).seconds < planner.floor(first, requests, context).seconds

    def compared(row: Row) -> Row:
        return replace(
            row,
            faster_from_requests=smallest(lambda requests: faster(row, requests, context), MOST_REQUESTS),
            faster_from_context=smallest(lambda tokens: faster(row, 1, tokens), planner.config.max_position_embeddings),
        )

    return (first, *(compared(row) for row in rows[1:]))


def _shared_out(block_size: int, dcp: int) -> int:
    """The nearest block size that so many ranks can share."""
    return max(1, round(block_size / dcp)) * dcp


def _demand(choice: PlanOptions, config: ModelConfig) -> Demand:
    longest, context, output = config.max_position_embeddings, choice.context_length, choice.output_length
    if output is None:
        output = min(OUTPUT, longest // 2 if context is None else max(0, longest - context))
    if context is None:
        context = min(CONTEXT, longest - output)
    if context < 1 or context + output > longest:
        raise ValueError(
            f"context_length and output_length must be at most the model's {longest} positions together, but are "
            f"{max(context, 1)} + {output}; use context_length={max(1, longest - output)}"
            + ("" if output < longest else f" and output_length={longest - 1}")
        )
    return Demand(context_length=context, output_length=output, unique_token_fraction=choice.unique_token_fraction)
