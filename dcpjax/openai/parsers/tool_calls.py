"""Tool calls that a model writes in one of the `formats`, found while the text arrives.

A call is given out when its end has come and it is well formed: before that nobody can know that it is one. What is
malformed is content, as it was written. Whitespace beside a call is no content.
"""

from dcpjax.frontend.text import first_stop, held_back
from dcpjax.openai.parsers.deltas import CallArguments, CallStart, Content, Delta
from dcpjax.openai.parsers.formats import Call, CallFormat
from dcpjax.openai.parsers.json_strings import OutsideStrings

PIECE = 1024  # characters that are looked at together: a long text takes no longer per character than a short one


class CallParser:
    """Text in, content and calls out. The deltas of a text add up to the same however it is cut."""

    def __init__(self, form: CallFormat, *, call_ids: str, most_calls: int | None = None) -> None:
        """
        Args:
            call_ids: begins the ids of calls that the model has not named; the index follows.
            most_calls: calls after these many are content.
        """
        self._form, self._call_ids, self._most_calls = form, call_ids, most_calls
        self._rest = ""  # text that may begin a mark
        self._blank: list[str] = []  # whitespace and marks of `before`: content only if no call follows
        self._may_open = True  # no content since the start, a call or a mark of `before`
        self._after_call = False  # nothing but whitespace since a call
        self._body: _Body | None = None  # of the call that has begun
        self._ids = set[str]()

    @property
    def has_calls(self) -> bool:
        """Whether a call has been given out."""
        return bool(self._ids)

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text makes certain."""
        deltas: list[Delta] = []
        for start in range(0, len(text), PIECE):
            self._rest += text[start : start + PIECE]
            while self._read_body(deltas) if self._body else self._read_content(deltas):
                pass
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, once no more text comes. A call that lacks no more than its closing mark is one."""
        deltas: list[Delta] = []
        if self._body:
            self._end_cut_body(self._body, deltas)
        self._say(self._rest, deltas)
        self._rest = ""
        if self._blank and not self._after_call:
            deltas.append(Content("".join(self._blank)))
        self._blank.clear()
        return deltas

    def _read_content(self, deltas: list[Delta]) -> bool:
        """Go on to the next mark; False if there is none yet."""
        marks = self._possible_marks()
        found = first_stop(self._rest, marks)
        if found is None:
            end = len(self._rest) - held_back(self._rest, marks)
            self._say(self._rest[:end], deltas)
            self._rest = self._rest[end:]
            return False
        start, mark = found
        text, self._rest = self._rest[:start], self._rest[start:]
        self._say(text, deltas)
        if mark in self._possible_marks():  # the text before it may mean that it is none
            self._rest = self._rest[len(mark) :]
            self._pass(mark)
        return True

    def _possible_marks(self) -> tuple[str, ...]:
        form = self._form
        opening = (form.opening,) if form.anywhere or self._may_open else ()
        return *form.before, *opening, *(form.after if self._after_call else ())

    def _pass(self, mark: str) -> None:
        if mark == self._form.opening:
            self._body = _Body(self._form)
            return
        if self._after_call:
            self._blank.clear()
        if mark in self._form.before:
            self._blank.append(mark)
            self._may_open, self._after_call = True, False

    def _read_body(self, deltas: list[Delta]) -> bool:
        """Go on to the end of the call; False if it has not come yet."""
        body = self._body
        assert body is not None
        mark, self._rest = body.take(self._rest)
        if mark is None:
            return False
        self._end_body(body.text, mark, deltas)
        self._body = _Body(self._form) if mark == self._form.opening else None
        return True

    def _end_body(self, text: str, mark: str, deltas: list[Delta]) -> None:
        """Give out the call that ends with its closing mark, or before the opening mark of another one."""
        call = self._form.read(text)
        if call is None or len(self._ids) == self._most_calls:
            self._say(self._form.opening + text + (mark if mark != self._form.opening else ""), deltas)
        else:
            self._give(call, deltas)

    def _end_cut_body(self, body: "_Body", deltas: list[Delta]) -> None:
        """The same where the text ends within a call."""
        text, self._rest, self._body = body.text + self._rest, "", None
        end = len(text) - held_back(text, (self._form.closing,))
        self._end_body(text[:end], text[end:], deltas)

    def _give(self, call: Call, deltas: list[Delta]) -> None:
        index = len(self._ids)
        named = call.id is not None and call.id not in self._ids
        call_id = call.id if named and call.id else f"{self._call_ids}_{index}"
        self._ids.add(call_id)
        deltas += [CallStart(index, call_id, call.name), CallArguments(index, call.arguments)]
        self._blank.clear()
        self._may_open = self._after_call = True

    def _say(self, text: str, deltas: list[Delta]) -> None:
        """Content, whose last whitespace is held back."""
        said = text.rstrip()
        if said:
            blank = "".join(self._blank)
            deltas.append(Content((blank + said).lstrip() if self._after_call else blank + said))
            self._blank.clear()
            self._may_open = self._after_call = False
        if len(text) > len(said):
            self._blank.append(text[len(said) :])


class _Body:
    """The text of a call as it grows."""

    def __init__(self, form: CallFormat) -> None:
        self._form, self._outside = form, OutsideStrings(form.opening, form.closing)
        self._parts: list[str] = []
        self._depth = 0

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def take(self, text: str) -> tuple[str | None, str]:
        """(The mark that ends the body, what follows it), or (None, what may begin a mark)."""
        while True:
            part, mark, text = self._outside.take(text)
            self._parts.append(part)
            if mark is None or not self._form.nested or (mark == self._form.closing and not self._depth):
                return mark, text
            self._parts.append(mark)
            self._depth += 1 if mark == self._form.opening else -1
