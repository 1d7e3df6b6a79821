"""One prompt on its way through the engine. Works on token ids; knows nothing about text or arrays."""

import enum
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


class Guides(Protocol):
    """Allows some tokens and forbids others, after what has been generated so far."""

    def mask(self) -> Any:
        """uint32 [ceil(V / 32)]: a bit for each token that may come next. Raises ValueError if none may."""
        ...

    def advance(self, token_id: int) -> None: ...

    @property
    def is_finished(self) -> bool: ...


@dataclass(eq=False)
class Request:
    """A prompt, what has been generated for it and how far the cache has come.

    prompt_token_ids        | output_token_ids | in flight
    computed ......... | pending .......................     `num_computed` splits what the cache holds from the rest

    A token in flight is sampled on the device and not yet known here; there is at most one.
    """

    number: int  # order of arrival; also the owner of its blocks
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: what max_tokens and the model length leave
    seed: int  # resolved: from the request or from the engine
    end_token_ids: frozenset[int]  # tokens that end it
    metrics: RequestMetrics
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0  # lower runs earlier
    cache_salt: str | None = None  # shares cached blocks only with requests of the same salt
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Guides | None = None
    streamed: bool = True  # somebody waits for each of its tokens, not for the last one alone
    leader: "Request | None" = None  # the first completion of the same prompt, whose cache this one can share
    num_computed: int = 0
    num_held: int = 0  # tokens whose blocks other requests can find
    num_in_flight: int = 0
    seat: int = -1  # its place on the device while it runs
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    token_counts: Any = None  # the sampler's counts of its tokens
    scores: list[TokenScores] = field(default_factory=list)  # of the output tokens, if wanted
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)  # by position, if wanted
    _keys: list[Key] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Requests are served from the smallest on, and give way from the largest on."""
        return self.priority, self.number

    @property
    def num_generated(self) -> int:
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def num_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    # The next three are asked for every token: a property that asks others would take three times as long.

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight - self.num_computed

    @property
    def goes_on(self) -> bool:
        """Whether a token follows the newest, as far as is known."""
        return len(self.output_token_ids) + self.num_in_flight < self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether every prompt token has to run, because its log-probability is wanted."""
        return self.params.prompt_logprobs is not None and self.leader is None

    @property
    def waits_for_token(self) -> bool:
        """Whether the next step has to know, on the host, the token in flight; or there is no next step."""
        if not self.num_in_flight:
            return False
        by_host = self.guide is not None or any(len(word) > 1 for word in self.bad_words)
        return by_host or not self.goes_on

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start .. stop-1; `UNKNOWN` for one in flight."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        known = self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - prompt) : stop - prompt]
        return known + [UNKNOWN] * (stop - start - len(known))

    def keys(self, blocks: int, block_size: int) -> list[Key]:
        """The names of its root and of its first `blocks` full blocks."""
        self._keys = self._keys or [root(self.cache_salt)]
        if len(self._keys) <= blocks:
            extend(self._keys, self.tokens(0, blocks * block_size), block_size)
        return self._keys[: blocks + 1]

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
