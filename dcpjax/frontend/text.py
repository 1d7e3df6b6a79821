"""A completion's text as it grows: detokenising, and ending at a stop string.

Text that may be the beginning of a stop string is held back, so no part of a stop string is ever given out.
"""

from typing import Protocol

from dcpjax.api.sampling_params import SamplingParams


class Detokenizes(Protocol):
    def append(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """Turns token ids into text, piece by piece; `text` is what has been given out so far."""

    def __init__(self, detokenizer: Detokenizes | None, params: SamplingParams) -> None:
        self._detokenizer, self._params = detokenizer, params
        self._pending = ""
        self._tokens = 0
        self._too_early = 0  # characters of `_pending` from the first `min_tokens` tokens: no stop may end in them
        self._parts: list[str] = []
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self.stop_reason is not None

    @property
    def _too_few_tokens(self) -> bool:
        return self._params.min_tokens > 0 and self._tokens <= self._params.min_tokens

    def append(self, token_id: int) -> str:
        """The text this token makes certain. Like a token that ends a request, a stop string counts only if a token
        after the first `min_tokens` completes it.

        A token behind a stop has no text: one step may bring several tokens.
        """
        self._tokens += 1
        if self._detokenizer is None or self.stopped:
            return ""
        self._pending += self._detokenizer.append(token_id)
        if self._too_few_tokens:
            given = self._give(len(self._pending) - held_back(self._pending, self._params.stop_strings))
            self._too_early = len(self._pending)
            return given
        return self._search()

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._pending += self._detokenizer.finish()
        if self._too_few_tokens:
            return self._give(len(self._pending))
        found = self._search()
        return found if self.stopped else found + self._give(len(self._pending))

    def _search(self) -> str:
        """Give out text up to a stop string, or up to what may become one."""
        stop = first_stop(self._pending, self._params.stop_strings, self._too_early)
        if stop is None:
            return self._give(len(self._pending) - held_back(self._pending, self._params.stop_strings))
        start, self.stop_reason = stop
        end = start + len(self.stop_reason) if self._params.include_stop_str_in_output else start
        given = self._give(end)
        self._pending = ""
        return given

    def _give(self, count: int) -> str:
        given, self._pending = self._pending[:count], self._pending[count:]
        self._too_early = max(0, self._too_early - count)
        self._parts.append(given)
        return given


def first_stop(text: str, stops: tuple[str, ...], after: int = 0) -> tuple[int, str] | None:
    """(start, stop) of the stop string that is complete first; of several, the longest. None if there is none.

    One that ends within the first `after` characters does not count.
    """
    starts = ((text.find(stop, max(0, after - len(stop) + 1)), stop) for stop in stops)
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found)[1:] if found else None


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string without completing it."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    ends = (size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in stops))
    return next(ends, 0)
