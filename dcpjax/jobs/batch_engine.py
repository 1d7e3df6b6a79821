"""Runs the requests of a batch job on an `LLM` and returns their results as they finish."""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dcpjax.api.checks import option_names
from dcpjax.api.outputs import RequestOutput, StreamEvent
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.submission import Submission
from dcpjax.jobs.batch_request import BatchRequest
from dcpjax.jobs.job import BatchEngineProtocol
from dcpjax.jobs.options import BatchOptions
from dcpjax.llm import LLM
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody


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
    own, usual = llm.get_default_sampling_params(), SamplingParams()
    names = option_names(SamplingParams)
    asked = {name: getattr(own, name) for name in names if getattr(own, name) != getattr(usual, name)}
    names = {"tool_call_parser": job.tool_call_parser, "reasoning_parser": job.reasoning_parser}
    formats = MessageFormats.of(llm.tokenizer, **names)
    return BatchEngine(llm, formats), asked


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
        submissions = self._submissions(key, request.body)
        for place, submission in enumerate(submissions):
            if submission.error is not None:
                where = f"prompt {place}: " if len(submissions) > 1 else ""
                raise ValueError(f"{where}{submission.error}")
            self._check_max_tokens(submission)
        prompts = [RunningPrompt(submission, self._events) for submission in submissions]
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

    def _check_max_tokens(self, submission: Submission) -> None:
        """Refuse a line that asks for more tokens than fit, where `LLM.generate` would generate fewer."""
        prompt_tokens = len(submission.prompt_token_ids)
        asked, room = submission.params.max_tokens, self._llm.max_model_len - prompt_tokens
        if asked is not None and asked > room:
            raise ValueError(
                f"max_tokens must be at most {room} (max_model_len={self._llm.max_model_len} less "
                f"{prompt_tokens} of the prompt), but is {asked}; use {room}"
            )

    def _submissions(self, key: int, request: RequestBody) -> list[Submission]:
        intake, sampling = self._llm.intake, request.sampling
        intake.check_priority(request.priority)
        if request.messages is None:
            return [
                self._echoed(request, intake.submission(key, prompt, sampling, request.priority, request.cache_salt))
                for prompt in request.prompts
            ]
        chat = intake.chat_submission(
            key,
            request.messages,
            sampling,
            request.priority,
            request.cache_salt,
            self.formats.shown_tokens(request),
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        return [chat]

    def _echoed(self, request: RequestBody, submission: Submission) -> Submission:
        """Gives token ids the text that the response repeats."""
        if not request.echo or submission.prompt is not None or submission.error is not None:
            return submission
        if self._llm.tokenizer is None:
            raise ValueError("echo needs a tokenizer, but the model has none; leave it out")
        text = self._llm.tokenizer.decode(submission.prompt_token_ids, skip_special_tokens=False)
        return replace(submission, prompt=text)
