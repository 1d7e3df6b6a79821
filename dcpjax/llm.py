"""`LLM`: prompts in, text out. Joins a model on its mesh, the engine and the frontend."""

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
from dcpjax.frontend.completion import Completion, RunningPrompt
from dcpjax.frontend.intake import Intake, Message, Prompt
from dcpjax.frontend.submission import Submission
from dcpjax.notebook_view import describe
from dcpjax.runtime.interrupts import held_interrupts
from dcpjax.runtime.runner import load_runner
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
        self.runner = load_runner(self.files, self.engine_config, progress=progress)
        sizes = self.runner.sizes
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
            vocab_size=self.runner.model.config.vocab_size,
            max_model_len=sizes.max_model_len,
        )
        self.runner.restrict(self.intake.known)
        warm_up(self.runner, self.engine_config.warmup)
        self._active: dict[int, Completion] = {}  # by the number of its request

    def __repr__(self) -> str:
        model, tokens = self.runner.model, self.runner.sizes.num_blocks * self.runner.geometry.block_size
        layout = f"tp={model.layout.tp} x dcp={model.layout.dcp}"
        return f"LLM({str(self.files.path)!r}, {layout}, {model.dtype}, cache {tokens} tokens)"

    def _repr_html_(self) -> str:
        return describe(self.files.path, self.runner)

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
        return self._collect(self.intake.submissions(prompts, sampling_params, priority), use_tqdm)

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
        submissions = self.intake.chat_submissions(
            messages,
            sampling_params,
            priority,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._collect(submissions, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamEvent]:
        """Yield text as it becomes certain. Closing the generator ends its requests and frees their blocks."""
        return self._stream(self.intake.submissions(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[StreamEvent]:
        """`chat`, as a stream."""
        return self._stream(self.intake.chat_submissions(messages, sampling_params, tools=tools))

    def _collect(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        events = deque[StreamEvent]()
        prompts = [RunningPrompt(submission, events) for submission in submissions]
        shown = use_tqdm and self.progress
        with bar(description="generating", total=len(prompts), shown=shown) as meter:
            tokens, started = 0, time.monotonic()
            for event in self._run(prompts, events, streamed=False):
                tokens += len(event.token_ids)
                if event.finish_reason:
                    meter.set_postfix_str(f"{tokens / (time.monotonic() - started):.1f} tokens/s", refresh=False)
                    meter.update(sum(prompt.output.finished for prompt in prompts) - meter.n)
        return [prompt.output for prompt in prompts]

    def _stream(self, submissions: list[Submission]) -> Generator[StreamEvent]:
        events = deque[StreamEvent]()
        return self._run([RunningPrompt(submission, events) for submission in submissions], events, streamed=True)

    def _run(
        self, prompts: list[RunningPrompt], events: deque[StreamEvent], *, streamed: bool
    ) -> Generator[StreamEvent]:
        """Drive the engine until these prompts are done. The tokens of others go to their own events."""
        unfinished = set(range(len(prompts)))
        try:
            for prompt in prompts:
                self.start(prompt, streamed=streamed)
            while events or unfinished:
                while events:
                    event = events.popleft()
                    if prompts[event.prompt_index].output.finished:
                        unfinished.discard(event.prompt_index)
                    yield event
                if unfinished:
                    self.advance()
        finally:
            self.abandon(prompts)

    def start(self, prompt: RunningPrompt, *, streamed: bool = True) -> None:
        """Queue a prompt; `advance` brings it to its end.

        Args:
            streamed: whether the caller waits for each token, so that other prompts must not hold it up for long.
        """
        if prompt.submission.error is not None:
            prompt.fail(prompt.submission.error)
            return
        self.intake.start(prompt, streamed=streamed)
        for completion in prompt.completions:
            try:
                self.engine.add(completion.request)
            except ValueError as error:
                completion.fail(str(error))
            else:
                self._active[completion.request.number] = completion

    def advance(self) -> None:
        """Run one step; prompts get their new tokens as events."""
        with held_interrupts():
            for request in self.engine.step():
                if request.number in self._active:
                    self._deliver(self._active[request.number])

    def _deliver(self, completion: Completion) -> None:
        completion.take_tokens()
        output, request = completion.output, completion.request
        if output.finish_reason is None:
            return
        if request.finish_reason is None:  # a stop string in the text, which the engine does not see
            self.engine.end(request, output.finish_reason, output.stop_reason)
        del self._active[request.number]

    def abandon(self, prompts: list[RunningPrompt]) -> None:
        """Free what unfinished prompts hold; after an interrupted step, see to the cache."""
        numbers = {completion.request.number for prompt in prompts for completion in prompt.completions}
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
