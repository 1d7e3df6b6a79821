"""Runs the requests of a batch job on an `LLM` and returns their results as they finish."""

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from dcpjax.api.checks import option_names
from dcpjax.api.outputs import RequestOutput, StreamEvent
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.submission import Submission
from dcpjax.jobs.batch_request import BatchRequest
from dcpjax.jobs.job import BatchEngineProtocol
from dcpjax.llm import LLM
from dcpjax.openai.request import RequestBody


def open_batch_engine(
    model: str | os.PathLike[str], options: Mapping[str, Any], *, progress: bool
) -> tuple[BatchEngineProtocol, Mapping[str, Any]]:
    """Load a model. Returns its engine, and the sampling options in which its checkpoint differs from the defaults."""
    llm = LLM(model, progress=progress, **options)
    own, usual = llm.get_default_sampling_params(), SamplingParams()
    names = option_names(SamplingParams)
    asked = {name: getattr(own, name) for name in names if getattr(own, name) != getattr(usual, name)}
    return BatchEngine(llm), asked


class BatchEngine:
    """One model, any number of requests at a time. The caller chooses the keys."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._running: dict[int, RunningPrompt] = {}
        self._events = deque[StreamEvent]()

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, key: int, request: BatchRequest) -> None:
        """Queue a request. Raises ValueError for one that cannot be run."""
        submission = self._submission(key, request.body)
        if submission.error is None:
            self._check_max_tokens(submission)
        prompt = RunningPrompt(submission, self._events)
        self._llm.start(prompt, streamed=False)
        if prompt.output.error:  # refused by the intake or by the engine
            raise ValueError(prompt.output.error)
        self._running[key] = prompt

    def advance(self) -> list[tuple[int, RequestOutput]]:
        """Run one step; the requests that it finished."""
        self._llm.advance()
        keys = {event.prompt_index for event in self._events} & self._running.keys()
        self._events.clear()
        finished = sorted(key for key in keys if self._running[key].output.finished)
        return [(key, self._running.pop(key).output) for key in finished]

    def drop_waiting(self) -> list[int]:
        """Drop the requests of which a completion has not begun; their keys."""
        waiting = [key for key, prompt in self._running.items() if not prompt.has_begun]
        self._llm.abandon([self._running.pop(key) for key in waiting])
        return waiting

    def abort(self) -> None:
        """Drop everything that has not finished."""
        self._llm.abandon(list(self._running.values()))
        self._running.clear()
        self._events.clear()

    def stats(self) -> Mapping[str, float]:
        stats = self._llm.stats()
        return {
            "cache_usage": stats.cache_usage,
            "prefix_hit_rate": stats.prefix_hit_rate,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "preemptions": stats.preemptions,
        }

    def _check_max_tokens(self, submission: Submission) -> None:
        """Refuse a line that asks for more tokens than fit, where `LLM.generate` would generate fewer."""
        prompt_tokens = len(submission.prompt_token_ids)
        asked, room = submission.params.max_tokens, self._llm.max_model_len - prompt_tokens
        if asked is not None and asked > room:
            raise ValueError(
                f"max_tokens must be at most {room} (max_model_len={self._llm.max_model_len} less "
                f"{prompt_tokens} of the prompt), but is {asked}; use {room}"
            )

    def _submission(self, key: int, request: RequestBody) -> Submission:
        intake, sampling = self._llm.intake, request.sampling
        intake.check_priority(request.priority)
        if request.messages is None:
            return intake.submission(key, request.prompt, sampling, request.priority, request.cache_salt)
        return intake.chat_submission(
            key,
            request.messages,
            sampling,
            request.priority,
            request.cache_salt,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
