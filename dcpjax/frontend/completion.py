"""Prompts and their completions while they run: what the engine has generated becomes text, events and results.

Joins a request and its text; knows nothing about scheduling or arrays.
"""

import time
from collections import deque
from collections.abc import Callable

from dcpjax.api.logprobs import Logprob, to_logprobs
from dcpjax.api.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Guides, Request
from dcpjax.engine.result import TokenScores
from dcpjax.frontend.text import TextStream


class Job:
    """One prompt of a call: its result, filled as its completions advance, and events not yet given out."""

    def __init__(
        self, index: int, prompt: str | None, ids: list[int], params: SamplingParams, error: str | None = None
    ) -> None:
        self.index, self.prompt_token_ids, self.params, self.error = index, ids, params, error
        self.priority = 0
        self.streamed = True
        self.cache_salt: str | None = None
        self.bad_words: tuple[tuple[int, ...], ...] = ()
        self.make_guide: Callable[[], Guides] | None = None
        self.completions: list[Completion] = []
        self.events: deque[StreamEvent] = deque()
        self.output = RequestOutput(str(index), prompt, ids, metrics=RequestMetrics(time.monotonic()))

    def completion(
        self, index: int, request: Request, stream: TextStream, decode: Callable[[int], str | None]
    ) -> "Completion":
        made = Completion(self, index, request, stream, decode)
        self.completions.append(made)
        self.output.outputs.append(made.output)
        return made

    def fail(self, message: str) -> None:
        """Give every completion the error, without running any."""
        for index in range(self.params.n):
            self.output.outputs.append(CompletionOutput(index, "", [], "error", error=message))
            self.events.append(StreamEvent(self.index, index, "", [], "error", error=message))
        self.output.finished = True

    def note(self, event: StreamEvent) -> None:
        self.events.append(event)
        self.output.finished = len(self.output.outputs) == self.params.n and all(
            output.finish_reason for output in self.output.outputs
        )


class Completion:
    """One of a prompt's completions while it runs."""

    def __init__(
        self, job: Job, index: int, request: Request, stream: TextStream, decode: Callable[[int], str | None]
    ) -> None:
        self.job, self.request, self.stream = job, request, stream
        self._decode = decode  # one token's text, for log-probabilities
        self.output = CompletionOutput(index, "", [])
        if request.params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def take_tokens(self) -> bool:
        """Take the tokens not seen yet. True if their text completed a stop string: the engine must end the request."""
        new = self.request.output_token_ids[len(self.output.token_ids) :]
        ended = self.request.finish_reason is not None
        if not new and not ended:
            return False
        self.output.token_ids.extend(new)
        self._take_scores()
        shown = new[:-1] if self._hides_last_token() else new
        text = "".join(self.stream.append(token) for token in shown)
        if ended:
            text += self.stream.finish()
        stopped_by_text = self.stream.stopped and self.request.finish_reason != "error"
        if stopped_by_text:
            self.request.finish("stop", self.stream.stop_reason)
        self._note(text, new)
        return stopped_by_text and not ended

    def fail(self, message: str) -> None:
        self.request.finish("error", error=message)
        self._note("", [])

    def abort(self) -> None:
        self._note(self.stream.finish(), [])

    def _take_scores(self) -> None:
        """Log-probabilities of the tokens not seen yet; of the prompt, once its last token has run."""
        output, wanted = self.output, self.request.params.logprobs
        if output.logprobs is not None and wanted is not None:
            for scores in self.request.scores[len(output.logprobs) :]:
                output.logprobs.append(self._readable(scores, wanted))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + scores.logprob
        if self.request.scores_prompt and self.job.output.prompt_logprobs is None:
            self.job.output.prompt_logprobs = self._prompt_logprobs()

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None]:
        wanted, scores = self.request.params.prompt_logprobs or 0, self.request.prompt_scores
        return [
            self._readable(scores[position], wanted) if position in scores else None
            for position in range(len(self.job.prompt_token_ids))
        ]

    def _readable(self, scores: TokenScores, wanted: int) -> dict[int, Logprob]:
        token, logprob, rank, ids, values = scores
        return to_logprobs(token, logprob, rank, ids, values, wanted, self._decode)

    def _hides_last_token(self) -> bool:
        """A token that ended the request shows in the text only if the user asked for it."""
        request = self.request
        by_token = request.finish_reason == "stop" and request.output_token_ids[-1] in request.end_token_ids
        return by_token and not request.params.include_stop_str_in_output

    def _note(self, text: str, token_ids: list[int]) -> None:
        request, output = self.request, self.output
        output.text += text
        output.finish_reason, output.stop_reason, output.error = (
            request.finish_reason,
            request.stop_reason,
            request.error,
        )
        if request.leader is None:
            self.job.output.num_cached_tokens = request.metrics.num_cached_tokens
        self.job.note(
            StreamEvent(
                self.job.index,
                output.index,
                text,
                token_ids,
                request.finish_reason,
                request.stop_reason,
                request.error,
            )
        )
