import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from dcpjax.runtime.interrupts import held_interrupts


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """A shell starts what it runs in the background without interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(times: int, then: Callable[[], object]) -> None:
    """Ctrl-C within the body, then something else in it."""
    with held_interrupts():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        then()


def test_an_interrupt_waits_for_the_end_of_the_body():
    done = []
    with pytest.raises(KeyboardInterrupt):
        press(1, then=lambda: done.append("the rest"))
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt):
        press(2, then=lambda: done.append("the rest"))
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_body_comes_first():
    with pytest.raises(ZeroDivisionError):
        press(1, then=lambda: 1 / 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens_and_others_handlers_stay():
    def handler(number, frame):
        heard.append(number)

    heard, usual = [], signal.signal(signal.SIGINT, lambda *_: None)
    try:
        signal.signal(signal.SIGINT, handler)
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert heard == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, usual)
    with held_interrupts():
        pass


def test_another_thread_is_left_alone():
    def body():
        with held_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
