"""What a step of a new shape compiles, and how the time of it is divided."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from compiled_steps import run, scheduled
from harness import GOLDENS, compilations, golden_runner

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


STARTED = """
import sys, jax
from collections import Counter
from dcpjax import LLM, SamplingParams
from dcpjax.runtime.compiling import COMPILED_OR_READ, READ

events = Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: events.update([event]))
options = {"block_size": 16, "kv_cache_memory_bytes": 2**20, "hf_overrides": {"num_hidden_layers": 1}}
llm = LLM(sys.argv[1], progress=False, compilation_cache=sys.argv[2], load_format="dummy", **options)
llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3))
print(events[COMPILED_OR_READ], events[READ])
"""


def test_a_second_start_reads_every_program_and_compiles_none(tmp_path: Path) -> None:
    """Small programs too: each takes longer to compile than to read."""

    def start() -> list[int]:
        command = [sys.executable, "-c", STARTED, str(GOLDENS / "llama3"), str(tmp_path)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert outcome.returncode == 0, outcome.stderr
        return list(map(int, outcome.stdout.split()))

    first, second = start(), start()
    assert first[0] > 4
    assert second == [first[0], first[0]]
