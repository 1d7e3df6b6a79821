"""One prompt on its way through the engine: what was asked, what has been generated, how far the cache has come."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dcpjax.api.outputs import FinishReason, RequestMetrics
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.prefix import Key, extend, root
from dcpjax.engine.result import TokenScores

UNKNOWN = -2  # stands for a token that is sampled but has not reached the host


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenGuide(Protocol):
    """Grammar-constrained decoding: which tokens may come next after those generated so far."""

    def mask(self) -> Any:
        """uint32 [ceil(V / 32)]: a bit for each token that may come next. Raises ValueError if none may."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled. Raises ValueError if the mask did not allow it."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete."""
        ...


def _metrics() -> RequestMetrics:
    return RequestMetrics(time.monotonic())


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt, what has been generated for it and how far the cache has come.

    prompt_token_ids        | output_token_ids | in flight
    computed ......... | pending .......................     `num_computed` splits what the cache holds from the rest

    A token in flight is sampled on the device and not yet known here; while steps are scheduled there is at most one.
    Each group of fields below is written by one part of the program alone.
    """

    # Asked: set when the request is made, never changed.
    number: int  # order of arrival; also the owner of its blocks
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int  # resolved: what max_tokens and the model length leave
    seed: int = 0  # resolved: from the request or from the engine
    end_token_ids: frozenset[int] = frozenset()  # tokens that end it
    priority: int = 0  # lower runs earlier
    cache_salt: str | None = None  # shares cached blocks only with requests of the same salt
    bad_words: tuple[tuple[int, ...], ...] = ()  # as token ids
    guide: TokenGuide | None = None
    streamed: bool = True  # the caller waits for each token, not for the last one alone
    first_sibling: "Request | None" = None  # the first completion of the same prompt: this one can share its cache
    metrics: RequestMetrics = field(default_factory=_metrics)

    # Generated: written by the engine, through `finish` and when a step's result arrives.
    output_token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)  # of the output tokens, if wanted
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)  # by position, if wanted
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    # Scheduled: written by the scheduler.
    seat: int = -1  # index of its entry in the per-request device state while it runs, -1 while it does not
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_registered: int = 0  # tokens in blocks that other requests can find
    num_in_flight: int = 0

    # Counted: written by the sampler, which keeps how often each token occurs.
    token_counts: Any = None

    _keys: list[Key] = field(default_factory=list)

    @property
    def status(self) -> Status:
        if self.finish_reason is not None:
            return Status.FINISHED
        return Status.WAITING if self.seat < 0 else Status.RUNNING

    @property
    def order(self) -> tuple[int, int]:
        """Requests are served from the smallest on, and preempted from the largest on."""
        return self.priority, self.number

    @property
    def num_generated(self) -> int:
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def num_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    # The next three are read for every token: a property that reads other properties would take three times as long.

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight - self.num_computed

    @property
    def expects_token(self) -> bool:
        """Whether another token follows the newest one, as far as `max_tokens` tells."""
        return len(self.output_token_ids) + self.num_in_flight < self.max_tokens

    @property
    def num_left(self) -> int:
        """Most tokens that follow the newest one."""
        return self.max_tokens - self.num_generated

    @property
    def sampled_on_device(self) -> bool:
        """Whether the device knows all that its next tokens depend on: no option looks at those before them."""
        params = self.params
        looks_back = self.guide is not None or self.bad_words or params.has_penalties
        return not looks_back and self.num_generated >= params.min_tokens and params.logprobs != -1

    @property
    def scores_prompt(self) -> bool:
        """Whether every prompt token has to run, because its log-probability is wanted."""
        return self.params.prompt_logprobs is not None and self.first_sibling is None

    @property
    def needs_token_on_host(self) -> bool:
        """Whether it cannot be scheduled before the token in flight reaches the host, or needs no further step."""
        if not self.num_in_flight:
            return False
        by_host = self.guide is not None or any(len(word) > 1 for word in self.bad_words)
        return by_host or not self.expects_token

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start .. stop-1; `UNKNOWN` for one in flight."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        known = self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - prompt) : stop - prompt]
        return known + [UNKNOWN] * (stop - start - len(known))

    def keys(self, blocks: int, block_size: int) -> Sequence[Key]:
        """The key of its root and of each of its first `blocks` full blocks."""
        self._keys = self._keys or [root(self.cache_salt)]
        if len(self._keys) <= blocks:
            extend(self._keys, self.tokens(0, blocks * block_size), block_size)
        return self._keys[: blocks + 1]

    def drop_after(self, count: int) -> None:
        """Forget the output tokens after the first `count`, because the text ends there."""
        del self.output_token_ids[count:], self.scores[count:]
        self.metrics.num_generated_tokens = count

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None) -> None:
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
