"""Ctrl-C and SIGTERM: the first asks the job to stop, the second ends the process at once.

A thread handles the signals, because the main thread may be inside a compilation for minutes. It also ends the process
when the job has not stopped in time. That is safe: the output holds whole records at every moment.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from dcpjax.api.progress import CLEAR_LINE

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SPARE_SECONDS = 1.0  # after the grace period: for the step that runs, and for closing the files


class StopOnSignal:
    """A context manager for the main thread.

    Until a job has called `requested` for the first time, as while a model is loaded, the first signal ends the
    process too.
    """

    def __init__(self, *, advice: str, grace_seconds: float = 0.0, leave: Callable[[int], object] = os._exit) -> None:
        """`advice` says how to resume and is printed with the last word; `leave` ends the process with an exit code.

        Args:
            grace_seconds: how long the job may go on after the first signal. A little later the process ends, even if
                the job or what follows it until the process ends by itself is stuck.
        """
        self.signal: int | None = None
        self._advice, self._grace_seconds, self._leave = advice, grace_seconds, leave
        self._job_listens = self._job_ended = False
        self._end: float | None = None  # when the process must have ended
        self._deciding = threading.Lock()  # whether a signal comes before the end of the job

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells report it."""
        assert self.signal is not None
        return 128 + self.signal

    def requested(self) -> bool:
        """Whether the job must end. From the first call on, the job is trusted to ask again and to stop."""
        self._job_listens = True
        return self.signal is not None

    def __enter__(self) -> "StopOnSignal":
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # as signal.set_wakeup_fd demands
        self._watcher = threading.Thread(target=self._watch, args=(reading,), daemon=True)
        self._watcher.start()
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        with self._deciding:
            self._job_ended = True
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writing)
        if self.signal is None:  # else it watches over the end of the process
            self._watcher.join()

    def _watch(self, reading: int) -> None:
        """Each signal arrives as a byte; the end of the pipe is the end of the context."""
        pipe = select.poll()  # `select.select` takes no descriptors from 1024 on
        pipe.register(reading, select.POLLIN)
        while pipe.poll(self._milliseconds_left()) and (received := os.read(reading, 1)):
            if received[0] in SIGNALS:
                self._handle(received[0])
        os.close(reading)
        if self._end is not None:
            time.sleep((self._milliseconds_left() or 0.0) / 1000)
            self._end_process(self.exit_code)

    def _milliseconds_left(self) -> float | None:
        if self._end is None:
            return None
        return min(max(0.0, 1000 * (self._end - time.monotonic())), 2.0**31 - 1)  # the most that poll takes

    def _handle(self, number: int) -> None:
        with self._deciding:
            if self._job_ended:
                return
            if self.signal is not None or not self._job_listens:
                self._end_process(128 + number)
                return
            self.signal, self._end = number, time.monotonic() + self._grace_seconds + SPARE_SECONDS
        _say(f"stopping: requests that run may finish within {self._grace_seconds:g} s; once more to stop at once")

    def _end_process(self, code: int) -> None:
        if not self._job_ended:  # else the last word has been said
            _say(f"stopped. {self._advice}")
        self._leave(code)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the signal to be reported."""


def _say(text: str) -> None:
    clear = CLEAR_LINE if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{clear}dcpjax: {text}\n".encode())
