"""Threads on one engine with a model of a few lines: each gets what it would get alone, whatever the others do."""

import gc
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from engine_mock import MockRunner, alone, check_idle, engine, prompts, request

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.engine import Engine
from dcpjax.engine.scheduler import Scheduled
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.shared_engine import SharedEngine
from dcpjax.frontend.submission import Submission
from dcpjax.frontend.text import TextStream

THREADS = 8


def nap(step: Sequence[Scheduled]) -> None:
    """As a device does, let other threads run during a step."""
    time.sleep(0.0002)


class Callers:
    """A shared engine, and calls like those of `LLM`."""

    def __init__(self, **options) -> None:
        self.runner = MockRunner(before_collect=nap)
        self.engine: Engine = engine(self.runner, **options)
        self.shared = SharedEngine(self.engine)
        self._numbers = iter(range(1_000_000))

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Generator[int]:
        params = SamplingParams(max_tokens=max_tokens)
        running = RunningPrompt(Submission(index=0, params=params, prompt_token_ids=list(prompt)), deque())
        running.add(request(next(self._numbers), prompt, max_tokens), TextStream(None, params), str)
        self.shared.start(running.completions)
        try:
            while not (running.output.finished and not running.events):
                if not running.events:
                    self.shared.advance(running.events)
                while running.events:
                    event = running.events.popleft()
                    if event.error:
                        raise FailedError(event.error)
                    yield from event.token_ids
        finally:
            self.shared.abort(running.completions)

    def check_idle(self) -> None:
        assert not self.shared._active
        assert not self.shared._posted
        check_idle(self.engine)


class FailedError(Exception):
    """A result with `finish_reason="error"`."""


def in_threads(work: Callable[[int], object]) -> list[object]:
    """What `work` returns or raises in each of the threads, which begin together."""
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> object:
        barrier.wait()
        try:
            return work(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_blocks", [50, 12])  # the smaller pool preempts
def test_each_thread_gets_what_it_would_get_alone_from_one_running_batch(async_scheduling, num_blocks):
    callers = Callers(async_scheduling=async_scheduling, num_blocks=num_blocks)
    rows: list[int] = []
    callers.runner.before_launch = lambda step: rows.append(len(step))

    def work(number: int) -> object:
        own = prompts(6, seed=number)
        return [list(callers.stream(prompt, 10)) == alone(prompt, 10) for prompt in own]

    assert in_threads(work) == [[True] * 6] * THREADS
    assert max(rows) > 2
    callers.check_idle()


def test_streams_closed_midway_and_exceptions_thrown_into_them_end_nobody_else():
    callers = Callers()

    def work(number: int) -> object:
        dice, right = random.Random(number), True
        for prompt in prompts(8, seed=number):
            stream, expected = callers.stream(prompt, 12), alone(prompt, 12)
            seen = [next(stream) for _ in range(dice.randint(1, 11))]
            ending = dice.choice(["close", "throw", "finish"])
            if ending == "close":
                stream.close()
            elif ending == "throw":
                with pytest.raises(ZeroDivisionError):
                    stream.throw(ZeroDivisionError())
            else:
                seen += stream
            right &= seen == expected[: len(seen)] and (ending != "finish" or len(seen) == 12)
        return right

    assert in_threads(work) == [True] * THREADS
    callers.check_idle()


def test_a_step_that_fails_on_the_device_reaches_each_of_its_callers_once():
    callers, failed = Callers(), []

    def fail(step: Sequence[Scheduled]) -> None:
        if len(step) == THREADS and not failed:
            failed.append(len(step))
            raise RuntimeError("out of memory")

    callers.runner.before_launch = fail
    results = in_threads(lambda number: list(callers.stream([number, 1], 40)))
    assert failed
    assert [str(result) for result in results] == ["RuntimeError: out of memory"] * THREADS
    assert in_threads(lambda number: list(callers.stream([number], 5)) == alone([number], 5)) == [True] * THREADS
    callers.check_idle()


@pytest.mark.parametrize("moment", ["_step", "_launch", "_collect", "_apply"])
@pytest.mark.parametrize("afterwards", [False, True])
def test_an_error_in_the_hosts_part_of_a_step_is_raised_to_one_caller_and_the_others_go_on(
    monkeypatch, moment, afterwards
):
    callers, calls = Callers(), []
    original = getattr(callers.engine, moment)

    def breaks(*given):
        calls.append(moment)
        if len(calls) != 12:
            return original(*given)
        if afterwards:
            original(*given)
        raise Broken

    monkeypatch.setattr(callers.engine, moment, breaks)
    results = in_threads(lambda number: guarded(lambda: list(callers.stream([number, 1], 20))))
    expected = [alone([number, 1], 20) for number in range(THREADS)]
    assert results.count(Broken) == 1
    assert [found == wanted for found, wanted in zip(results, expected, strict=True)].count(True) == THREADS - 1
    callers.check_idle()


class Broken(BaseException):
    """Like KeyboardInterrupt, not an Exception: the engine does not take it for a failed step."""


def guarded(work: Callable[[], object]) -> object:
    try:
        return work()
    except Broken:
        return Broken


def test_an_error_in_one_completions_text_is_its_own(monkeypatch):
    callers = Callers()
    take = TextStream.append

    def append(stream: TextStream, token_id: int) -> str:
        if stream._tokens == 3 and stream is chosen[0]:
            raise LookupError("no such token")
        return take(stream, token_id)

    chosen: list[TextStream] = []
    started = callers.shared.start
    monkeypatch.setattr(TextStream, "append", append)
    monkeypatch.setattr(
        callers.shared,
        "start",
        lambda completions: (chosen.extend(c.stream for c in completions), started(completions)),
    )
    results = in_threads(lambda number: list(callers.stream([number, 1], 20)))
    assert [str(result) for result in results].count("LookupError: no such token") == 1
    assert sum(result == alone([number, 1], 20) for number, result in enumerate(results)) == THREADS - 1
    callers.check_idle()


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_in_a_terminal")
def test_ctrl_c_ends_the_stream_of_the_main_thread_and_no_other():
    callers, results = Callers(num_blocks=400), list[bool]()

    def work(number: int) -> None:
        own = prompts(4, seed=number)
        results.extend(list(callers.stream(prompt, 25)) == alone(prompt, 25) for prompt in own)
        if number == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    for _ in range(5):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS - 1)]
        for thread in threads:
            thread.start()
        with pytest.raises(KeyboardInterrupt):
            exhaust(callers.stream([1, 2, 3], 40) for _ in count())
        for thread in threads:
            thread.join()
    assert results == [True] * 5 * 4 * (THREADS - 1)
    callers.check_idle()


