"""`simulate`: replays a trace of requests for a model on hardware that is not there.

The engine's own scheduler and block manager decide what runs, waits and is cached. A step takes its floor, so rates
are upper bounds and waits lower bounds. No weight is read and no device is used.
"""

from collections.abc import Sequence
from typing import Any

from dcpjax.api.outputs import counted
from dcpjax.engine.limits import step_limits
from dcpjax.engine.scheduler import StepLimits
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.model_config import Model
from dcpjax.planning.planner import Plan, plan
from dcpjax.sharding.mesh import Layout
from dcpjax.simulation.arrivals import Arrivals
from dcpjax.simulation.cost import StepFloor, head_cost, step_floor
from dcpjax.simulation.options import SimOptions
from dcpjax.simulation.replay import Replay
from dcpjax.simulation.result import Percentiles, Simulation
from dcpjax.simulation.trace import TraceRequest


def simulate(requests: Sequence[TraceRequest], model: Model, **options: Any) -> Simulation:
    """Replay a trace; `model` is as for `plan`, options are the fields of `SimOptions`.

    Raises ValueError for a wrong model or option, for weights that do not fit the devices, and for a request that is
    larger than the whole cache.
    """
    return Simulator(requests, model, **options).run()


class Simulator:
    """A trace, a model and hardware, checked to fit together. Raises ValueError as `simulate` does."""

    def __init__(self, requests: Sequence[TraceRequest], model: Model, **options: Any) -> None:
        self.requests, self.options = list(requests), SimOptions.from_options(options)
        if not self.requests:
            raise ValueError("requests must hold at least one request, but is empty; use another trace")
        self.plan = plan(model, **self.options.plan_options())
        _check_fits(self.plan)
        for number, request in enumerate(self.requests, start=1):
            _check_request(number, request, self.plan)

    def run(self) -> Simulation:
        """Replay the trace. Every call gives the same result."""
        geometry = CacheGeometry(block_size=self.plan.row.block_size, dcp=self.plan.row.dcp)
        replay = Replay(
            Arrivals(self.requests, self.options),
            geometry,
            num_blocks=min(self.plan.row.num_blocks, self._needed_blocks(geometry)),
            limits=_limits(self.options, self.plan),
            floor_of=_floor(self.plan),
        )
        replay.run()
        return self._simulation(replay)

    def _needed_blocks(self, geometry: CacheGeometry) -> int:
        """Blocks of all requests together. A larger pool would behave the same and only take more memory."""
        return sum(geometry.blocks(request.input_length + request.output_length) for request in self.requests)

    def _simulation(self, replay: Replay) -> Simulation:
        plan, options, counters = self.plan, self.options, replay.engine.scheduler.counters
        return Simulation(
            model=plan.model,
            hardware=plan.hardware.name,
            tensor_parallel_size=options.tensor_parallel_size,
            decode_context_parallel_size=options.decode_context_parallel_size,
            dtype=plan.dtype,
            kv_cache_dtype=plan.kv_cache_dtype,
            arrivals=options.arrivals,
            concurrency=options.concurrency,
            max_num_seqs=options.seats,
            num_blocks=plan.row.num_blocks,
            block_size=plan.row.block_size,
            requests=len(self.requests),
            input_tokens=sum(request.input_length for request in self.requests),
            output_tokens=replay.engine.counters.generated_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            duration=replay.clock.now,
            queue_time=Percentiles.of(one.queue_time or 0.0 for one in replay.metrics),
            time_to_first_token=Percentiles.of(one.time_to_first_token or 0.0 for one in replay.metrics),
            inter_token_gap=Percentiles.of(replay.gaps),
            timeline=tuple(replay.timeline),
        )


def _floor(plan: Plan) -> StepFloor:
    layout = Layout(tensor_parallel_size=plan.row.tp * plan.row.dcp, decode_context_parallel_size=plan.row.dcp)
    return step_floor(plan.row.cost, head_cost(plan.config, layout, plan.dtype), plan.hardware)


def _limits(options: SimOptions, plan: Plan) -> StepLimits:
    """The limits of a step that the engine's runner would set for this model."""
    return step_limits(
        plan.config,
        "cpu" if plan.hardware.shared else "accelerator",
        max_num_seqs=options.seats,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_mixed_prefill_tokens=options.max_mixed_prefill_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
    )


def _check_fits(plan: Plan) -> None:
    row = plan.row
    if row.memory_needed > plan.memory_limit or not row.num_blocks:
        raise ValueError(
            f"weights and cache must fit the {plan.memory_limit:.0f} bytes of each device that may be used, but at "
            f"dcp={row.dcp} need {row.memory_needed} with {counted(row.num_blocks, 'block')} of cache; use more "
            "devices, a smaller dtype or another kv_cache_memory_bytes"
        )


def _check_request(number: int, request: TraceRequest, plan: Plan) -> None:
    length = request.input_length + request.output_length
    found = f"but request {number} has {request.input_length} + {request.output_length} tokens"
    longest = plan.config.max_position_embeddings
    if length > longest:
        raise ValueError(
            f"a request of the trace must fit the model's {longest} positions, {found}; scale the trace down or leave "
            "the request out"
        )
    if length > plan.row.tokens:
        raise ValueError(
            f"a request of the trace must fit the KV cache of {plan.row.tokens} tokens at dcp={plan.row.dcp}, {found}; "
            f"raise kv_cache_memory_bytes or decode_context_parallel_size, or scale the trace down"
        )
