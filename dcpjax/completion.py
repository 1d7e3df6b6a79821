"""Prompts and their completions while they run: what the engine has generated becomes text, events and results.

Joins a request and its text; knows nothing about scheduling or arrays.
"""

import time
from collections import deque
from collections.abc import Iterator

from dcpjax.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from dcpjax.request import Request
from dcpjax.sampling_params import SamplingParams
from dcpjax.text import TextStream


class Job:
    """One prompt of a call: its result, filled as its completions advance, and events not yet given out."""

    def __init__(
        self, index: int, prompt: str | None, ids: list[int], params: SamplingParams, error: str | None = None
    ) -> None:
        self.index, self.prompt_token_ids, self.params, self.error = index, ids, params, error
        self.completions: list[Completion] = []
        self.events: deque[StreamEvent] = deque()
        self.output = RequestOutput(str(index), prompt, ids, metrics=RequestMetrics(time.monotonic()))

    def completion(self, index: int, request: Request, stream: TextStream) -> "Completion":
        made = Completion(self, index, request, stream)
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

    def drain(self) -> Iterator[StreamEvent]:
        while self.events:
            yield self.events.popleft()


class Completion:
    """One of a prompt's completions while it runs."""

    def __init__(self, job: Job, index: int, request: Request, stream: TextStream) -> None:
        self.job, self.request, self.stream = job, request, stream
        self.output = CompletionOutput(index, "", [])

    def take_tokens(self) -> bool:
        """Take the tokens not seen yet. True if their text completed a stop string: the engine must end the request."""
        new = self.request.output_token_ids[len(self.output.token_ids) :]
        ended = self.request.finish_reason is not None
        if not new and not ended:
            return False
        self.output.token_ids.extend(new)
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

    def _hides_last_token(self) -> bool:
        """A token that ended the request shows in the text only if the user asked for it."""
        by_token = self.request.finish_reason == "stop"
        return by_token and not self.request.params.include_stop_str_in_output

    def _note(self, text: str, token_ids: list[int]) -> None:
        request, output = self.request, self.output
        output.text += text
        output.finish_reason, output.stop_reason, output.error = (
            request.finish_reason,
            request.stop_reason,
            request.error,
        )
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
