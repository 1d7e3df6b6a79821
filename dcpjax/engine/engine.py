"""Requests in, tokens out, many at a time. Works on token ids; knows nothing about text.

`step()` is the whole engine: schedule, launch, collect. With `async_scheduling` the step collected is the one
before: while it runs on the device the next is chosen, and its tokens feed that one without passing the host.

    host      choose 1 | choose 2 | collect 1 | choose 3 | collect 2 | ...
    device               step 1 ............. | step 2 ............. | step 3 ...
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dcpjax.api.outputs import RequestMetrics
from dcpjax.engine.blocks import BlockManager
from dcpjax.engine.request import Guides, Request, Status
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Limits, Scheduled, Scheduler
from dcpjax.engine.stats import EngineStats
from dcpjax.models.kv_cache import CacheGeometry


class StepRunner(Protocol):
    """What the engine needs of a model: the real one is `Runner`; tests use one of ten lines."""

    @property
    def geometry(self) -> CacheGeometry: ...

    @property
    def compile_seconds(self) -> float: ...

    def launch(self, step: Sequence[Scheduled]) -> Any:
        """Start a step without waiting for it."""
        ...

    def collect(self, launched: Any) -> StepResult:
        """Wait for a step that `launch` started."""
        ...

    def restore_cache(self) -> bool:
        """Make an empty cache if the old one is lost; True if it was."""
        ...


@dataclass
class Flight:
    """A step that has been started and not yet collected."""

    entries: list[Scheduled]
    launched: Any


class Engine:
    """Continuous batching over one model."""

    def __init__(self, runner: StepRunner, *, num_blocks: int, limits: Limits, async_scheduling: bool = True) -> None:
        self.runner, self.async_scheduling = runner, async_scheduling
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(self.blocks, runner.geometry, limits)
        self._flight: Flight | None = None
        self._stepping = False  # still set after a step that was cut short

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit the cache."""
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Start the next step and collect one; return the requests that have a new token or ended."""
        started, self._stepping = time.monotonic(), True
        changed = self._step()
        self._stepping = False
        self.scheduler.counters.seconds += time.monotonic() - started
        return changed

    def end(self, request: Request) -> None:
        """Free a request's blocks, whether it finished or is given up."""
        if request.status is not Status.FINISHED:
            request.finish("abort")
        request.metrics.finished_time = request.metrics.finished_time or time.monotonic()
        self.scheduler.release(request)

    def recover(self) -> None:
        """After a step that was cut short: let go of what it finished; start over what else was in it."""
        if self._stepping:
            self._stepping = False
            self._start_over()

    def reset_prefix_cache(self) -> bool:
        """Forget what the blocks hold. False, and nothing happens, while requests hold blocks."""
        if self.blocks.num_used:
            return False
        self.blocks.forget_free()
        return True

    def stats(self) -> EngineStats:
        """A snapshot of what runs, what the cache holds and what has been done."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        compiling = self.runner.compile_seconds
        done: dict[str, Any] = asdict(counters)
        done |= {"seconds": max(0.0, counters.seconds - compiling), "compile_seconds": compiling}
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=self.blocks.num_blocks,
            num_used_blocks=self.blocks.num_used,
            num_cached_blocks=self.blocks.num_cached,
            block_size=self.runner.geometry.block_size,
            tokens_per_rank=scheduler.tokens_per_rank(),
            **done,
        )

    def _step(self) -> list[Request]:
        scheduled = self.scheduler.schedule()
        assert scheduled or self._flight, "work is waiting, but nothing could be scheduled"
        try:
            launched = self._launch(scheduled)
        except Exception as error:
            changed = self._collect(self._flight)
            return list(dict.fromkeys([*changed, *self._fail(scheduled, error)]))
        landing, self._flight = (self._flight, launched) if self.async_scheduling else (launched, None)
        return self._collect(landing)

    def _launch(self, scheduled: list[Scheduled]) -> Flight | None:
        if not scheduled:
            return None
        now = time.monotonic()
        for entry in scheduled:
            entry.request.metrics.first_scheduled_time = entry.request.metrics.first_scheduled_time or now
        flight = Flight(scheduled, self.runner.launch(scheduled))
        self.scheduler.update(scheduled)
        return flight

    def _collect(self, flight: Flight | None) -> list[Request]:
        if flight is None:
            return []
        try:
            result = self.runner.collect(flight.launched)
        except Exception as error:
            return self._fail(flight.entries, error)
        now = time.monotonic()
        changed = [
            entry.request
            for row, entry in enumerate(flight.entries)
            if entry.request.status is not Status.FINISHED and self._take(entry, row, result, now)
        ]
        if not all(result.finite):
            self.blocks.forget_free()  # also those of a request that has left its blocks since the step was started
        return changed

    def _take(self, entry: Scheduled, row: int, result: StepResult, now: float) -> bool:
        """Give a request its row of the result. True if it has a new token or ended."""
        request = entry.request
        request.num_in_flight -= entry.samples
        if result.prompt_scores:
            request.prompt_scores.update(result.prompt_scores[row])
        if not result.finite[row]:
            request.finish("error", error="the model's logits are not finite (NaN or infinity)")
        elif entry.samples:
            if result.scores and (scores := result.scores[row]):
                request.scores.append(scores)
            self._append(request, result.tokens[row], now)
        if request.status is Status.FINISHED:
            self.end(request)
        return entry.samples or request.status is Status.FINISHED

    def _append(self, request: Request, token: int, now: float) -> None:
        request.output_token_ids.append(token)
        self.scheduler.counters.generated_tokens += 1
        _note_token(request.metrics, now)
        if token in request.end_token_ids and len(request.output_token_ids) > request.params.min_tokens:
            request.finish("stop", token if token in request.params.stop_tokens else None)
        elif len(request.output_token_ids) >= request.max_tokens:
            request.finish("length")
        elif request.guide is not None:
            self._guide(request.guide, request, token)

    def _guide(self, guide: Guides, request: Request, token: int) -> None:
        """Take the guide along; what goes wrong with it is this request's alone."""
        try:
            guide.advance(token)
            if guide.is_finished:
                request.finish("stop")
            else:
                guide.mask()
        except ValueError as error:
            request.finish("error", error=str(error))

    def _fail(self, scheduled: list[Scheduled], error: Exception) -> list[Request]:
        """The requests of a failed step end with its message; the others start over, and nothing cached is trusted."""
        failed = [entry.request for entry in scheduled if entry.request.status is not Status.FINISHED]
        for request in failed:
            request.finish("error", error=f"{type(error).__name__}: {error}")
            self.end(request)
        self._start_over()
        self.blocks.forget_free()
        return failed

    def _start_over(self) -> None:
        """Drop the step in flight and compute again, from their known tokens, the requests that run."""
        self._flight = None
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            request.num_in_flight = 0
            if request.status is Status.FINISHED:
                self.end(request)
        self.scheduler.preempt_all()
        if self.runner.restore_cache():
            self.blocks.forget_free()


def _note_token(metrics: RequestMetrics, now: float) -> None:
    metrics.num_generated_tokens += 1
    metrics.first_token_time = metrics.first_token_time or now
    metrics.last_token_time = now
