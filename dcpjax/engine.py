"""Requests in, tokens out, many at a time. Works on token ids; knows nothing about text.

`step()` is the whole engine: schedule, run, collect.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dcpjax.blocks import BlockManager
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.request import Request, Status
from dcpjax.scheduler import Scheduled, Scheduler


class StepRunner(Protocol):
    """What the engine needs of a model: the real one is `Runner`; tests use one of ten lines."""

    @property
    def geometry(self) -> CacheGeometry: ...

    def run(self, step: Sequence[Scheduled]) -> tuple[np.ndarray, np.ndarray]: ...

    def restore_cache(self) -> bool: ...


class Engine:
    """Continuous batching over one model."""

    def __init__(self, runner: StepRunner, *, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.runner = runner
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(self.blocks, runner.geometry, max_num_seqs, max_num_batched_tokens)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit the cache."""
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Advance every scheduled request; return those that have a new token or ended."""
        scheduled = self.scheduler.schedule()
        assert scheduled, "work is waiting, but nothing could be scheduled"
        now = time.monotonic()
        for entry in scheduled:
            entry.request.metrics.first_scheduled_time = entry.request.metrics.first_scheduled_time or now
        try:
            tokens, finite = self.runner.run(scheduled)
        except Exception as error:
            return self._fail(scheduled, error)
        self.scheduler.update(scheduled)
        return self._collect(scheduled, tokens, finite)

    def end(self, request: Request) -> None:
        """Free a request's blocks, whether it finished or is given up."""
        if request.status is not Status.FINISHED:
            request.finish("abort")
        request.metrics.finished_time = request.metrics.finished_time or time.monotonic()
        self.scheduler.release(request)

    def recover(self) -> None:
        """After a step that was cut short: let go of what it finished; start over what lost its cache."""
        for request in [request for request in self.scheduler.running if request.status is Status.FINISHED]:
            self.end(request)
        if self.runner.restore_cache():
            self.scheduler.preempt_all()

    def _collect(self, scheduled: list[Scheduled], tokens: np.ndarray, finite: np.ndarray) -> list[Request]:
        changed = []
        for row, entry in enumerate(scheduled):
            if not finite[row]:
                entry.request.finish("error", error="the model's logits are not finite (NaN or infinity)")
            elif entry.samples:
                self._append(entry.request, int(tokens[row]))
            if entry.samples or not finite[row]:
                changed.append(entry.request)
        self._release_finished(scheduled)
        return changed

    def _append(self, request: Request, token: int) -> None:
        request.output_token_ids.append(token)
        request.metrics.first_token_time = request.metrics.first_token_time or time.monotonic()
        if token in request.end_token_ids and len(request.output_token_ids) > request.params.min_tokens:
            request.finish("stop", token if token in request.params.stop_tokens else None)
        elif len(request.output_token_ids) >= request.max_tokens:
            request.finish("length")

    def _fail(self, scheduled: list[Scheduled], error: Exception) -> list[Request]:
        """The requests of a failed step end with its message; the others go on."""
        for entry in scheduled:
            entry.request.finish("error", error=f"{type(error).__name__}: {error}")
        self.recover()
        return [entry.request for entry in scheduled]

    def _release_finished(self, scheduled: list[Scheduled]) -> None:
        for entry in scheduled:
            if entry.request.status is Status.FINISHED:
                self.end(entry.request)
