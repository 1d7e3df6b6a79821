"""Watches a model work, step by step: what a simulation tells of a trace, measured.

Reads the engine's own counters between steps; changes nothing and times nothing but whole steps.
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
    """One step, as it was chosen and while it was waited for."""

    time: float  # when it was chosen, in seconds since the first
    seconds: float
    running: int
    waiting: int
    used_blocks: int
    prefill_tokens: int
    decode_tokens: int  # tokens that came back
    preempted: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All steps of some prompts, and their results."""

    num_blocks: int
    timeline: tuple[RecordedStep, ...]
    outputs: tuple[RequestOutput, ...]


def record(
    llm: "LLM",
    prompts: "Prompt | Sequence[Prompt]",
    sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
) -> Recording:
    """`llm.generate`, keeping every step. With `async_scheduling` a step's tokens come back during the next one."""
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
            steps.append(_between(before, after, began - started, time.monotonic() - began))
            before = after
    finally:
        llm.abandon(running)
    return Recording(
        num_blocks=before.num_blocks, timeline=tuple(steps), outputs=tuple(prompt.output for prompt in running)
    )


def _between(before: EngineStats, after: EngineStats, start: float, seconds: float) -> RecordedStep:
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
