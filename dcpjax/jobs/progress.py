"""What a job says while it runs and when it ends: one live line on a terminal, or JSON logs, and a table.

All of it goes to one stream, by default standard error. Whatever becomes of that stream, the job goes on.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from dcpjax.api.progress import CLEAR_LINE
from dcpjax.jobs.status_file import StatusFile
from dcpjax.jobs.tally import Tally

LINE_SECONDS = 0.5
STATUS_SECONDS = 1.0
LOG_SECONDS = 10.0


class Progress:
    """Draws a tally as often as it helps."""

    def __init__(
        self,
        tally: Tally,
        *,
        shown: bool = True,
        json_logs: bool = False,
        status_file: StatusFile | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally, self._stream = tally, stream or sys.stderr
        self._json_logs, self._status_file = json_logs, status_file
        self._is_live = shown and not json_logs and self._stream.isatty()
        self._says_end = shown and not json_logs
        self._clock, self._next = clock, {"line": 0.0, "status": 0.0, "log": clock() + LOG_SECONDS}

    def update(self) -> None:
        if self._is_live and self._is_due("line", LINE_SECONDS):
            self._write(f"{CLEAR_LINE}{live_line(self.tally)}")
        if self._status_file and self._is_due("status", STATUS_SECONDS):
            self._status_file.write(self.tally.as_dict())
        if self._json_logs and self._is_due("log", LOG_SECONDS):
            self._log("progress", self.tally.as_dict())

    def note_error(self, line: int, code: str, message: str) -> None:
        if self._json_logs:
            self._log("error", {"line": line, "code": code, "message": message})

    def finish(self, output: str) -> None:
        """The last word, whether the job is done, stopped or failed; no table of a job that never began."""
        if self._is_live:
            self._write(CLEAR_LINE)
        if self._status_file:
            self._status_file.write(self.tally.as_dict())
        if self._json_logs:
            self._log(self.tally.state, {**self.tally.as_dict(), "output": output})
        if self._says_end and self.tally.started_at is not None:
            self._write(f"{summary_table(self.tally, output)}\n")

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


def live_line(tally: Tally) -> str:
    total = "" if tally.total is None else f"/{tally.total:,} ({tally.done / max(tally.total, 1):.0%})"
    parts = [
        f"{tally.done:,}{total} lines",
        f"{tally.running:,} running",
        f"{tally.errors:,} {'error' if tally.errors == 1 else 'errors'}",
        f"{tally.per_second(tally.prompt_tokens):,.0f} prompt + {tally.per_second(tally.new_tokens):,.0f} new tokens/s",
        *([f"cache {tally.engine['cache_usage']:.0%}"] if "cache_usage" in tally.engine else []),
        *([] if tally.seconds_left is None else [f"{clock_time(tally.seconds_left)} left"]),
        *([tally.state] if tally.state != "running" else []),
    ]
    return " | ".join(parts)


def summary_table(tally: Tally, output: str) -> str:
    rows = [
        ("state", tally.state),
        ("lines", _lines(tally)),
        ("errors", f"{tally.errors:,}"),
        *(("", error) for error in tally.first_errors),
        ("prompt tokens", f"{tally.prompt_tokens:,}, {tally.cached_tokens:,} of them cached"),
        ("new tokens", f"{tally.new_tokens:,} in {clock_time(tally.seconds)}, {_speed(tally)}"),
        ("output", output),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def clock_time(seconds: float) -> str:
    """`0:07`, `12:30`, `26:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _lines(tally: Tally) -> str:
    total = "" if tally.total is None else f" of {tally.total:,}"
    earlier = f", {tally.resumed:,} by an earlier run" if tally.resumed else ""
    blank = f", {tally.blank:,} blank" if tally.blank else ""
    return f"{tally.done:,}{total} done{earlier}{blank}"


def _speed(tally: Tally) -> str:
    return f"{tally.per_second(tally.new_tokens):,.1f} tokens/s"
