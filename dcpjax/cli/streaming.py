"""Prints a completion while it is generated."""

import contextlib
import sys
from collections.abc import Generator
from dataclasses import dataclass

from dcpjax.api.outputs import FinishReason, StreamEvent


@dataclass
class StreamedCompletion:
    """One completion, put together from its events."""

    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def add(self, event: StreamEvent) -> None:
        self.text += event.text
        self.tokens += len(event.token_ids)
        self.finish_reason, self.error = event.finish_reason, event.error


def print_stream(events: Generator[StreamEvent], completion: StreamedCompletion) -> None:
    """Print the text of `events` on standard output, end the last line, and add the events to `completion`.

    The generator is closed however this function is left. The first text is held back until the second event: in
    between the program for the second token is compiled, and its progress bar would be drawn over the text.
    """
    unprinted, has_first = "", False
    with contextlib.closing(events):
        try:
            for event in events:
                completion.add(event)
                unprinted += event.text
                if has_first or event.finish_reason:
                    _write(unprinted)
                    unprinted = ""
                has_first = True
        finally:
            _write(
                unprinted if completion.text.endswith("\n") or _failed_without_text(completion) else f"{unprinted}\n"
            )


def _failed_without_text(completion: StreamedCompletion) -> bool:
    return bool(completion.error) and not completion.text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
