"""Requests in, tokens out, many at a time. Works on token ids; knows nothing about text.

`step()` is the whole engine: schedule, run, collect.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

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


class NewToken(NamedTuple):
    """What a step did for one request; `token` is None when it ended without a new one."""

    request: Request
    token: int | None


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

    def step(self) -> list[NewToken]:
        """Advance every scheduled request; return their new tokens and those that ended."""
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
        """After a step that was cut short: requests that still run start over if their cache is gone."""
        if self.runner.restore_cache():
            self.scheduler.preempt_all()

    def _collect(self, scheduled: list[Scheduled], tokens: np.ndarray, finite: np.ndarray) -> list[NewToken]:
        news = []
        for row, entry in enumerate(scheduled):
            if not finite[row]:
                entry.request.finish("error", error="the model's logits are not finite (NaN or infinity)")
                news.append(NewToken(entry.request, None))
            elif entry.samples:
                news.append(NewToken(entry.request, self._append(entry.request, int(tokens[row]))))
        self._release_finished(scheduled)
        return news

    def _append(self, request: Request, token: int) -> int:
        request.output_token_ids.append(token)
        request.metrics.first_token_time = request.metrics.first_token_time or time.monotonic()
        if token in request.end_token_ids and len(request.output_token_ids) > request.params.min_tokens:
            request.finish("stop", token if token in request.params.stop_tokens else None)
        elif len(request.output_token_ids) >= request.max_tokens:
            request.finish("length")
        return token

    def _fail(self, scheduled: list[Scheduled], error: Exception) -> list[NewToken]:
        """The requests of a failed step end with its message; the others go on."""
        for entry in scheduled:
            entry.request.finish("error", error=f"{type(error).__name__}: {error}")
        self._release_finished(scheduled)
        self.recover()
        return [NewToken(entry.request, None) for entry in scheduled]

    def _release_finished(self, scheduled: list[Scheduled]) -> None:
        for entry in scheduled:
            if entry.request.status is Status.FINISHED:
                self.end(entry.request)
