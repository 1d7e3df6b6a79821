"""`LLM`: prompts in, text out. Joins a model on its mesh, the engine and the frontend."""

import os
import time
import warnings
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from dcpjax.api.beam_search import BeamSearchOutput, BeamSearchParams
from dcpjax.api.checks import check_option_names
from dcpjax.api.config import EngineConfig
from dcpjax.api.logprobs import Logprob
from dcpjax.api.outputs import PromptWarning, RequestOutput, StreamEvent
from dcpjax.api.progress import bar
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.vllm_options import ATTRIBUTES, ENGINE, SAMPLING, check_call, without_neutral
from dcpjax.checkpoint.model_files import ModelFiles, open_model, open_tokenizer
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.engine.engine import Engine
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend import beam_search
from dcpjax.frontend.beam_search import Search
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.intake import Intake, Message, Prompt
from dcpjax.frontend.shared_engine import SharedEngine
from dcpjax.frontend.submission import Submission
from dcpjax.notebook_view import describe
from dcpjax.runtime.runner import load_runner
from dcpjax.runtime.warmup import warm_up

CHAT_OPTIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "priority",
)


class LLM:
    """A model ready to generate. Threads may share it: what they ask for runs in one batch.

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
        named = self.engine_config.tokenizer
        self.tokenizer: Tokenizer | None = self.files.tokenizer() if named is None else open_tokenizer(named)
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
        self._shared = SharedEngine(self.engine)

    def __repr__(self) -> str:
        model, tokens = self.runner.model, self.runner.sizes.num_blocks * self.runner.geometry.block_size
        layout = f"tp={model.layout.tp} x dcp={model.layout.dcp}"
        return f"LLM({str(self.files.path)!r}, {layout}, {model.dtype}, cache {tokens} tokens)"

    def _repr_html_(self) -> str:
        return describe(self.files.path, self.runner)

    if not TYPE_CHECKING:  # else every misspelt name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Says what to use instead of what vLLM's `LLM` has and this one has not."""
            hint = f"; {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(f"LLM has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def max_model_len(self) -> int:
        return self.runner.sizes.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for, on top of the defaults."""
        return self.intake.default_params.clone()

    def get_tokenizer(self) -> Any:
        """This model's tokenizer as an object of transformers. Raises ValueError for a model without one."""
        if self.tokenizer is None:
            raise ValueError(
                "get_tokenizer needs a model with a tokenizer, but this one has none; use LLM(tokenizer=...)"
            )
        return self.tokenizer.hugging_face

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prompt. False, and nothing happens, while requests run."""
        return self._shared.call(self.engine.reset_prefix_cache)

    def stats(self) -> EngineStats:
        """What runs now, what the cache holds and what has been done."""
        return self._shared.call(self.engine.stats)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **neutral: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt; one result each, in the order given.

        A prompt is a string, a list of token ids, or {"prompt": str} or {"prompt_token_ids": list[int]}, with a
        "cache_salt" beside it if its cache must not be shared with others. One that cannot be run gives a result
        whose completions have `finish_reason="error"`; the others are not disturbed.

        Args:
            priority: one for all or one for each; lower runs earlier, with scheduling_policy="priority".
            neutral: vLLM's other arguments, where they change nothing, such as lora_request=None.

        Raises:
            ValueError: `sampling_params` or `priority` is a list of another length than `prompts`.
        """
        check_call(neutral, "prompts", "sampling_params", "priority", "use_tqdm")
        return self._collect(self.intake.submissions(prompts, sampling_params, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **neutral: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the checkpoint's own chat template or the text of another.

        `chat_template_kwargs` are the template's own switches, such as {"enable_thinking": False}. The other arguments
        are those of `generate`.
        """
        check_call(neutral, "messages", "sampling_params", "use_tqdm", *CHAT_OPTIONS)
        submissions = self.intake.chat_submissions(
            messages,
            sampling_params,
            priority,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        **neutral: Any,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of every prompt, best first. One that is refused has an `error`.

        Raises:
            ValueError: 2 * `beam_width` exceeds the engine's `max_logprobs`.
            RuntimeError: a step failed, of whichever prompt.
        """
        check_call(neutral, "prompts", "params", "use_tqdm")
        vocab_size = self.runner.model.config.vocab_size
        step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=min(2 * params.beam_width, vocab_size))
        step.check_against(vocab_size, self.engine_config.max_logprobs)

        def next_tokens(texts: Sequence[list[int]]) -> list[dict[int, Logprob]]:
            results = self.generate([{"prompt_token_ids": ids} for ids in texts], step, use_tqdm=False)
            failed = next((result.error for result in results if result.error), None)
            if failed is not None:
                raise RuntimeError(failed)
            meter.update(1)
            return [logprobs for result in results for logprobs in result.outputs[0].logprobs or ()]

        submissions = self.intake.submissions(prompts, step)
        searches = {each.index: self._search(each, params) for each in submissions if each.error is None}
        with bar(description="searching", total=params.max_tokens, shown=use_tqdm and self.progress) as meter:
            beam_search.run(list(searches.values()), next_tokens)
        return [self._found(searches.get(each.index), each.error) for each in submissions]

    def _search(self, submission: Submission, params: BeamSearchParams) -> Search:
        prompt = submission.prompt_token_ids
        room = self.max_model_len - len(prompt)
        return Search(prompt, params, min(params.max_tokens, room), self.intake.eos_token_ids)

    def _found(self, search: Search | None, error: str | None) -> BeamSearchOutput:
        sequences = search.result() if search else []
        for sequence in sequences:
            sequence.text = self.tokenizer and self.tokenizer.decode(sequence.tokens)
        return BeamSearchOutput(sequences=sequences, error=error)

    def _collect(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        events = deque[StreamEvent]()
        prompts = [RunningPrompt(submission, events) for submission in submissions]
        shown = use_tqdm and self.progress
        with bar(description="generating", total=len(prompts), shown=shown) as meter:
            tokens, started, finished = 0, time.monotonic(), set[int]()
            for event in self._run(prompts, events, streamed=False):
                tokens += len(event.token_ids)
                if event.finish_reason and prompts[event.prompt_index].output.finished:
                    finished.add(event.prompt_index)
                    meter.set_postfix_str(f"{tokens / (time.monotonic() - started):.1f} tokens/s", refresh=False)
                    meter.update(len(finished) - meter.n)
        return [prompt.output for prompt in prompts]

    def _stream(self, submissions: list[Submission]) -> Generator[StreamEvent]:
        events = deque[StreamEvent]()
        return self._run([RunningPrompt(submission, events) for submission in submissions], events, streamed=True)

    def _run(
        self, prompts: list[RunningPrompt], events: deque[StreamEvent], *, streamed: bool
    ) -> Generator[StreamEvent]:
        """Drive the engine until these prompts are done. The tokens of others go to their own events."""
        unfinished = sum(prompt.submission.params.n for prompt in prompts)
        try:
            for prompt in prompts:
                self.start(prompt, streamed=streamed)
            _warn_of_a_single_error(prompts, streamed)
            while unfinished:
                if not events:
                    self.advance(events)
                while events:
                    event = events.popleft()
                    unfinished -= event.finish_reason is not None
                    yield event
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
        self._shared.start(prompt.completions)

    def advance(self, events: Collection[StreamEvent] = ()) -> None:
        """Run one step, or wait for the end of one that another thread runs; prompts get their new tokens as events.

        Does nothing if there are `events` already, or if nothing runs.
        """
        self._shared.advance(events)

    def abandon(self, prompts: list[RunningPrompt]) -> None:
        """End what has not finished, and free what it holds."""
        self._shared.abort([completion for prompt in prompts for completion in prompt.completions])


def _warn_of_a_single_error(prompts: Sequence[RunningPrompt], streamed: bool) -> None:
    """Of several prompts the results tell which failed; of one alone, the caller may look at the text only."""
    if len(prompts) == 1 and prompts[0].output.error is not None:
        warnings.warn(
            f"the prompt was not run: {prompts[0].output.error}", PromptWarning, stacklevel=3 if streamed else 5
        )


def generate(
    model: str | os.PathLike[str], prompts: Prompt | Sequence[Prompt], *, progress: bool = True, **options: Any
) -> list[RequestOutput]:
    """Load a model, complete the prompts and return one result each.

    `options` are those of `EngineConfig` and of `SamplingParams` (`seed` is both); an unknown one is refused by
    name. What is not given is the checkpoint's own.
    """
    options = without_neutral(options, {**ENGINE, **SAMPLING})
    engine_names = [field.name for field in fields(EngineConfig)]
    sampling_names = [field.name for field in fields(SamplingParams)]
    check_option_names(options, [*engine_names, *sampling_names])
    sampling = {name: value for name, value in options.items() if name in sampling_names}
    SamplingParams(**sampling)  # refuses what is wrong before the model is loaded
    llm = LLM(model, progress=progress, **{name: value for name, value in options.items() if name in engine_names})
    return llm.generate(prompts, replace(llm.get_default_sampling_params(), **sampling))
