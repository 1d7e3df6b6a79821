"""The one thread that steps the model. It takes commands from a queue, and publishes tokens to the event loop.

event loop     submit   abort                        dispatch: tokens to the queue of each request
                  |       |                             ^
commands          v       v                             | one call of the loop for all tokens of a step
engine thread  obey, step, publish | obey, step, publish | ...
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial as bind

from dcpjax.api.outputs import StreamEvent
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.submission import Submission
from dcpjax.llm import LLM

SNAPSHOT_SECONDS = 0.1  # between two looks at the engine's statistics while it works
log = logging.getLogger("dcpjax.server")

# Is told of every event of a completion, in the engine's thread.
Observer = Callable[[RunningPrompt, StreamEvent], None]


class Running:
    """One request in the engine, as the event loop sees it. Its events arrive in `events`, with the prompt's place."""

    def __init__(self, submissions: Sequence[Submission], *, streamed: bool) -> None:
        """`streamed`: whether every token is reported; otherwise only the ends of completions."""
        self.submissions, self.streamed = submissions, streamed
        self.events = asyncio.Queue[tuple[int, StreamEvent] | None]()  # None: the server ended the request
        self.prompts: list[RunningPrompt] = []  # filled by the engine's thread before the first event
        self.unfinished = sum(submission.params.n for submission in submissions)

    async def next(self) -> list[tuple[int, StreamEvent]] | None:
        """All events that have come since, at least one; None if the server has ended the request."""
        taken = [await self.events.get()]
        while not self.events.empty():
            taken.append(self.events.get_nowait())
        events = [one for one in taken if one is not None]
        self.unfinished -= sum(event.finish_reason is not None for _, event in events)
        return events if len(events) == len(taken) else None


class EngineThread:
    """Steps an `LLM` for requests of one event loop."""

    def __init__(self, llm: LLM, observe: Observer) -> None:
        self._llm, self._observe = llm, observe
        self._commands = queue.SimpleQueue[Callable[[], None] | None]()
        self._published: list[tuple[Running, int, StreamEvent]] = []  # since the last step
        self._running: set[Running] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="dcpjax-engine", daemon=True)
        self.stats: EngineStats = llm.stats()  # the newest snapshot
        self._snapshot_time = 0.0

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def submit(self, running: Running) -> None:
        self._commands.put(bind(self._start, running))

    def abort(self, running: Running) -> None:
        """End what has not finished, before the next step."""
        self._commands.put(bind(self._end, running))

    def stop(self) -> None:
        """End the thread after the step that runs."""
        self._commands.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread. False if it has not come in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._obey():
            try:
                self._llm.advance()
            except Exception:  # other than those of the model, which the engine sees to
                log.exception("a step failed")
                self._end_all()
            self._publish()
        self._end_all()
        self._publish()

    def _obey(self) -> bool:
        """Do what has been asked for since the last step; wait while there is nothing to do. False: stop."""
        while True:
            idle = not self._llm.engine.has_work
            if idle:
                self._publish()
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _start(self, running: Running) -> None:
        """Queue a request in the engine. An error in this is the request's own."""
        running.prompts = [
            RunningPrompt(submission, _Outbox(self, running, place))
            for place, submission in enumerate(running.submissions)
        ]
        self._running.add(running)
        for prompt in running.prompts:
            try:
                self._llm.start(prompt, streamed=running.streamed)
            except Exception as error:
                log.exception("a request could not be started")
                prompt.fail(f"{type(error).__name__}: {error}")

    def _end(self, running: Running) -> None:
        self._running.discard(running)
        self._llm.abandon(running.prompts)

    def _end_all(self) -> None:
        for running in list(self._running):
            self._end(running)

    def take(self, running: Running, place: int, event: StreamEvent) -> None:
        """An event of a completion, in the engine's thread; it is published after the step."""
        prompt = running.prompts[place]
        self._observe(prompt, event)
        if running.streamed or event.finish_reason is not None:
            self._published.append((running, place, event))
        if event.finish_reason is not None and all(prompt.output.finished for prompt in running.prompts):
            self._running.discard(running)

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._snapshot_time > SNAPSHOT_SECONDS or not self._llm.engine.has_work:
            self.stats, self._snapshot_time = self._llm.stats(), now
        if self._published and self._loop is not None:
            events, self._published = self._published, []
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
                self._loop.call_soon_threadsafe(_dispatch, events)


class _Outbox:
    """Where a prompt's events go."""

    def __init__(self, thread: EngineThread, running: Running, place: int) -> None:
        self._thread, self._running, self._place = thread, running, place

    def append(self, event: StreamEvent) -> None:
        self._thread.take(self._running, self._place, event)


def _dispatch(events: Sequence[tuple[Running, int, StreamEvent]]) -> None:
    """In the event loop."""
    for running, place, event in events:
        running.events.put_nowait((place, event))
