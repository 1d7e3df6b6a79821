"""Records every step of a real run, with the same fields as the steps of a simulation.

Reads the engine's counters between steps and times whole steps.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcpjax.api.outputs import RequestOutput, StreamEvent
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend.completion import RunningPrompt

if TYPE_CHECKING:
    from dcpjax.api.sampling_params import SamplingParams
    from dcpjax.frontend.intake import Prompt
    from dcpjax.llm import LLM


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of the engine."""

    time: float  # when it started, in seconds since the start of the recording
    seconds: float  # how long it took
    running: int
    waiting: int
    used_blocks: int
    prefill_tokens: int
    decode_tokens: int  # tokens that reached the host during the step
    preempted: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All steps of a run, and its results in the order of the prompts."""

    num_blocks: int
    timeline: tuple[RecordedStep, ...]
    outputs: tuple[RequestOutput, ...]


def record(
    llm: "LLM",
    prompts: "Prompt | Sequence[Prompt]",
    sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
) -> Recording:
    """`llm.generate`, recording every step. With `async_scheduling`, a step's tokens arrive during the next one."""
    events = deque[StreamEvent]()
    running = [RunningPrompt(one, events) for one in llm.intake.submissions(prompts, sampling_params)]
    steps: list[RecordedStep] = []
    before, started = llm.stats(), time.monotonic()
    try:
        for prompt in running:
            llm.start(prompt)
        while not all(prompt.output.finished for prompt in running):
            began = time.monotonic()
            llm.advance()
            after = llm.stats()
            steps.append(_recorded_step(before, after, began - started, time.monotonic() - began))
            before = after
    finally:
        llm.abandon(running)
    return Recording(
        num_blocks=before.num_blocks, timeline=tuple(steps), outputs=tuple(prompt.output for prompt in running)
    )


def _recorded_step(before: EngineStats, after: EngineStats, start: float, seconds: float) -> RecordedStep:
    return RecordedStep(
        time=start,
        seconds=seconds,
        running=after.num_running,
        waiting=after.num_waiting,
        used_blocks=after.num_used_blocks,
        prefill_tokens=after.prompt_tokens - before.prompt_tokens,
        decode_tokens=after.generated_tokens - before.generated_tokens,
        preempted=after.preemptions - before.preemptions,
    )
