"""The library's face: prompts in, text out. Joins tokenizer, engine and text; holds no arrays of its own."""

import os
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from dcpjax.api.checks import check_option_names
from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import RequestOutput, StreamEvent
from dcpjax.api.progress import bar
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.engine.engine import Engine
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend.completion import Completion, Job
from dcpjax.frontend.intake import Intake, Message, Prompt
from dcpjax.notebook_view import describe
from dcpjax.runtime.interrupts import held_interrupts
from dcpjax.runtime.runner import Runner
from dcpjax.runtime.warmup import warm_up


class LLM:
    """A model ready to generate.

    Args:
        model: a folder in Hugging Face form, a .gguf file, a known alias such as "smollm2-135m", or a hub id.
        progress: show progress bars on a terminal.
        options: see `EngineConfig`.

    Raises:
        ValueError: an unknown option, an illegal layout or a model that cannot be read, before weights are read.
    """

    def __init__(self, model: str | os.PathLike[str], *, progress: bool = True, **options: Any) -> None:
        self.engine_config = EngineConfig.from_options(options)
        self.files: ModelFiles = open_model(model)
        self.tokenizer: Tokenizer | None = self.files.tokenizer()
        self.progress = progress
        self.runner = Runner(self.files, self.engine_config, progress=progress)
        warm_up(self.runner, self.engine_config.warmup)
        config, sizes = self.runner.config, self.runner.sizes
        self.engine = Engine(
            self.runner,
            num_blocks=sizes.num_blocks,
            limits=sizes.limits,
            async_scheduling=self.engine_config.async_scheduling,
        )
        self.intake = Intake(
            self.files,
            self.engine_config,
            self.tokenizer,
            vocab_size=config.vocab_size,
            max_model_len=sizes.max_model_len,
        )
        self._active: dict[int, Completion] = {}

    def __repr__(self) -> str:
        layout, sizes = self.runner.layout, self.runner.sizes
        return (
            f"LLM({str(self.files.path)!r}, tp={layout.tp} x dcp={layout.dcp}, {self.runner.dtype}, "
            f"cache {sizes.num_blocks * self.runner.geometry.block_size} tokens)"
        )

    def _repr_html_(self) -> str:
        return describe(self)

    @property
    def max_model_len(self) -> int:
        return self.runner.sizes.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for, on top of the defaults."""
        return self.intake.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prompt. False, and nothing happens, while requests run."""
        return self.engine.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """What runs now, what the cache holds and what has been done."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; one result each, in the order given.

        A prompt is a string, a list of token ids, or {"prompt": str} or {"prompt_token_ids": list[int]}, with a
        "cache_salt" beside it if its cache must not be shared with others. One that cannot be run gives a result
        whose completions have `finish_reason="error"`; the others are not disturbed.

        Args:
            priority: one for all or one for each; lower runs earlier, with scheduling_policy="priority".

        Raises:
            ValueError: `sampling_params` or `priority` is a list of another length than `prompts`.
        """
        return self._collect(self.intake.jobs(prompts, sampling_params, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the checkpoint's own chat template.

        `chat_template_kwargs` are the template's own switches, such as {"enable_thinking": False}.
        """
        jobs = self.intake.chat_jobs(
            messages,
            sampling_params,
            priority,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._collect(jobs, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamEvent]:
        """Yield text as it becomes certain. Closing the generator ends its requests and frees their blocks."""
        return self._run(self.intake.jobs(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[StreamEvent]:
        """`chat`, as a stream."""
        return self._run(self.intake.chat_jobs(messages, sampling_params, tools=tools))

    def _collect(self, jobs: list[Job], use_tqdm: bool) -> list[RequestOutput]:
        shown = use_tqdm and self.progress
        for job in jobs:
            job.streamed = False
        with bar(description="generating", total=len(jobs), shown=shown) as meter:
            tokens, started = 0, time.monotonic()
            for event in self._run(jobs):
                tokens += len(event.token_ids)
                if event.finish_reason:
                    meter.set_postfix_str(f"{tokens / (time.monotonic() - started):.1f} tokens/s", refresh=False)
                    meter.update(sum(job.output.finished for job in jobs) - meter.n)
        return [job.output for job in jobs]

    def _run(self, jobs: list[Job]) -> Generator[StreamEvent]:
        """Drive the engine until these jobs are done; others' tokens go to their own queues."""
        events, unfinished = deque[StreamEvent](), set(range(len(jobs)))
        try:
            for job in jobs:
                job.events = events
                self.start(job)
            while events or unfinished:
                while events:
                    event = events.popleft()
                    if jobs[event.prompt_index].output.finished:
                        unfinished.discard(event.prompt_index)
                    yield event
                if unfinished:
                    self.advance()
        finally:
            self.abandon(jobs)

    def advance(self) -> None:
        """Run one step; jobs get their new tokens as events."""
        with held_interrupts():
            for request in self.engine.step():
                if request.number in self._active:
                    self._deliver(self._active[request.number])

    def _deliver(self, completion: Completion) -> None:
        if completion.take_tokens():
            self.engine.end(completion.request)
        if completion.output.finish_reason:
            del self._active[completion.request.number]

    def start(self, job: Job) -> None:
        """Queue a job; `advance` brings it to its end."""
        if job.error is not None:
            job.fail(job.error)
            return
        self.intake.start(job)
        for completion in job.completions:
            try:
                self.engine.add(completion.request)
            except ValueError as error:
                completion.fail(str(error))
            else:
                self._active[completion.request.number] = completion

    def abandon(self, jobs: list[Job]) -> None:
        """Free what unfinished jobs hold; after an interrupted step, see to the cache."""
        numbers = {completion.request.number for job in jobs for completion in job.completions}
        left = [self._active.pop(number) for number in numbers & self._active.keys()]
        for completion in left:
            self.engine.end(completion.request)
            completion.abort()
        if left:
            self.engine.recover()
            for completion in list(self._active.values()):  # what an interrupted step did for others
                self._deliver(completion)


def generate(
    model: str | os.PathLike[str], prompts: Prompt | Sequence[Prompt], *, progress: bool = True, **options: Any
) -> list[RequestOutput]:
    """Load a model, complete the prompts and return one result each.

    `options` are those of `EngineConfig` and of `SamplingParams` (`seed` is both); an unknown one is refused by
    name. What is not given is the checkpoint's own.
    """
    engine_names = [field.name for field in fields(EngineConfig)]
    sampling_names = [field.name for field in fields(SamplingParams)]
    check_option_names(options, [*engine_names, *sampling_names])
    sampling = {name: value for name, value in options.items() if name in sampling_names}
    SamplingParams(**sampling)  # refuses what is wrong before the model is loaded
    llm = LLM(model, progress=progress, **{name: value for name, value in options.items() if name in engine_names})
    return llm.generate(prompts, replace(llm.get_default_sampling_params(), **sampling))
