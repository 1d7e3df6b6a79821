"""One engine for callers in any number of threads, whose requests run in one batch.

It has no thread of its own. Of the callers who wait for tokens one leads: it runs a step for all of them and hands the
tokens out. The others sleep until that step has ended; then each has tokens, or one of them leads the next step.

What has to happen between two steps is posted: adding a request, aborting one, looking at the engine. It is done at
once if nobody leads, otherwise by the leader when its step has ended. So nobody waits in order to submit or to abort,
and a stream may be closed at any moment, even by the garbage collector in the middle of a step.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial as bind
from typing import Any, TypeVar

from dcpjax.engine.engine import Engine
from dcpjax.frontend.completion import Completion
from dcpjax.runtime.interrupts import held_interrupts

Result = TypeVar("Result")


class SharedEngine:
    """Adds completions to an engine and brings them their tokens. One thread at a time touches the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._active: dict[int, Completion] = {}  # by the number of its request
        self._whole = True  # False after a step that was interrupted
        self._posted = deque[Callable[[], None]]()
        self._leader: int | None = None  # the thread that touches the engine now
        self._turn = threading.Condition()  # guards `_leader`; notified when a leader is done

    def start(self, completions: Iterable[Completion]) -> None:
        """Queue completions. One that can never fit the cache fails."""
        self._post([bind(self._add, completion) for completion in completions])

    def abort(self, completions: Iterable[Completion]) -> None:
        """End completions that have not finished, and free what they hold."""
        self._post([bind(self._abort, each) for each in completions if each.output.finish_reason is None])

    def call(self, function: Callable[[], Result]) -> Result:
        """The function's result; called between two steps, or at once in a signal handler of the thread that steps."""
        if self._leader == threading.get_ident():  # in a signal handler that interrupts this thread's own step
            return function()
        future = Future[Result]()
        self._post([bind(_resolve, future, function)])
        return future.result()

    def advance(self, events: Collection[Any] = ()) -> None:
        """Run a step, or wait for the end of the step that another thread runs.

        Does nothing if there are `events`, for which the caller would wait, or if the engine has no work.
        """
        if self._leader == threading.get_ident():
            raise RuntimeError("an LLM must not generate inside its own step, as in a signal handler; use a thread")
        with held_interrupts():
            try:
                if self._takes_lead(events):
                    self._recover()
                    self._step()
            finally:
                self._hand_over()

    def _takes_lead(self, events: Collection[Any]) -> bool:
        """Become the leader, unless another thread is; then wait until it is done."""
        with self._turn:
            if not events and self._leader is not None:
                self._turn.wait()
            if events or self._leader is not None:
                return False
            self._leader = threading.get_ident()
            return True

    def _hand_over(self) -> None:
        """Do what is posted, then let another thread lead. Does nothing unless this thread leads."""
        with self._turn:
            if self._leader != threading.get_ident():
                return
            try:
                self._recover()
                while self._posted:
                    self._posted[0]()
                    self._posted.popleft()  # only now: the next leader does again what was interrupted
            finally:
                self._leader = None
                self._turn.notify_all()

    def _post(self, actions: list[Callable[[], None]]) -> None:
        self._posted.extend(actions)
        with held_interrupts():
            with self._turn:
                if self._leader is not None:  # it will find them
                    return
                self._leader = threading.get_ident()
            self._hand_over()

    def _step(self) -> None:
        if not self._engine.has_work:
            return
        self._whole = False
        for request in self._engine.step():
            if request.number in self._active:
                self._deliver(self._active[request.number])
        self._whole = True

    def _recover(self) -> None:
        """See to the cache after an interrupted step, and hand out what it did before."""
        if self._whole:
            return
        self._engine.recover()
        for completion in list(self._active.values()):
            self._deliver(completion)
        self._whole = True

    def _add(self, completion: Completion) -> None:
        number = completion.request.number
        if number in self._active:
            return
        try:
            self._engine.add(completion.request)
        except ValueError as error:
            completion.fail(str(error))
        else:
            self._active[number] = completion

    def _abort(self, completion: Completion) -> None:
        if completion.request.number not in self._active:
            return
        self._engine.end(completion.request)
        if completion.output.finish_reason is None:
            try:
                completion.abort()
            except Exception as error:
                completion.fail(f"{type(error).__name__}: {error}")
        del self._active[completion.request.number]  # last: what was interrupted is done again

    def _deliver(self, completion: Completion) -> None:
        """Turn new tokens into events. An error in this is the completion's own."""
        output, request = completion.output, completion.request
        if output.finish_reason is None:  # else an interrupt came after its end was recorded
            try:
                completion.take_tokens()
            except Exception as error:
                completion.fail(f"{type(error).__name__}: {error}")
        if output.finish_reason is None:
            return
        if request.finish_reason is None:  # a stop string in the text, which the engine does not see
            self._engine.end(request, output.finish_reason, output.stop_reason)
        del self._active[request.number]


def _resolve(future: Future[Result], function: Callable[[], Result]) -> None:
    if future.done():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
