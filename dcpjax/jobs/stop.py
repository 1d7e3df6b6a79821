"""Ctrl-C and SIGTERM: the first asks the job to stop, the second ends the process at once.

A thread handles the signals, because the main thread may be inside a compilation for minutes. Ending the process there
is safe: the output holds whole records at every moment.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from dcpjax.api.progress import CLEAR_LINE

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """A context manager for the main thread.

    Until a job has called `requested` for the first time, as while a model is loaded, the first signal ends the
    process too.
    """

    def __init__(self, *, advice: str, leave: Callable[[int], object] = os._exit) -> None:
        """`advice` says how to resume and is printed with the last word; `leave` ends the process with an exit code."""
        self.signal: int | None = None
        self._advice, self._leave = advice, leave
        self._job_listens = False

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
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writing)
        self._watcher.join()

    def _watch(self, reading: int) -> None:
        """Each signal arrives as a byte; the end of the pipe is the end of the context."""
        while received := os.read(reading, 1):
            if received[0] in SIGNALS:
                self._handle(received[0])
        os.close(reading)

    def _handle(self, number: int) -> None:
        if self.signal is not None or not self._job_listens:
            _say(f"stopped. {self._advice}")
            self._leave(128 + number)
        else:
            self.signal = number
            _say("stopping: requests that run may finish; once more to stop at once")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the signal to be reported."""


def _say(text: str) -> None:
    clear = CLEAR_LINE if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{clear}dcpjax: {text}\n".encode())
