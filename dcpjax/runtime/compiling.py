"""Compiling programs several at a time, and how long that took: compiling, or reading what an earlier process kept."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

# JAX's events: a program was compiled or read; it was read from the compilation cache, which is part of the former
COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
READ = "/jax/compilation_cache/cache_retrieval_time_sec"


@dataclass
class CompileTimes:
    """Seconds that steps waited for their programs."""

    seconds: float = 0.0
    reading: float = 0.0  # of these, for programs that an earlier process compiled

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Add the time of a `with` block, tracing included. Threads overlap, so their events only divide it."""
        events = Counter[str]()

        def note(event: str, duration_secs: float, **_: str | int) -> None:
            events[event] += duration_secs  # type: ignore[assignment]

        started = time.monotonic()
        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(note)
            spent, programs = time.monotonic() - started, events[COMPILED_OR_READ]
            self.seconds += spent
            self.reading += spent * min(1.0, events[READ] / programs) if programs else 0.0


def run_all(jobs: Iterable[Callable[[], Any]], threads: int | None = None) -> None:
    """Run all jobs, in as many threads as there are cores: XLA compiles outside Python's lock.

    When one fails or the user interrupts, those not yet begun are dropped.
    """
    pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="compile")
    try:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
