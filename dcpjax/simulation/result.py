"""The result of a simulation: totals, means over time, and every step for plots."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dcpjax.api.outputs import counted, duration, html_table

SATURATED = 0.01  # share of the time with a request waiting for blocks from which the cache counts as the limit
FLOOR_REMARK = (
    "Step times are lower bounds, not forecasts: the longer of bytes / published bandwidth and operations / published "
    "peak, plus exchanged bytes / published link speed and an assumed latency. Kernels, launches and the host add to "
    "that, so real rates are lower and real waits longer. Scheduling and the use of the cache are the engine's own."
)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step and the state of the engine when it was launched."""

    time: float  # when it starts, in seconds
    seconds: float
    exchange_seconds: float  # of `seconds`, spent on exchanges between devices
    running: int
    waiting: int
    used_blocks: int
    prefill_tokens: int  # tokens of prompts, and those recomputed after a preemption
    decode_tokens: int
    found_tokens: int  # tokens of newly running requests that were found in the prefix cache
    preempted: int  # requests that lost their blocks
    lacks_blocks: bool  # whether the first waiting request needs more blocks than are free


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles of durations, in seconds; 0 if there are none."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        ordered = sorted(values)
        return cls(p50=_percentile(ordered, 0.50), p99=_percentile(ordered, 0.99))

    def __str__(self) -> str:
        return f"{duration(self.p50)} (p99 {duration(self.p99)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """One trace on one layout. Means are weighted by the duration of the steps."""

    model: str
    hardware: str  # name of the device
    tensor_parallel_size: int
    decode_context_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    arrivals: str
    concurrency: int | None
    max_num_seqs: int
    num_blocks: int
    block_size: int
    requests: int
    input_tokens: int  # of all prompts
    output_tokens: int
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int  # tokens found there
    preemptions: int
    duration: float  # seconds from the first arrival to the last token
    queue_time: Percentiles
    time_to_first_token: Percentiles
    inter_token_gap: Percentiles
    timeline: tuple[SimulatedStep, ...]

    @property
    def steps(self) -> int:
        return len(self.timeline)

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return _ratio(self.output_tokens, self.duration)

    @property
    def total_throughput(self) -> float:
        """Prompt and generated tokens per second, including those found in the prefix cache."""
        return _ratio(self.input_tokens + self.output_tokens, self.duration)

    @property
    def prefix_hit_rate(self) -> float:
        return _ratio(self.prefix_hits, self.prefix_queries)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache can hold."""
        return self.num_blocks * self.block_size

    @property
    def cache_usage_mean(self) -> float:
        return self._mean([step.used_blocks for step in self.timeline]) / self.num_blocks

    @property
    def cache_usage_max(self) -> float:
        return max((step.used_blocks for step in self.timeline), default=0) / self.num_blocks

    @property
    def running_mean(self) -> float:
        return self._mean([step.running for step in self.timeline])

    @property
    def running_max(self) -> int:
        return max((step.running for step in self.timeline), default=0)

    @property
    def waiting_mean(self) -> float:
        return self._mean([step.waiting for step in self.timeline])

    @property
    def waiting_max(self) -> int:
        return max((step.waiting for step in self.timeline), default=0)

    @property
    def short_of_cache(self) -> float:
        """Share of the time in which the first waiting request needs more blocks than are free."""
        return self._mean([step.lacks_blocks for step in self.timeline])

    @property
    def saturated(self) -> bool:
        return self.short_of_cache >= SATURATED

    @property
    def exchange_share(self) -> float:
        """Share of the step time that is spent on exchanges."""
        spent = sum(step.exchange_seconds for step in self.timeline)
        return _ratio(spent, sum(step.seconds for step in self.timeline))

    def to_dict(self, *, timeline: bool = True) -> dict[str, Any]:
        """The simulation as JSON values; the timeline is a dict of columns."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "timeline"}
        values = {name: asdict(value) if isinstance(value, Percentiles) else value for name, value in values.items()}
        values |= {name: getattr(self, name) for name in PROPERTIES}
        return values | {"timeline": self._columns()} if timeline else values

    def __repr__(self) -> str:
        return "\n".join(["Simulation", *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_table([*self._rows(), ("times", FLOOR_REMARK)])

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("model", f"{self.model}, {self.dtype} weights, {self.kv_cache_dtype} cache"),
            ("layout", self._layout()),
            ("requests", self._requests()),
            (
                "throughput",
                f"at most {self.throughput:,.0f} generated tokens/s, {self.total_throughput:,.0f} with prompt tokens",
            ),
            ("cache", self._cache()),
            (
                "prefix cache",
                f"{self.prefix_hits:,} of {counted(self.prefix_queries, 'token')} found ({self.prefix_hit_rate:.0%})",
            ),
            ("running", f"{self.running_mean:,.1f} requests, at most {self.running_max:,}{self._preempted()}"),
            ("waiting", f"{self.waiting_mean:,.1f} requests, at most {self.waiting_max:,}"),
            ("queue time", str(self.queue_time)),
            ("first token", f"after {self.time_to_first_token}"),
            ("token gap", str(self.inter_token_gap)),
            ("work", f"{counted(self.steps, 'step')} in {duration(self.duration)}, {self.exchange_share:.0%} exchange"),
        ]

    def _layout(self) -> str:
        dcp = self.decode_context_parallel_size
        return f"tp={self.tensor_parallel_size}, dcp={dcp}, {self.tensor_parallel_size} x {self.hardware}"

    def _requests(self) -> str:
        users = f" from {counted(self.concurrency, 'user')}" if self.concurrency else ""
        tokens = f"{counted(self.input_tokens, 'prompt token')}, {self.output_tokens:,} generated"
        return f"{self.requests:,} ({self.arrivals}{users}), {tokens}"

    def _cache(self) -> str:
        used = f"{self.cache_usage_mean:.0%} of {counted(self.cache_tokens, 'token')} used, at most "
        return used + f"{self.cache_usage_max:.0%}; a request waits for blocks {self.short_of_cache:.0%} of the time"

    def _preempted(self) -> str:
        return f", {counted(self.preemptions, 'preemption')}" if self.preemptions else ""

    def _mean(self, values: Sequence[float]) -> float:
        spent = sum(step.seconds * value for step, value in zip(self.timeline, values, strict=True))
        return _ratio(spent, sum(step.seconds for step in self.timeline))

    def _columns(self) -> dict[str, list[Any]]:
        names = [field.name for field in fields(SimulatedStep)]
        return {name: [getattr(step, name) for step in self.timeline] for name in names}


PROPERTIES = [name for name, value in vars(Simulation).items() if isinstance(value, property)]


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile, interpolated linearly between the two nearest values, as `numpy.percentile` does."""
    if not ordered:
        return 0.0
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
