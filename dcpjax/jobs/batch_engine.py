"""Runs the requests of a batch job on an `LLM` and returns their results as they finish."""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dcpjax.api.outputs import RequestOutput, StreamEvent
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.jobs.batch_request import BatchRequest
from dcpjax.jobs.job import BatchEngineProtocol
from dcpjax.jobs.options import BatchOptions
from dcpjax.llm import LLM
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.submissions import own_defaults, submissions


def open_batch_engine(
    model: str | os.PathLike[str],
    options: Mapping[str, Any],
    job: BatchOptions,
    *,
    progress: bool,
) -> tuple[BatchEngineProtocol, Mapping[str, Any]]:
    """Load a model. Returns its engine, and the sampling options in which its checkpoint differs from the defaults.

    `options` are those of `EngineConfig`.
    """
    llm = LLM(model, progress=progress, **options)
    names = {"tool_call_parser": job.tool_call_parser, "reasoning_parser": job.reasoning_parser}
    return BatchEngine(llm, MessageFormats.of(llm.tokenizer, **names)), own_defaults(llm)


class BatchEngine:
    """One model, any number of requests at a time. The caller chooses the keys."""

    def __init__(self, llm: LLM, formats: MessageFormats) -> None:
        self._llm, self.formats = llm, formats
        self._running: dict[int, list[RunningPrompt]] = {}  # the prompts of each request
        self._events = deque[StreamEvent]()

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, key: int, request: BatchRequest) -> None:
        """Queue a request. Raises ValueError for one of which a prompt cannot be run."""
        prompts = [
            RunningPrompt(made, self._events) for made in submissions(self._llm, key, request.body, self.formats)
        ]
        for prompt in prompts:
            self._llm.start(prompt, streamed=False)
        refused = next((prompt.output.error for prompt in prompts if prompt.output.error), None)  # by the engine
        if refused is not None:
            self._llm.abandon(prompts)
            raise ValueError(refused)
        self._running[key] = prompts

    def advance(self) -> list[tuple[int, Sequence[RequestOutput]]]:
        """Run one step; the requests that it finished."""
        self._llm.advance()
        keys = {event.prompt_index for event in self._events} & self._running.keys()
        self._events.clear()
        finished = sorted(key for key in keys if all(prompt.output.finished for prompt in self._running[key]))
        return [(key, [prompt.output for prompt in self._running.pop(key)]) for key in finished]

    def drop_waiting(self) -> list[int]:
        """Drop the requests of which a completion has not begun; their keys."""
        waiting = [key for key, prompts in self._running.items() if not all(prompt.has_begun for prompt in prompts)]
        self._llm.abandon([prompt for key in waiting for prompt in self._running.pop(key)])
        return waiting

    def abort(self) -> None:
        """Drop everything that has not finished."""
        self._llm.abandon([prompt for prompts in self._running.values() for prompt in prompts])
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
