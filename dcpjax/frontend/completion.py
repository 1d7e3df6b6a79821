"""Prompts and their completions while they run: sampled tokens become text, events and results."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dcpjax.api.logprobs import Logprob, to_logprobs
from dcpjax.api.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, StreamEvent
from dcpjax.checkpoint.detokenizer import Detokenizer
from dcpjax.engine.request import Request
from dcpjax.engine.result import TokenScores
from dcpjax.frontend.submission import Submission
from dcpjax.frontend.text import TextStream

# Gives a detokenizer of what follows these tokens; None without a tokenizer.
DecodesBehind = Callable[[Sequence[int]], Detokenizer | None]


class End(NamedTuple):
    """Why a completion ended; all None while it runs."""

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class TakesEvents(Protocol):
    """A deque, or what else has its `append`."""

    def append(self, event: StreamEvent, /) -> object: ...


class RunningPrompt:
    """A submission that has been started: its completions and its result, which fills as they advance."""

    def __init__(self, submission: Submission, events: TakesEvents) -> None:
        """`events`: where the events of its completions go."""
        self.submission, self.events = submission, events
        self.completions: list[Completion] = []
        self._unfinished = submission.params.n
        self.output = RequestOutput(
            submission.request_id,
            submission.prompt,
            submission.prompt_token_ids,
            metrics=RequestMetrics(submission.arrival_time, num_prompt_tokens=len(submission.prompt_token_ids)),
        )

    def add(self, request: Request, stream: TextStream, decodes_behind: DecodesBehind) -> "Completion":
        """One more completion. `decodes_behind` spells the tokens of log-probabilities."""
        completion = Completion(self, request, stream, decodes_behind)
        self.completions.append(completion)
        self.output.outputs.append(completion.output)
        return completion

    @property
    def has_begun(self) -> bool:
        """Whether every completion has been scheduled at least once."""
        return all(completion.request.metrics.first_scheduled_time for completion in self.completions)

    def fail(self, message: str) -> None:
        """Give every completion the error, without running any."""
        for index in range(self.submission.params.n):
            self.output.outputs.append(CompletionOutput(index, "", [], "error", error=message))
            self.record(StreamEvent(self.submission.index, index, "", [], "error", error=message))

    def record(self, event: StreamEvent) -> None:
        self._unfinished -= event.finish_reason is not None
        self.output.finished = not self._unfinished
        self.events.append(event)  # last: another thread may be waiting for it


class Completion:
    """One of a prompt's completions while it runs."""

    def __init__(
        self, prompt: RunningPrompt, request: Request, stream: TextStream, decodes_behind: DecodesBehind
    ) -> None:
        self.prompt, self.request, self.stream, self._decodes_behind = prompt, request, stream, decodes_behind
        self.output = CompletionOutput(len(prompt.completions), "", [])
        if request.params.scores_tokens:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
            self._scored = decodes_behind(request.prompt_token_ids)

    def take_tokens(self) -> None:
        """Turn the request's new tokens into text, an event for each. A stop string in the text ends the completion,
        and tokens behind it are dropped: one step may bring several.
        """
        new = self.request.output_token_ids[len(self.output.token_ids) :]
        for token in new[:-1]:
            self._take([token])
            text = self.stream.append(token)
            if self.stream.stopped:
                self.request.drop_after(len(self.output.token_ids))
                self._record(text, [token], End("stop", self.stream.stop_reason))
                return
            self._record(text, [token], End())
        if new or self.request.finish_reason is not None:
            self._take_last(new[-1:])

    def _take_last(self, new: list[int]) -> None:
        """The newest token, or none if the request ended without one."""
        self._take(new)
        shown = [] if self._hides_last_token() else new
        text = "".join(self.stream.append(token) for token in shown)
        if self.request.finish_reason is not None:
            text += self.stream.finish()
        self._record(text, new, self._end())

    def _take(self, new: list[int]) -> None:
        self.output.token_ids.extend(new)
        self._take_scores()

    def fail(self, message: str) -> None:
        self._record("", [], End("error", error=message))

    def abort(self) -> None:
        """Give out the text that was held back; the engine has ended the request."""
        self._record(self.stream.finish(), [], self._end_of_request())

    def _end(self) -> End:
        if self.stream.stopped and self.request.finish_reason != "error":
            return End("stop", self.stream.stop_reason)
        return self._end_of_request()

    def _end_of_request(self) -> End:
        return End(self.request.finish_reason, self.request.stop_reason, self.request.error)

    def _take_scores(self) -> None:
        """Log-probabilities of the new tokens; of the prompt, once its last token has run."""
        output, params = self.output, self.request.params
        if output.logprobs is not None:
            wanted = -1 if params.logprob_token_ids is not None else params.logprobs or 0
            for scores in self.request.scores[len(output.logprobs) : len(output.token_ids)]:
                output.logprobs.append(_logprobs(scores, wanted, self._scored))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + scores.logprob
        if self.request.scores_prompt and self.prompt.output.prompt_logprobs is None:
            self.prompt.output.prompt_logprobs = self._prompt_logprobs()

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None]:
        wanted, detokenizer = self.request.params.prompt_logprobs or 0, self._decodes_behind([])
        listed: list[dict[int, Logprob] | None] = []
        for position, token in enumerate(self.request.prompt_token_ids):
            scores = self.request.prompt_scores.get(position)
            listed.append(None if scores is None else _logprobs(scores, wanted, detokenizer))
            if detokenizer and scores is None:
                detokenizer.append(token)
        return listed

    def _hides_last_token(self) -> bool:
        """A token that ended the request shows in the text only if the user asked for it."""
        request = self.request
        by_token = request.finish_reason == "stop" and request.output_token_ids[-1] in request.end_token_ids
        return by_token and not request.params.include_stop_str_in_output

    def _record(self, text: str, token_ids: list[int], end: End) -> None:
        output = self.output
        output.text += text
        output.finish_reason, output.stop_reason, output.error = end
        if self.request.first_sibling is None:
            self.prompt.output.num_cached_tokens = self.request.metrics.num_cached_tokens
        self.prompt.record(StreamEvent(self.prompt.submission.index, output.index, text, token_ids, *end))


def _logprobs(scores: TokenScores, wanted: int, detokenizer: Detokenizer | None) -> dict[int, Logprob]:
    """Spell the tokens that might have come next, then go on by the one that did."""
    token, logprob, rank, ids, values, ranks = scores
    if detokenizer is None:
        return to_logprobs(token, logprob, rank, ids, values, wanted, ranks=ranks)
    made = to_logprobs(token, logprob, rank, ids, values, wanted, detokenizer.spell, ranks)
    detokenizer.append(token)
    return made
