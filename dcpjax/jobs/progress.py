"""What a job reports: one live line on a terminal or JSON logs while it runs, a table when it ends.

All of it goes to one stream, by default standard error. Errors of that stream are ignored.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from dcpjax.api.progress import CLEAR_LINE
from dcpjax.jobs.statistics import JobStatistics
from dcpjax.jobs.status_file import StatusFile

LINE_SECONDS = 0.5
STATUS_SECONDS = 1.0
LOG_SECONDS = 10.0


class Progress:
    """Shows the statistics of a job, each form at its own interval."""

    def __init__(
        self,
        statistics: JobStatistics,
        *,
        shown: bool = True,
        json_logs: bool = False,
        status_file: StatusFile | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statistics, self._stream = statistics, stream or sys.stderr
        self._json_logs, self._status_file = json_logs, status_file
        self._is_live = shown and not json_logs and self._stream.isatty()
        self._shows_summary = shown and not json_logs
        self._clock, self._next = clock, {"line": 0.0, "status": 0.0, "log": clock() + LOG_SECONDS}

    def update(self) -> None:
        if self._is_live and self._is_due("line", LINE_SECONDS):
            self._write(f"{CLEAR_LINE}{live_line(self.statistics)}")
        if self._status_file and self._is_due("status", STATUS_SECONDS):
            self._status_file.write(self.statistics.as_dict())
        if self._json_logs and self._is_due("log", LOG_SECONDS):
            self._log("progress", self.statistics.as_dict())

    def report_error(self, line: int, code: str, message: str) -> None:
        if self._json_logs:
            self._log("error", {"line": line, "code": code, "message": message})

    def finish(self, output: str) -> None:
        """Report the end, whether the job is done, stopped or failed. A job that never started gets no table."""
        if self._is_live:
            self._write(CLEAR_LINE)
        if self._status_file:
            self._status_file.write(self.statistics.as_dict())
        if self._json_logs:
            self._log(self.statistics.state, {**self.statistics.as_dict(), "output": output})
        if self._shows_summary and self.statistics.started_at is not None:
            self._write(f"{summary_table(self.statistics, output)}\n")

    def _is_due(self, name: str, seconds: float) -> bool:
        now = self._clock()
        if now < self._next[name]:
            return False
        self._next[name] = now + seconds
        return True

    def _log(self, event: str, facts: dict[str, Any]) -> None:
        self._write(f"{json.dumps({'time': round(time.time(), 3), 'event': event, **facts})}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or the stream is closed
            self._stream.write(text)
            self._stream.flush()


def live_line(stats: JobStatistics) -> str:
    total = "" if stats.total is None else f"/{stats.total:,} ({stats.done / max(stats.total, 1):.0%})"
    parts = [
        f"{stats.done:,}{total} lines",
        f"{stats.running:,} running",
        f"{stats.errors:,} {'error' if stats.errors == 1 else 'errors'}",
        f"{stats.per_second(stats.prompt_tokens):,.0f} prompt + {stats.per_second(stats.new_tokens):,.0f} new tokens/s",
        *([f"cache {stats.engine['cache_usage']:.0%}"] if "cache_usage" in stats.engine else []),
        *([] if stats.seconds_left is None else [f"{clock_time(stats.seconds_left)} left"]),
        *([stats.state] if stats.state != "running" else []),
    ]
    return " | ".join(parts)


def summary_table(stats: JobStatistics, output: str) -> str:
    rows = [
        ("state", stats.state),
        ("lines", _lines(stats)),
        ("errors", f"{stats.errors:,}"),
        *(("", error) for error in stats.first_errors),
        ("prompt tokens", f"{stats.prompt_tokens:,}, {stats.cached_tokens:,} of them cached"),
        ("new tokens", f"{stats.new_tokens:,} in {clock_time(stats.seconds)}, {_speed(stats)}"),
        ("output", output),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def clock_time(seconds: float) -> str:
    """`0:07`, `12:30`, `26:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _lines(stats: JobStatistics) -> str:
    total = "" if stats.total is None else f" of {stats.total:,}"
    earlier = f", {stats.resumed:,} by an earlier run" if stats.resumed else ""
    blank = f", {stats.blank:,} blank" if stats.blank else ""
    return f"{stats.done:,}{total} done{earlier}{blank}"


def _speed(stats: JobStatistics) -> str:
    return f"{stats.per_second(stats.new_tokens):,.1f} tokens/s"
