"""Ctrl-C and SIGTERM: the first asks the job to stop, the second ends the process at once.

A thread takes the signals, because the main thread may be inside a compilation for minutes. The output needs no
care for that: it holds whole records at every moment.
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


class Stop:
    """Use as a context, in the main thread.

    Before a job has `asked` for the first time, while a model is loaded, the first signal ends the process too.
    """

    def __init__(self, *, advice: str, leave: Callable[[int], object] = os._exit) -> None:
        """`advice` tells how to go on later; `leave` gets the exit code."""
        self.signal: int | None = None
        self._advice, self._leave = advice, leave
        self._job_asks = False

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells have it."""
        assert self.signal is not None
        return 128 + self.signal

    def asked(self) -> bool:
        """Whether the job must end. One that calls this is trusted to do so."""
        self._job_asks = True
        return self.signal is not None

    def __enter__(self) -> "Stop":
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # the interpreter asks for that
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
                self._take(received[0])
        os.close(reading)

    def _take(self, number: int) -> None:
        if self.signal is not None or not self._job_asks:
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
