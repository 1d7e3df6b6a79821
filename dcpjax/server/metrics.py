"""Numbers for Prometheus, under the names that vLLM's server gives them."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from dcpjax.api.outputs import StreamEvent
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend.completion import RunningPrompt

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's number of the only engine
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)


class Metrics:
    """What requests took, and what the engine says when it is asked."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """`stats` gives the newest snapshot without waiting."""
        self.registry = CollectorRegistry()
        self._labels = (model, ENGINE)
        self.registry.register(_EngineNumbers(self._labels, stats))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "from arrival to the first token", FIRST_TOKEN
        )
        self._between = self._histogram("inter_token_latency_seconds", "between two tokens", TOKEN)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "mean time between the tokens of a completion", TOKEN
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "from arrival to the end", REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "from arrival to the first step", REQUEST)
        self._prompt = self._histogram("request_prompt_tokens", "prompt tokens of a completion", COUNT)
        self._generated = self._histogram("request_generation_tokens", "generated tokens of a completion", COUNT)
        self._ended = Counter(
            "vllm:request_success",
            "Completions that have ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._last_token: dict[tuple[str, int], float] = {}  # of running completions: when the newest token came

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def observe(self, prompt: RunningPrompt, event: StreamEvent) -> None:
        """Take note of an event. Only the engine's thread calls this."""
        if event.index < len(prompt.completions):  # else the prompt was refused
            self._observe_tokens(prompt, event)
        if event.finish_reason is not None:
            self._ended.labels(*self._labels, event.finish_reason).inc()

    def _observe_tokens(self, prompt: RunningPrompt, event: StreamEvent) -> None:
        metrics = prompt.completions[event.index].request.metrics
        key = (prompt.submission.request_id, event.index)
        if event.token_ids and metrics.last_token_time is not None:
            before = self._last_token.get(key)
            if before is not None:
                self._between.observe(metrics.last_token_time - before)
            elif metrics.time_to_first_token is not None:
                self._first_token.observe(metrics.time_to_first_token)
            self._last_token[key] = metrics.last_token_time
        if event.finish_reason is not None:
            self._last_token.pop(key, None)
            self._observe_end(prompt, event)

    def _observe_end(self, prompt: RunningPrompt, event: StreamEvent) -> None:
        metrics = prompt.completions[event.index].request.metrics
        durations = (
            (self._per_token, metrics.time_per_output_token),
            (self._latency, metrics.latency),
            (self._queue, metrics.queue_time),
        )
        for histogram, seconds in durations:
            if seconds is not None:
                histogram.observe(seconds)
        self._prompt.observe(len(prompt.output.prompt_token_ids))
        self._generated.observe(metrics.num_generated_tokens)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"vllm:{name}", f"{text}.".capitalize(), LABELS, registry=self.registry, buckets=buckets)
        return made.labels(*self._labels)


class _EngineNumbers:
    """A collector of prometheus_client: the engine's own numbers at the moment of the question."""

    def __init__(self, labels: tuple[str, ...], stats: Callable[[], EngineStats]) -> None:
        self._labels, self._stats = labels, stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Completions that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Completions that wait.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is all.", stats.cache_usage)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Completions that had to start over.", stats.preemptions)
        yield self._rank_usage(stats)

    def _rank_usage(self, stats: EngineStats) -> Metric:
        made = GaugeMetricFamily(
            "dcpjax:kv_cache_usage_perc", "Share of a rank's slots in use; 1 is all.", labels=(*LABELS, "rank")
        )
        slots = stats.num_blocks * stats.block_size / len(stats.tokens_per_rank)
        for rank, tokens in enumerate(stats.tokens_per_rank):
            made.add_metric([*self._labels, str(rank)], tokens / slots)
        return made

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        made = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        made.add_metric(self._labels, value)
        return made

    def _counter(self, name: str, text: str, value: float) -> Metric:
        made = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        made.add_metric(self._labels, value)
        return made