def exhaust(streams: Iterable[Iterable[int]]) -> None:
    for stream in streams:
        list(stream)


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize("moment", ["before_launch", "after_launch", "before_collect"])
def test_a_second_ctrl_c_within_a_step_costs_other_threads_nothing(moment):
    callers, struck, results = Callers(num_blocks=400), [], []

    def strike(step: Sequence[Scheduled]) -> None:
        if begun.is_set() and not struck:
            struck.append(len(step))
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    def work(number: int) -> None:
        stream = callers.stream([number], 40)
        seen = [next(stream)]
        ready.wait()
        ended.wait()
        results.append([*seen, *stream] == alone([number], 40))

    ready, begun, ended = threading.Barrier(THREADS), threading.Event(), threading.Event()
    setattr(callers.runner, moment, strike)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS - 1)]
    for thread in threads:
        thread.start()
    ready.wait()
    begun.set()  # from here on the main thread runs the steps of all
    with pytest.raises(KeyboardInterrupt):
        list(callers.stream([1, 2, 3], 5))
    ended.set()
    for thread in threads:
        thread.join()
    assert struck[0] > 1
    assert results == [True] * (THREADS - 1)
    callers.check_idle()


def test_a_stream_that_garbage_collection_closes_within_a_step_is_aborted_after_it():
    callers = Callers()
    lost = [callers.stream([5, 6], 100)]
    next(lost[0])
    lost.append(lost)  # type: ignore[arg-type]  # a cycle, which only the collector ends

    def collect_garbage(step: Sequence[Scheduled]) -> None:
        callers.runner.after_launch = nap
        gc.collect()

    callers.runner.after_launch = collect_garbage
    del lost
    kept = callers.stream([1, 2, 3], 20)
    assert list(kept) == alone([1, 2, 3], 20)
    callers.check_idle()


def test_a_look_at_the_engine_waits_for_the_end_of_a_step_and_not_for_the_end_of_a_stream():
    callers, looks = Callers(num_blocks=5000), list[EngineStats]()
    stream = callers.stream([1, 2, 3], 15_000)
    next(stream)
    thread = threading.Thread(target=lambda: looks.extend(callers.shared.call(callers.engine.stats) for _ in range(10)))
    thread.start()
    while thread.is_alive():
        next(stream)
    stream.close()
    assert [look.num_running for look in looks] == [1] * 10
    callers.check_idle()


def test_within_its_own_step_a_thread_may_look_and_end_streams_but_not_run_another_step():
    callers, looks = Callers(), []
    other = callers.stream([9], 50)
    next(other)

    def handler(step: Sequence[Scheduled]) -> None:
        looks.append(callers.shared.call(callers.engine.stats))
        other.close()
        with pytest.raises(RuntimeError, match="must not generate inside its own step"):
            list(callers.stream([7], 2))

    callers.runner.after_launch = handler
    assert list(callers.stream([1, 2, 3], 6)) == alone([1, 2, 3], 6)
    assert looks
    callers.check_idle()


def test_an_error_of_what_is_called_between_steps_is_the_callers():
    callers = Callers()
    with pytest.raises(ZeroDivisionError):
        callers.shared.call(lambda: 1 // 0)
    assert list(callers.stream([1], 3)) == alone([1], 3)
