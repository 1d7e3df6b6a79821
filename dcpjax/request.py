"""One prompt on its way through the engine. Works on token ids; knows nothing about text or arrays."""

import enum
from dataclasses import dataclass, field

from dcpjax.outputs import FinishReason, RequestMetrics
from dcpjax.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A prompt, what has been generated for it and how far the cache has come.

    prompt_token_ids        | output_token_ids
    computed ......... | pending ..........     `num_computed` splits what the cache holds from what it lacks
    """

    number: int  # order of arrival; also the owner of its blocks
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: what max_tokens and the model length leave
    seed: int  # resolved: from the request or from the engine
    end_token_ids: frozenset[int]  # tokens that end it
    metrics: RequestMetrics
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start .. stop-1."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(0, start - prompt) : max(0, stop - prompt)]

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
