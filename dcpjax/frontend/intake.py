"""From what a caller gives to what the engine runs: prompts become token ids, options become requests.

What is wrong with one prompt becomes that submission's error; the others are not affected.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dcpjax.api import prompts as prompt_forms
from dcpjax.api.checks import check_option_names
from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import RequestMetrics
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.vllm_options import PROMPT, without_neutral
from dcpjax.checkpoint.detokenizer import Detokenizer
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.engine.request import Request
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.prompt_length import check_text, check_tokens, texts_of
from dcpjax.frontend.submission import Submission
from dcpjax.frontend.text import TextStream
from dcpjax.sampling.bad_words import bad_word_ids
from dcpjax.sampling.guide import GuideMaker

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class Intake:
    """Makes submissions of prompts and conversations, and requests of submissions."""

    def __init__(
        self,
        files: ModelFiles,
        engine: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.default_params = _default_params(files.generation_config)
        self._engine = engine
        self.eos_token_ids = set(files.end_token_ids(tokenizer.eos_token_id if tokenizer else None))
        self.known = _known_ids(tokenizer, vocab_size, self.eos_token_ids)
        self._numbers = itertools.count()
        self._request_ids = map(str, itertools.count())
        self._guides: GuideMaker | None = None
        self._bad_words = lru_cache(maxsize=16)(self._tokenised_bad_words)  # many prompts share their params

    def submissions(self, prompts: Any, sampling_params: Any, priority: Any = None) -> list[Submission]:
        """One for each prompt. Raises ValueError for lists of different lengths."""
        listed = _listed_prompts(prompts)
        params, priorities = self._params(sampling_params, len(listed)), self._priorities(priority, len(listed))
        return [self.submission(*each) for each in zip(range(len(listed)), listed, params, priorities, strict=True)]

    def chat_submissions(
        self, messages: Any, sampling_params: Any, priority: Any = None, **template: Any
    ) -> list[Submission]:
        """One for each conversation. `template` are options of `Tokenizer.apply_chat_template`."""
        listed = _listed_conversations(messages)
        params, priorities = self._params(sampling_params, len(listed)), self._priorities(priority, len(listed))
        every = zip(range(len(listed)), listed, params, priorities, strict=True)
        return [self.chat_submission(*each, **template) for each in every]

    def submission(
        self,
        index: int,
        prompt: Any,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        shown_tokens: Iterable[str] = (),
    ) -> Submission:
        """Tokenise and check one prompt; what is wrong with it becomes the submission's error.

        The text shows the special tokens among `shown_tokens` even if others are skipped.
        """
        try:
            text, ids = self._encode(prompt, self._kept(params))
            self._check_length(ids)
            self._check_known("token ids", ids)
            for name in ("allowed_token_ids", "logprob_token_ids"):
                self._check_known(name, getattr(params, name) or ())
            params.check_against(self.vocab_size, self._engine.max_logprobs)
            if isinstance(prompt, Mapping):
                cache_salt = prompt.get("cache_salt", cache_salt)
            return Submission(
                index=index,
                request_id=next(self._request_ids),
                params=params,
                prompt=text,
                prompt_token_ids=ids,
                priority=priority,
                cache_salt=_checked_salt(cache_salt),
                bad_words=self._bad_words(tuple(params.bad_words or ())),
                shown_tokens=tuple(shown_tokens),
                make_guide=self._guide_maker(params, ids),
            )
        except ValueError as error:
            text = prompt if isinstance(prompt, str) else None
            return self._refused(index, params, error, text)

    def chat_submission(
        self,
        index: int,
        conversation: Any,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        shown_tokens: Iterable[str] = (),
        **template: Any,
    ) -> Submission:
        """The same for one conversation, through a chat template."""
        if self.tokenizer is None:
            raise ValueError("chat must have a tokenizer, but the model has none; use generate with token ids")
        try:
            for text in texts_of(conversation) if params.truncate_prompt_tokens is None else ():
                self._check_text(text)
            ids = self.tokenizer.apply_chat_template(conversation, **template)
        except ValueError as error:
            return self._refused(index, params, error)
        return self.submission(index, {"prompt_token_ids": ids}, params, priority, cache_salt, shown_tokens)

    def start(self, prompt: RunningPrompt, *, streamed: bool) -> None:
        """Give a prompt its completions, each with a request that the engine can run."""
        submission = prompt.submission
        assert prompt.output.metrics is not None
        first = self._request(submission, 0, streamed=streamed, metrics=prompt.output.metrics)
        rest = (
            self._request(submission, index, streamed=streamed, first_sibling=first)
            for index in range(1, submission.params.n)
        )
        for request in (first, *rest):
            prompt.add(request, self._stream(submission), partial(self._detokenizer, submission))

    def _refused(self, index: int, params: SamplingParams, error: ValueError, prompt: str | None = None) -> Submission:
        return Submission(
            index=index, request_id=next(self._request_ids), params=params, prompt=prompt, error=str(error)
        )

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        """One for each prompt: checked copies, which no later change by the caller reaches."""
        if given is None or isinstance(given, SamplingParams):
            return [(given or self.default_params).clone()] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, but is {given!r}")
        if len(given) != count:
            raise ValueError(f"sampling_params must be one or as many as the {count} prompts, but are {len(given)}")
        return [params.clone() for params in given]

    def _priorities(self, given: Any, count: int) -> list[int]:
        if given is None:
            return [0] * count
        listed = [given] * count if isinstance(given, int) else list(given)
        if len(listed) != count:
            raise ValueError(f"priority must be one or as many as the {count} prompts, but are {len(listed)}")
        for priority in listed:
            self.check_priority(priority)
        return listed

    def check_priority(self, priority: Any) -> None:
        """Raises ValueError for what is no integer, or for one that the policy would not heed."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, but is {priority!r}")
        if priority and self._engine.scheduling_policy != "priority":
            raise ValueError(
                f"priority must be 0 while scheduling_policy is {self._engine.scheduling_policy!r}, but is {priority}; "
                "set scheduling_policy='priority'"
            )

    def _kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens are kept; None keeps all, and refuses a prompt of too many."""
        return self.max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens

    def _encode(self, prompt: Any, kept: int | None) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt, kept)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, but the model has none; give token ids")
            if kept is None:
                self._check_text(prompt)
            return prompt, _last(self.tokenizer.encode(prompt), kept)
        if _is_listed(prompt):
            prompt = _last(prompt, kept)
            check_tokens(len(prompt), self.max_model_len)  # before any of it is read
            if np.ndim(prompt[:1]) == 1:
                return None, [_token_id(token) for token in prompt]
        raise ValueError(f"a prompt must be a string or a list of token ids, but is {type(prompt).__name__}")

    def _check_known(self, what: str, ids: Sequence[int]) -> None:
        """Raise ValueError for an id that belongs to no token: the model has learned nothing about it."""
        given = np.asarray(ids)
        inside = (given >= 0) & (given < len(self.known))
        known = inside.copy()
        known[inside] = self.known[given[inside].astype(np.int64)]
        if known.all():
            return
        unknown, largest = given[~known][0], int(np.flatnonzero(self.known)[-1])
        if 0 <= unknown <= largest:
            raise ValueError(f"{what} must belong to tokens, but the tokenizer has none for {unknown}; leave it out")
        raise ValueError(f"{what} must be in [0, {largest}], but one is {unknown}")

    def _encode_mapping(self, prompt: Mapping[str, Any], kept: int | None) -> tuple[str | None, list[int]]:
        """Token ids go before a text, which is then only shown."""
        known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not known:
            raise ValueError(f"a prompt must have the key 'prompt' or 'prompt_token_ids', but has {list(prompt)}")
        check_option_names(without_neutral(prompt, PROMPT), prompt_forms.KEYS, what="key of a prompt")
        text, ids = self._encode(prompt[known[0]], kept)
        return text if len(known) == 1 else _shown_text(prompt["prompt"]), ids

    def _check_length(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("a prompt must hold at least one token, but is empty")
        check_tokens(len(ids), self.max_model_len)

    def _check_text(self, text: str) -> None:
        """Refuse a text that alone is too long, before all of it is tokenised."""
        tokenizer = self.tokenizer
        if tokenizer is not None:
            check_text(text, self.max_model_len, lambda piece: tokenizer.encode(piece, add_special_tokens=False))

    def _tokenised_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("bad_words must have a tokenizer, but the model has none; use logit_bias with token ids")
        return bad_word_ids(words, lambda word: tokenizer.encode(word, add_special_tokens=False))

    def _guide_maker(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> Any:
        """A maker of fresh guides, one for each completion; None if the output is free."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if self.tokenizer is None:
            raise ValueError("structured_outputs must have a tokenizer, but the model has none")
        if self._guides is None:
            self._guides = GuideMaker(self.tokenizer, self.vocab_size, self.eos_token_ids)
        maker, leading = self._guides, self.tokenizer.detokenizer(params.skip_special_tokens, prompt_token_ids).leading
        maker.make(wanted, leading).mask()  # refuses what is wrong before anything runs
        return lambda: maker.make(wanted, leading)

    def _request(self, submission: Submission, index: int, **options: Any) -> Request:
        """The request of completion number `index`. The result shows the metrics of completion 0."""
        number = next(self._numbers)
        params, room = submission.params, self.max_model_len - len(submission.prompt_token_ids)
        ends = set(params.stop_tokens) | (set() if params.ignore_eos else self.eos_token_ids)
        return Request(
            number=number,
            prompt_token_ids=submission.prompt_token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=_seed(params, index, self._engine.seed, number),
            end_token_ids=frozenset(ends),
            priority=submission.priority,
            cache_salt=submission.cache_salt,
            bad_words=submission.bad_words,
            guide=submission.make_guide() if submission.make_guide else None,
            **{"metrics": RequestMetrics(submission.arrival_time), **options},
        )

    def _stream(self, submission: Submission) -> TextStream:
        params = submission.params
        shown = self._detokenizer(submission, submission.prompt_token_ids) if params.detokenize else None
        return TextStream(shown, params)

    def _detokenizer(self, submission: Submission, token_ids: Sequence[int]) -> Detokenizer | None:
        """Of what follows these tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        skips = submission.params.skip_special_tokens
        return self.tokenizer.detokenizer(skips, token_ids, submission.shown_tokens)


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


def _is_listed(prompt: Any) -> bool:
    """Whether it has a length and parts, as token ids have."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 0
    return isinstance(prompt, Sequence) and not isinstance(prompt, bytes)


