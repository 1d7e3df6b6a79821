"""What generation gives back. Field names are those of vLLM. Plain data; knows nothing about the engine."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    `stop_reason` is the stop string or stop token id that ended it, None for end of sequence or length.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass
class RequestMetrics:
    """Seconds on a monotonic clock, None until the moment has come."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """Everything about one prompt: `outputs` holds its `n` completions in order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """The message of the first completion that failed, None if all is well."""
        return next((output.error for output in self.outputs if output.error), None)


@dataclass
class StreamEvent:
    """New text and tokens of one completion. Concatenating `text` gives the completion's whole text."""

    prompt_index: int  # position of the prompt in the call
    index: int  # which of the prompt's completions
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
