"""Requests in, tokens out, many at a time: schedule a step, launch it, collect a result.

With `async_scheduling` the step that is collected is the one before: while it runs on the device the next one is
scheduled, and its tokens feed that one without passing through the host.

    host      schedule 1 | schedule 2 | collect 1 | schedule 3 | collect 2 | ...
    device                 step 1 ............... | step 2 ............... | step 3 ...

A step that runs several decode steps on the device is collected before the next one is scheduled: only then is known
which of its requests go on.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dcpjax.api.outputs import FinishReason, RequestMetrics
from dcpjax.engine.blocks import BlockManager
from dcpjax.engine.request import Request, Status, TokenGuide
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Scheduled, Scheduler, StepLimits, is_repeated
from dcpjax.engine.stats import EngineCounters, EngineStats
from dcpjax.models.kv_cache import CacheGeometry


class StepRunner(Protocol):
    """What the engine needs of a model. The real one is `runtime.runner.Runner`."""

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
class StepInFlight:
    """A step that has been launched and not yet collected."""

    entries: list[Scheduled]
    launched: Any


class Engine:
    """Continuous batching over one model."""

    def __init__(
        self, runner: StepRunner, *, num_blocks: int, limits: StepLimits, async_scheduling: bool = True
    ) -> None:
        self.runner, self.async_scheduling = runner, async_scheduling
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(self.blocks, runner.geometry, limits)
        self.counters = EngineCounters()
        self._in_flight: StepInFlight | None = None
        self._stepping = False  # still True after a step that was interrupted

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit the cache."""
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Launch the next step and collect one; return the requests that have a new token or ended."""
        started, self._stepping = time.monotonic(), True
        changed = self._step()
        self._stepping = False
        self.counters.seconds += time.monotonic() - started
        return changed

    def end(self, request: Request, reason: FinishReason = "abort", stop_reason: str | int | None = None) -> None:
        """Free a request's blocks. If it has not finished, it ends for this reason."""
        if request.finish_reason is None:
            request.finish(reason, stop_reason)
        request.metrics.finished_time = request.metrics.finished_time or time.monotonic()
        self.scheduler.release(request)

    def recover(self) -> None:
        """After an interrupted step: free the requests that it finished, compute the others in it again."""
        if self._stepping:
            self._start_over()
            self._stepping = False

    def reset_prefix_cache(self) -> bool:
        """Forget what the blocks hold. False, and nothing happens, while requests hold blocks."""
        if self.blocks.num_used:
            return False
        self.blocks.forget_free()
        return True

    def stats(self) -> EngineStats:
        """A snapshot of what runs, what the cache holds and what has been done."""
        scheduler, compiling = self.scheduler, self.runner.compile_seconds
        done: dict[str, Any] = asdict(scheduler.counters) | asdict(self.counters)
        done |= {"seconds": max(0.0, self.counters.seconds - compiling), "compile_seconds": compiling}
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
        changed = self._collect_repeated()
        scheduled = self.scheduler.schedule()
        assert scheduled or self._in_flight or changed, "work is waiting, but nothing could be scheduled"
        try:
            launched = self._launch(scheduled)
        except Exception as error:
            changed += self._collect(self._in_flight)
            return list(dict.fromkeys([*changed, *self._fail(scheduled, error)]))
        if not self.async_scheduling:
            return self._collect(launched)
        before, self._in_flight = self._in_flight, launched
        return changed + self._collect(before)

    def _collect_repeated(self) -> list[Request]:
        """Collect the step in flight if it runs several decode steps."""
        if self._in_flight is None or not is_repeated(self._in_flight.entries):
            return []
        changed = self._collect(self._in_flight)
        self._in_flight = None
        return changed

    def _launch(self, scheduled: list[Scheduled]) -> StepInFlight | None:
        if not scheduled:
            return None
        now = time.monotonic()
        for entry in scheduled:
            entry.request.metrics.first_scheduled_time = entry.request.metrics.first_scheduled_time or now
        launched = StepInFlight(scheduled, self.runner.launch(scheduled))
        self.scheduler.update(scheduled)
        return launched

    def _collect(self, step: StepInFlight | None) -> list[Request]:
        if step is None:
            return []
        try:
            result = self.runner.collect(step.launched)
        except Exception as error:
            return self._fail(step.entries, error)
        now, results = time.monotonic(), [result, *result.following]
        changed = [
            entry.request
            for row, entry in enumerate(step.entries)
            if entry.request.finish_reason is None and self._apply(entry, row, results, now)
        ]
        if not all(all(each.finite) for each in results):
            self.blocks.forget_free()  # also those of a request that has left its blocks since the step was launched
        return changed

    def _apply(self, entry: Scheduled, row: int, results: Sequence[StepResult], now: float) -> bool:
        """Give a request its row of the result of each decode step. True if it has a new token or ended."""
        self.scheduler.token_arrived(entry)
        for done, result in enumerate(results[: entry.steps], 1):
            self._apply_one(entry, row, result, now)
            if entry.request.finish_reason is not None:
                self.scheduler.ended_after(entry, done)
                self.end(entry.request)
                return True
        return entry.samples

    def _apply_one(self, entry: Scheduled, row: int, result: StepResult, now: float) -> None:
        request = entry.request
        if result.prompt_scores:
            request.prompt_scores.update(result.prompt_scores[row])
        if not result.finite[row]:
            request.finish("error", error="the model's logits are not finite (NaN or infinity)")
        elif entry.samples and result.possible and not result.possible[row]:
            request.finish("error", error=_every_token_banned(request))
        elif entry.samples:
            if result.scores and (scores := result.scores[row]):
                request.scores.append(scores)
            self._append(request, result.tokens[row], now)

    def _append(self, request: Request, token: int, now: float) -> None:
        """Add a sampled token, and finish the request if the token ends it."""
        request.output_token_ids.append(token)
        self.counters.generated_tokens += 1
        _note_token(request.metrics, now)
        if token in request.end_token_ids and len(request.output_token_ids) > request.params.min_tokens:
            request.finish("stop", token if token in request.params.stop_tokens else None)
        elif len(request.output_token_ids) >= request.max_tokens:
            request.finish("length")
        elif request.guide is not None:
            self._advance_guide(request.guide, request, token)

    def _advance_guide(self, guide: TokenGuide, request: Request, token: int) -> None:
        """An error of the guide ends this request alone."""
        try:
            guide.advance(token)
            if guide.is_finished:
                request.finish("stop")
            else:
                guide.mask()
        except ValueError as error:
            request.finish("error", error=str(error))

    def _fail(self, scheduled: list[Scheduled], error: Exception) -> list[Request]:
        """End the requests of a failed step with its message. The others start over; nothing cached is trusted."""
        failed = [entry.request for entry in scheduled if entry.request.finish_reason is None]
        for request in failed:
            request.finish("error", error=f"{type(error).__name__}: {error}")
            self.end(request)
        self._start_over()
        self.blocks.forget_free()
        return failed

    def _start_over(self) -> None:
        """Drop the step in flight; compute the running requests again from their known tokens."""
        self._in_flight = None
        for request in dict.fromkeys([*self.scheduler.running, *self.scheduler.touched()]):
            if request.status is Status.FINISHED:
                self.end(request)
        self.scheduler.start_over()
        if self.runner.restore_cache():
            self.blocks.forget_free()


def _every_token_banned(request: Request) -> str:
    names = ("allowed_token_ids", "structured_outputs", "bad_words", "min_tokens")
    used = ", ".join(name for name in names if getattr(request.params, name))
    return (
        f"the options {used} must leave a token to choose, but ban every one for token number "
        f"{len(request.output_token_ids) + 1}; loosen one of them"
    )


def _note_token(metrics: RequestMetrics, now: float) -> None:
    metrics.num_generated_tokens += 1
    metrics.first_token_time = metrics.first_token_time or now
    metrics.last_token_time = now
