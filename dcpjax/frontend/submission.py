"""One prompt as it was submitted: tokenised and checked, or with the reason why it cannot run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import TokenGuide


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a `RunningPrompt` is made of."""

    index: int  # the caller's number of the prompt; events carry it
    request_id: str  # no other submission of the same `LLM` has it; the result carries it
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    cache_salt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    shown_tokens: tuple[str, ...] = ()  # special tokens that the text shows even if others are skipped
    make_guide: Callable[[], TokenGuide] | None = None  # a new guide for each completion; None: the output is free
    error: str | None = None  # why it cannot run
    arrival_time: float = field(default_factory=time.monotonic)  # seconds on a monotonic clock
