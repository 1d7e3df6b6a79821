"""The library's face: prompts in, text out. Joins tokenizer, engine and text; holds no arrays of its own."""

import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from dcpjax.completion import Completion, Job
from dcpjax.config import EngineConfig
from dcpjax.engine import Engine
from dcpjax.model_files import ModelFiles, open_model
from dcpjax.outputs import RequestMetrics, RequestOutput, StreamEvent
from dcpjax.progress import bar
from dcpjax.request import Request
from dcpjax.runner import Runner
from dcpjax.sampling_params import SamplingParams, check_option_names
from dcpjax.text import TextStream
from dcpjax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


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
        sizes = self.runner.sizes
        self.engine = Engine(
            self.runner,
            num_blocks=sizes.num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        self._eos_token_ids = _eos_token_ids(self.files, self.tokenizer)
        self._added = 0
        self._active: dict[int, Completion] = {}

    def __repr__(self) -> str:
        layout, sizes = self.runner.layout, self.runner.sizes
        return (
            f"LLM({str(self.files.path)!r}, tp={layout.tp} x dcp={layout.dcp}, {self.runner.dtype}, "
            f"cache {sizes.num_blocks * self.runner.geometry.block_size} tokens)"
        )

    @property
    def max_model_len(self) -> int:
        return self.runner.sizes.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for, on top of the defaults."""
        config = self.files.generation_config
        names = ("temperature", "top_p", "top_k", "min_p")
        return SamplingParams(**{name: config[name] for name in names if config.get(name) is not None})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; one result each, in the order given.

        A prompt is a string, a list of token ids, or {"prompt": str} or {"prompt_token_ids": list[int]}. One that
        cannot be run gives a result whose completions have `finish_reason="error"`; the others are not disturbed.

        Raises:
            ValueError: `sampling_params` is a list of another length than `prompts`.
        """
        return self._collect(self._jobs(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the checkpoint's own chat template."""
        jobs = self._chat_jobs(
            messages,
            sampling_params,
            tools,
            add_generation_prompt and not continue_final_message,
            continue_final_message,
        )
        return self._collect(jobs, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamEvent]:
        """Yield text as it becomes certain. Closing the generator ends its requests and frees their blocks."""
        return self._run(self._jobs(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[StreamEvent]:
        """`chat`, as a stream."""
        return self._run(self._chat_jobs(messages, sampling_params, tools, True, False))

    def _jobs(self, prompts: Any, sampling_params: Any) -> list[Job]:
        listed = _listed_prompts(prompts)
        return [
            self._job(index, prompt, params)
            for index, (prompt, params) in enumerate(
                zip(listed, self._params(sampling_params, len(listed)), strict=True)
            )
        ]

    def _chat_jobs(
        self, messages: Any, sampling_params: Any, tools: Any, generation_prompt: bool, continue_final: bool
    ) -> list[Job]:
        if self.tokenizer is None:
            raise ValueError("chat must have a tokenizer, but the model has none; use generate with token ids")
        conversations = _listed_conversations(messages)
        jobs = []
        for index, (conversation, params) in enumerate(
            zip(conversations, self._params(sampling_params, len(conversations)), strict=True)
        ):
            try:
                ids: Any = self.tokenizer.apply_chat_template(
                    conversation,
                    tools=tools,
                    add_generation_prompt=generation_prompt,
                    continue_final_message=continue_final,
                )
                jobs.append(self._job(index, {"prompt_token_ids": ids}, params))
            except ValueError as error:
                jobs.append(Job(index, None, [], params, str(error)))
        return jobs

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, but is {given!r}")
        if len(given) != count:
            raise ValueError(f"sampling_params must be one or as many as the {count} prompts, but are {len(given)}")
        return list(given)

    def _job(self, index: int, prompt: Any, params: SamplingParams) -> Job:
        """Tokenise and check one prompt; what is wrong with it becomes the job's error."""
        try:
            text, ids = self._encode(prompt)
            self._check_length(ids)
            for token in params.stop_tokens:
                _token_id(token, self.runner.config.vocab_size, "stop_token_ids")
        except ValueError as error:
            return Job(index, prompt if isinstance(prompt, str) else None, [], params, str(error))
        return Job(index, text, ids, params)

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if key in prompt]
            if not known:
                raise ValueError(f"a prompt must have the key 'prompt' or 'prompt_token_ids', but has {list(prompt)}")
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, but the model has none; give token ids")
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes) or np.ndim(prompt) != 1:
            raise ValueError(f"a prompt must be a string or a list of token ids, but is {type(prompt).__name__}")
        return None, [_token_id(token, self.runner.config.vocab_size) for token in prompt]

    def _check_length(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("a prompt must hold at least one token, but is empty")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"a prompt must hold at most {self.max_model_len - 1} tokens (max_model_len={self.max_model_len} "
                f"leaves one to generate), but holds {len(ids)}"
            )

    def _collect(self, jobs: list[Job], use_tqdm: bool) -> list[RequestOutput]:
        shown = use_tqdm and self.progress
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
        try:
            for job in jobs:
                self._start(job)
            while True:
                for job in jobs:
                    yield from job.drain()
                if all(job.output.finished for job in jobs):
                    return
                self._advance()
        finally:
            self._abandon(jobs)

    def _advance(self) -> None:
        for request in self.engine.step():
            if request.number in self._active:
                self._deliver(self._active[request.number])

    def _deliver(self, completion: Completion) -> None:
        if completion.take_tokens():
            self.engine.end(completion.request)
        if completion.output.finish_reason:
            del self._active[completion.request.number]

    def _start(self, job: Job) -> None:
        if job.error is not None:
            job.fail(job.error)
            return
        for index in range(job.params.n):
            completion = job.completion(index, self._request(job, index), self._stream(job.params))
            try:
                self.engine.add(completion.request)
            except ValueError as error:
                completion.fail(str(error))
            else:
                self._active[completion.request.number] = completion

    def _abandon(self, jobs: list[Job]) -> None:
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

    def _request(self, job: Job, index: int) -> Request:
        number, self._added = self._added, self._added + 1
        params, room = job.params, self.max_model_len - len(job.prompt_token_ids)
        ends = set(params.stop_tokens) | (set() if params.ignore_eos else self._eos_token_ids)
        assert job.output.metrics is not None
        return Request(
            number=number,
            prompt_token_ids=job.prompt_token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=_seed(params, index, self.engine_config.seed, number),
            end_token_ids=frozenset(ends),
            # the result shows the moments of its first completion
            metrics=job.output.metrics if index == 0 else RequestMetrics(job.output.metrics.arrival_time),
        )

    def _stream(self, params: SamplingParams) -> TextStream:
        detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer(params.skip_special_tokens)
        return TextStream(detokenizer, params)


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


def _listed_prompts(prompts: Any) -> list[Any]:
    """One prompt or several -> several. A flat list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a prompt or a list of prompts, but are {type(prompts).__name__}")
    listed = list(prompts)
    if listed and all(isinstance(entry, int | np.integer) for entry in listed):
        return [listed]
    return listed


def _listed_conversations(messages: Any) -> list[Any]:
    """One conversation or several -> several. A flat list of messages is one conversation."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists, but is "
            f"{type(messages).__name__}"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def _token_id(token: Any, vocab_size: int, what: str = "token ids") -> int:
    if not isinstance(token, int | np.integer) or isinstance(token, bool):
        raise ValueError(f"{what} must be integers, but one is {token!r}")
    if not 0 <= token < vocab_size:
        raise ValueError(f"{what} must be in [0, {vocab_size - 1}], but one is {token}")
    return int(token)


def _seed(params: SamplingParams, index: int, engine_seed: int, number: int) -> int:
    """64 bits: the request's own seed plus the completion's index, or drawn from the engine's seed."""
    if params.seed is not None:
        return (params.seed + index) % 2**64
    high, low = np.random.SeedSequence([engine_seed % 2**64, number]).generate_state(2)
    return int(high) << 32 | int(low)


def _eos_token_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> set[int]:
    """generation_config.json's, else config.json's, else the tokenizer's."""
    fallback = None if tokenizer is None else tokenizer.eos_token_id
    for found in (files.generation_config.get("eos_token_id"), files.config.get("eos_token_id"), fallback):
        if found is not None:
            return set(found) if isinstance(found, list) else {found}
    return set()
