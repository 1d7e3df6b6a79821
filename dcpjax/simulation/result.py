"""What a simulation found: totals, means over time, and every step for plots. Plain data; knows no engine."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dcpjax.api.outputs import counted, duration, html_table

# Share of the time, with requests waiting for cache, from which on the cache and not the users limits what runs.
SATURATED = 0.01
FLOOR_REMARK = (
    "Step times are floors, not forecasts: bytes over published bandwidth or operations over published peak, plus "
    "exchange over the published link and an assumed latency. Kernels, launches and the host come on top, so rates "
    "are the most and waits the least that can be; what the cache holds and who waits for it follow the engine."
)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step, as it is launched: with the requests and blocks it was chosen to run with."""

    time: float  # when it starts, in seconds
    seconds: float
    exchange_seconds: float  # of these, between devices
    running: int
    waiting: int
    used_blocks: int
    prefill_tokens: int  # those of prompts, and all that are computed again after a preemption
    decode_tokens: int
    found_tokens: int  # in the prefix cache, of the requests that begin to run
    preempted: int  # requests that gave way to it
    lacks_blocks: bool  # whether the first that waits needs more blocks than are free


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of a number of durations, in seconds; 0 where there is none."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        ordered = sorted(values)
        return cls(p50=_at(ordered, 0.50), p99=_at(ordered, 0.99))

    def __str__(self) -> str:
        return f"{duration(self.p50)} (p99 {duration(self.p99)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """One trace on one layout. Means are over the time of the steps."""

    model: str
    hardware: str  # of one device
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
        """Tokens of prompts and answers per second, those found in the prefix cache included."""
        return _ratio(self.input_tokens + self.output_tokens, self.duration)

    @property
    def prefix_hit_rate(self) -> float:
        return _ratio(self.prefix_hits, self.prefix_queries)

    @property
    def cache_tokens(self) -> int:
        """What the cache holds."""
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
        """Share of the time in which a request waits that the free blocks cannot hold."""
        return self._mean([step.lacks_blocks for step in self.timeline])

    @property
    def saturated(self) -> bool:
        return self.short_of_cache >= SATURATED

    @property
    def exchange_share(self) -> float:
        """Share of the time that devices spend exchanging."""
        spent = sum(step.exchange_seconds for step in self.timeline)
        return _ratio(spent, sum(step.seconds for step in self.timeline))

    def to_dict(self, *, timeline: bool = True) -> dict[str, Any]:
        """Plain data; the timeline as one list for each of its columns."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "timeline"}
        given = {name: asdict(value) if isinstance(value, Percentiles) else value for name, value in given.items()}
        told = given | {name: getattr(self, name) for name in DERIVED}
        return told | {"timeline": self._columns()} if timeline else told

    def __repr__(self) -> str:
        return "\n".join(["Simulation", *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_table([*self._rows(), ("times", FLOOR_REMARK)])

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("model", f"{self.model}, {self.dtype} weights, {self.kv_cache_dtype} cache"),
            ("layout", self._layout()),
            ("requests", self._requests()),
            ("throughput", f"at most {self.throughput:,.0f} tokens/s generated, {self.total_throughput:,.0f} in all"),
            ("cache", self._cache()),
            (
                "prefix cache",
                f"{self.prefix_hits:,} of {counted(self.prefix_queries, 'token')} found ({self.prefix_hit_rate:.0%})",
            ),
            ("running", f"{self.running_mean:,.1f} requests, at most {self.running_max:,}{self._preempted()}"),
            ("waiting", f"{self.waiting_mean:,.1f} requests, at most {self.waiting_max:,}"),
            ("queue time", str(self.queue_time)),
            ("first token", f"after {self.time_to_first_token}"),
            ("gap", str(self.inter_token_gap)),
            ("work", f"{counted(self.steps, 'step')}, {duration(self.duration)}, {self.exchange_share:.0%} exchange"),
        ]

    def _layout(self) -> str:
        dcp = self.decode_context_parallel_size
        return f"tp={self.tensor_parallel_size}, dcp={dcp}, {self.tensor_parallel_size} x {self.hardware}"

    def _requests(self) -> str:
        users = f" from {counted(self.concurrency, 'user')}" if self.concurrency else ""
        tokens = f"{counted(self.input_tokens, 'prompt token')}, {self.output_tokens:,} generated"
        return f"{self.requests:,} ({self.arrivals}{users}), {tokens}"

    def _cache(self) -> str:
        held = f"{self.cache_usage_mean:.0%} of {counted(self.cache_tokens, 'token')}, at most "
        return held + f"{self.cache_usage_max:.0%}; too little for {self.short_of_cache:.0%} of the time"

    def _preempted(self) -> str:
        return f", {counted(self.preemptions, 'preemption')}" if self.preemptions else ""

    def _mean(self, values: Sequence[float]) -> float:
        spent = sum(step.seconds * value for step, value in zip(self.timeline, values, strict=True))
        return _ratio(spent, sum(step.seconds for step in self.timeline))

    def _columns(self) -> dict[str, list[Any]]:
        names = [field.name for field in fields(SimulatedStep)]
        return {name: [getattr(step, name) for step in self.timeline] for name in names}


DERIVED = [name for name, value in vars(Simulation).items() if isinstance(value, property)]


def _at(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest of the ordered values, as numpy's percentile."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