def _last(ids: Any, kept: int | None) -> Any:
    """The last `kept` token ids of a sequence or array; None keeps all."""
    return ids if kept is None else ids[-kept:]


def _shown_text(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"prompt must be a text, but is {type(text).__name__}")
    return text


def _token_id(token: Any) -> int:
    if not isinstance(token, int | np.integer) or isinstance(token, bool):
        raise ValueError(f"token ids must be integers, but one is {token!r}")
    return int(token)


def _known_ids(tokenizer: Tokenizer | None, vocab_size: int, ends: Iterable[int]) -> np.ndarray:
    """[V] bool: the ids of tokens, and those that the model ends with, whatever the tokenizer calls them.

    Without a tokenizer all ids count.
    """
    known = np.array([True] * vocab_size if tokenizer is None else tokenizer.known_ids(vocab_size))
    known[[token for token in ends if 0 <= token < vocab_size]] = True
    return known


def _seed(params: SamplingParams, index: int, engine_seed: int, number: int) -> int:
    """64 bits: the request's own seed plus the completion's index, or drawn from the engine's seed."""
    if params.seed is not None:
        return (params.seed + index) % 2**64
    high, low = np.random.SeedSequence([engine_seed % 2**64, number]).generate_state(2)
    return int(high) << 32 | int(low)


def _default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What the checkpoint's generation_config.json asks for, on top of the defaults."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    return SamplingParams(**given)


def _checked_salt(salt: Any) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a string of at least one character, but is {salt!r}")
    return salt
