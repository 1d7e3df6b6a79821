"""Results of generation. Field names are those of vLLM.

A `repr` is one short line however long the prompt; in a notebook a result shows as a small table.
"""

import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dcpjax.api.logprobs import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]

REPR_CHARACTERS = 40
CELL_CHARACTERS = 2000


class PromptWarning(UserWarning):
    """The only prompt of a call could not be run; its result has the error."""


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    `stop_reason` is the stop string or stop token id that ended it, None for end of sequence or length.
    `logprobs` holds one dict per generated token, `cumulative_logprob` the sum over the sampled tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: "list[dict[int, Logprob]] | None" = None
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        parts = [f"index={self.index}", _beginning(self.text), counted(len(self.token_ids), "token")]
        names = ("finish_reason", "stop_reason", "error", "cumulative_logprob")
        named = ((name, getattr(self, name)) for name in names)
        parts += [f"{name}={value!r}" for name, value in named if value is not None]
        return f"CompletionOutput({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return html_table([self.html_row()])

    def html_row(self) -> tuple[str, str]:
        """(name, text): the completion as a row of a table of its prompt's completions."""
        name = f"{self.index}: {counted(len(self.token_ids), 'token')}, {self.finish_reason or 'running'}"
        return name, "\n".join(part for part in (self.text, self.error) if part)


@dataclass
class RequestMetrics:
    """Points in time in seconds of a monotonic clock, and durations in seconds; None until they are known."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    last_token_time: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_generated_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """From the first step to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """From the first token to the newest."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def time_per_output_token(self) -> float | None:
        """The mean time between two tokens; None for fewer than two tokens."""
        gaps = self.num_generated_tokens - 1
        return None if self.decode_time is None or gaps < 1 else self.decode_time / gaps

    @property
    def latency(self) -> float | None:
        return _between(self.arrival_time, self.finished_time)

    def __repr__(self) -> str:
        parts = ["waiting" if self.queue_time is None else f"queued {duration(self.queue_time)}"]
        if self.time_to_first_token is not None:
            parts.append(f"first token after {duration(self.time_to_first_token)}")
        if self.num_generated_tokens:
            parts.append(self._generated())
        if self.num_prompt_tokens:
            parts.append(f"{self.num_cached_tokens:,} of {counted(self.num_prompt_tokens, 'prompt token')} cached")
        if self.preemptions:
            parts.append(counted(self.preemptions, "preemption"))
        return f"RequestMetrics({', '.join(parts)})"

    def _generated(self) -> str:
        tokens = counted(self.num_generated_tokens, "token")
        if self.decode_time is None or self.time_per_output_token is None:
            return tokens
        return f"{tokens} in {duration(self.decode_time)} ({duration(self.time_per_output_token)} each)"


@dataclass
class RequestOutput:
    """Everything about one prompt: `outputs` holds its `n` completions in order.

    `prompt_logprobs` holds one dict per prompt token, None for the first: nothing comes before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: "list[dict[int, Logprob] | None] | None" = None

    @property
    def error(self) -> str | None:
        """The message of the first completion that failed, None if none did."""
        return next((output.error for output in self.outputs if output.error), None)

    def __repr__(self) -> str:
        parts = [f"request_id={self.request_id!r}"]
        if self.prompt is not None:
            parts.append(f"prompt={_beginning(self.prompt)}")
        parts.append(counted(len(self.prompt_token_ids), "prompt token"))
        if self.num_cached_tokens:
            parts.append(f"{self.num_cached_tokens:,} cached")
        parts.append(self._outputs())
        parts.append("finished" if self.finished else "running")
        return f"RequestOutput({', '.join(parts)})"

    def _outputs(self) -> str:
        """The number of completions and the first of them, since there may be many."""
        first = "".join(f": {output!r}" for output in self.outputs[:1])
        return counted(len(self.outputs), "output") + first + ("..." if len(self.outputs) > 1 else "")

    def _repr_html_(self) -> str:
        rows = [(f"prompt: {counted(len(self.prompt_token_ids), 'token')}", self.prompt or "")]
        rows += [output.html_row() for output in self.outputs]
        return html_table(rows if self.metrics is None else [*rows, ("metrics", repr(self.metrics))])


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


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Rows of (name, text) for a notebook. Every cell is escaped, and clipped if it is long.

    No colours are set, so that it fits light and dark pages. The classes keep MathJax from reading dollar signs in a
    text as formulas.
    """
    name_style = "text-align: left; vertical-align: top; white-space: nowrap"
    text_style = "text-align: left; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere"
    lines = [
        f'<tr><th style="{name_style}">{html.escape(name)}</th>'
        f'<td style="{text_style}">{html.escape(_clipped(text))}</td></tr>'
        for name, text in rows
    ]
    return "\n".join(['<table class="tex2jax_ignore mathjax_ignore">', *lines, "</table>"])


def counted(count: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """`1.3 s`, `54 ms`, `0.2 ms`."""
    return f"{seconds:.1f} s" if seconds >= 0.095 else f"{1000 * seconds:.2g} ms"


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _beginning(text: str) -> str:
    return repr(text[:REPR_CHARACTERS]) + ("..." if len(text) > REPR_CHARACTERS else "")


def _clipped(text: str) -> str:
    more = len(text) - CELL_CHARACTERS
    return text if more <= 0 else f"{text[:CELL_CHARACTERS]}... ({counted(more, 'more character')})"
