"""The host's work grows with the number of prompts and of completions, not with its square: calls are counted."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcpjax import LLM
from dcpjax.engine.request import Request

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from bench_host import InstantDevice
from bench_many_prompts import (
    abort_completions,
    abort_prompts,
    generate_completions,
    generate_prompts,
    instant_llm,
)

FEW, MANY = 300, 1200


@pytest.fixture
def counted_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a search through a list of requests a Python call for each one that is looked at."""
    monkeypatch.setattr(Request, "__eq__", lambda self, other: self is other)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)


def calls_of(work: Callable[[LLM, int], None], count: int, device: Any = InstantDevice) -> int:
    """Python calls, and elements that generators give, of the work on an `LLM` whose model is a mock device."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with instant_llm(device) as llm:
        sys.setprofile(note)
        try:
            work(llm, count)
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.usefixtures("counted_comparisons")
@pytest.mark.parametrize("work", [generate_prompts, generate_completions, abort_prompts, abort_completions])
def test_four_times_as_many_take_four_times_the_calls(work):
    assert calls_of(work, MANY) < 1.15 * (MANY / FEW) * calls_of(work, FEW)


class BrokenDevice(InstantDevice):
    """Every step fails."""

    def launch(self, step: Any) -> int:
        raise RuntimeError("the device is gone")


def fail_prompts(llm: LLM, count: int) -> None:
    results = llm.generate([[number, 1, 2] for number in range(count)])
    assert all(result.error == "RuntimeError: the device is gone" for result in results)


@pytest.mark.usefixtures("counted_comparisons")
def test_so_does_the_work_of_steps_that_fail():
    assert calls_of(fail_prompts, MANY, BrokenDevice) < 1.15 * (MANY / FEW) * calls_of(fail_prompts, FEW, BrokenDevice)
