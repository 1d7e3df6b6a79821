"""`plan`: what fits on each legal layout, and the lower bound of its decode steps, from a model's config alone.

Sizes of weights and cache are exact: they are computed from the arrays that the engine declares, and equal what it
allocates. Temporaries of a step are an upper bound, times are lower bounds, see `floor.py`. No weight is read and no
device is used.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dcpjax.api.config import EngineConfig
from dcpjax.checkpoint.model_config import resolve_dtype
from dcpjax.engine.limits import step_limits
from dcpjax.models.config import ModelConfig
from dcpjax.models.exchange import PromptExchange, exchange, exchange_dtype
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.floor import Floor, floor, smallest, step_cost
from dcpjax.planning.hardware import find_hardware
from dcpjax.planning.model_config import Model, read_config
from dcpjax.planning.options import RUNNABLE, SPELLINGS, PlanOptions
from dcpjax.planning.plan_data import Demand, LayoutRow, PlanData, useful_dcp
from dcpjax.planning.sizes import block_bytes, cached_value_bytes, checkpoint_bytes, weight_bytes
from dcpjax.planning.table import to_dict, to_html, to_text
from dcpjax.runtime.memory import CPU_CACHE_BYTES, cache_budget
from dcpjax.runtime.temporaries import step_temporaries
from dcpjax.sharding.merge import MERGES
from dcpjax.sharding.merge_cost import CollectiveSpeed, Link
from dcpjax.sharding.mesh import Layout, check_layout, legal_layouts

CONTEXT, OUTPUT = 32768, 1024  # tokens of a prompt and a completion, unless the options or the model say otherwise
MOST_REQUESTS = 1 << 20  # where the search for `faster_from_requests` ends


class Plan(PlanData):
    """What fits on each legal layout. `print` shows it as a table, and so does a notebook."""

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; `dcpjax plan --json` prints them."""
        return to_dict(self)

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def plan(model: Model, **options: Any) -> Plan:
    """Plan all legal layouts of a model; the options are the fields of `PlanOptions`.

    `model` is what `LLM` takes, a config.json, or a mapping with its entries. For a hub id only config.json is fetched.
    Raises ValueError for a wrong model or option. A model that does not fit is no error: see `Plan.fits`.
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
        CacheGeometry(block_size=choice.block_size, dcp=asked.dcp)  # raises if dcp does not divide the block size
    planner = _Planner(config, choice)
    rows = _compared_with_dcp_1([planner.row(layout) for layout in layouts], planner)
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


class _Planner:
    """Computes the row of a layout; holds what all layouts of a plan have in common."""

    def __init__(self, config: ModelConfig, choice: PlanOptions) -> None:
        self.config, self.choice = config, choice
        self.hardware = find_hardware(choice.hardware).part(choice.tensor_parallel_size)
        self.dtype = resolve_dtype(SPELLINGS.get(choice.dtype, choice.dtype), config)
        default_kv_dtype = self.dtype if self.dtype in RUNNABLE else "bfloat16"
        kv_dtype = SPELLINGS.get(choice.kv_cache_dtype, choice.kv_cache_dtype)
        self.kv_dtype = default_kv_dtype if kv_dtype == "auto" else kv_dtype
        self.platform = "cpu" if self.hardware.shared else "accelerator"
        sent = exchange_dtype(choice.dcp_exchange_dtype, self.dtype, self.platform)
        self.exchanged_bytes = 4 if sent == "float32" else 2  # of each value of gathered queries and merged outputs
        self.demand = _demand(choice, config)
        self.limits = step_limits(
            config,
            self.platform,
            max_num_seqs=EngineConfig.max_num_seqs,
            max_num_batched_tokens=None,
            max_mixed_prefill_tokens=None,
            enable_prefix_caching=True,
        )

    def row(self, layout: Layout) -> LayoutRow:
        config, choice = self.config, self.choice
        block_size = _nearest_multiple(choice.block_size, layout.dcp)
        prompts = self.prompt_exchange(layout)
        weights = weight_bytes(config, layout, self.dtype, replicate_q=choice.dcp_replicate_q)
        block = block_bytes(config, layout, block_size, self.kv_dtype)
        workspace = self.workspace(layout, prompts)
        budget = self.cache_budget(weights, workspace)
        row = LayoutRow(
            tp=layout.tp,
            dcp=layout.dcp,
            copies=layout.duplication(config.cache_heads),
            block_size=block_size,
            weight_bytes=weights,
            block_bytes=block,
            num_blocks=max(0, budget) // block,
            workspace_bytes=workspace,
            memory_needed=weights + workspace + max(0, budget),
            demand=self.demand,
            exchanges={
                merge: exchange(
                    config, layout, merge, replicate_q=choice.dcp_replicate_q, value_bytes=self.exchanged_bytes
                )
                for merge in MERGES
            },
            cost=step_cost(
                config,
                layout,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                kv_bytes=block / block_size,
                merge=choice.dcp_comm_backend,
                replicate_q=choice.dcp_replicate_q,
                value_bytes=self.exchanged_bytes,
                prompts=prompts,
            ),
            floor=None,
        )
        requests = row.requests if choice.concurrency is None else min(choice.concurrency, row.requests)
        return replace(row, floor=self.floor(row, requests, self.demand.mean_length)) if requests else row

    def floor(self, row: LayoutRow, requests: int, context: float) -> Floor:
        return floor(row.cost, self.hardware, requests, context)

    def prompt_exchange(self, layout: Layout) -> PromptExchange | None:
        """The engine's choice between gathered keys and queries, by published speeds."""
        speed = CollectiveSpeed(self.hardware.latency, self.hardware.link)
        return PromptExchange.of(
            self.config,
            layout,
            self.platform,
            self.choice.dcp_comm_backend,
            cached_value_bytes(self.kv_dtype),
            replicate_q=self.choice.dcp_replicate_q,
            value_bytes=self.exchanged_bytes,
            link=None if self.hardware.shared else Link(speed, speed, speed, speed),
        )

    def workspace(self, layout: Layout, prompts: PromptExchange | None) -> int:
        """Bytes of each device for temporaries: the user's choice, or those of the engine's largest step."""
        if self.choice.workspace_bytes is not None:
            return self.choice.workspace_bytes
        tokens, rows = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        return step_temporaries(self.config, layout, tokens=tokens, rows=rows, prompts=prompts)

    def cache_budget(self, weights: int, workspace: int) -> int:
        """Bytes of each device for the cache; negative if weights and workspace alone exceed its memory."""
        if self.choice.kv_cache_memory_bytes:
            return self.choice.kv_cache_memory_bytes
        usable = self.hardware.memory * self.choice.gpu_memory_utilization
        if self.hardware.shared:  # the engine's own default on CPU
            default = CPU_CACHE_BYTES // self.choice.tensor_parallel_size
            usable = min(usable, weights + workspace + default)
        return cache_budget(usable, weights=weights, temporaries=workspace)


def _compared_with_dcp_1(rows: list[LayoutRow], planner: _Planner) -> tuple[LayoutRow, ...]:
    """Fill in `faster_from_requests` and `faster_from_context`, where dcp=1 is a legal layout."""
    first = rows[0]
    if first.dcp != 1:
        return tuple(rows)
    context = planner.demand.mean_length

    def faster(row: LayoutRow, requests: int, context: float) -> bool:
        return planner.floor(row, requests, context).seconds < planner.floor(first, requests, context).seconds

    def compared(row: LayoutRow) -> LayoutRow:
        return replace(
            row,
            faster_from_requests=smallest(lambda requests: faster(row, requests, context), MOST_REQUESTS),
            faster_from_context=smallest(lambda tokens: faster(row, 1, tokens), planner.config.max_position_embeddings),
        )

    return (first, *(compared(row) for row in rows[1:]))


def _nearest_multiple(block_size: int, dcp: int) -> int:
    """The multiple of `dcp` that is nearest to `block_size`."""
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
