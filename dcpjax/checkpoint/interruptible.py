"""Waiting for a long call in such a way that Ctrl-C is heard."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def interruptibly(call: Callable[[], Result]) -> Result:
    """The result of a call outside Python that releases Python's lock.

    It is made in a thread, since the main thread hears nothing inside it. After an interrupt the call runs on to its
    end, and its result is dropped.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result()
    finally:
        pool.shutdown(wait=False)
