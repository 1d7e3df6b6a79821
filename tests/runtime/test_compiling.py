"""What a step of a new shape compiles, and how the time of it is divided."""

import jax
import pytest
from compiled_steps import run, scheduled
from harness import compilations, golden_runner

from dcpjax.runtime.compiling import COMPILED_OR_READ, READ, CompileTimes


def test_a_prompt_compiles_together_with_the_decodes_that_follow_it() -> None:
    runner = golden_runner("llama3", 1, 1)
    with compilations() as found:
        run(runner, scheduled([20], count=20))
    assert found.count("jit(forward)") == 2
    spent = runner.compile_seconds
    assert spent > 0
    with compilations() as found:
        run(runner, scheduled([20]))
    assert found == []
    assert runner.compile_seconds == spent


def test_a_request_of_one_token_compiles_no_decodes() -> None:
    runner, step = golden_runner("llama3", 1, 1), scheduled([20], count=20)
    step[0].request.max_tokens = 1
    with compilations() as found:
        run(runner, step)
    assert found.count("jit(forward)") == 1


def test_scored_prompts_compile_before_their_step_runs_and_never_again() -> None:
    runner = golden_runner("llama3", 1, 1)
    run(runner, scheduled([20], count=20, prompt_logprobs=2))
    with compilations() as found:
        run(runner, scheduled([24], count=20, prompt_logprobs=2))
        run(runner, scheduled([20]))
    assert found == []


def test_reading_kept_programs_is_told_from_compiling() -> None:
    times = CompileTimes()
    with times.noting():
        jax.monitoring.record_event_duration_secs(COMPILED_OR_READ, 3.0)
        jax.monitoring.record_event_duration_secs(COMPILED_OR_READ, 5.0)
        jax.monitoring.record_event_duration_secs(READ, 2.0)
    jax.monitoring.record_event_duration_secs(READ, 2.0)
    assert times.seconds > 0
    assert times.reading == pytest.approx(times.seconds / 4)
    with times.noting():
        pass
    assert times.reading < times.seconds


def test_a_block_that_fails_is_counted_too() -> None:
    times = CompileTimes()
    with pytest.raises(ZeroDivisionError), times.noting():
        1 / 0  # noqa: B018
    assert times.seconds > 0
