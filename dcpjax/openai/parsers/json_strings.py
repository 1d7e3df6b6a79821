"""Finds marks in a text that arrives in pieces, but not inside the strings of JSON."""

import re

from dcpjax.frontend.text import first_stop, held_back

# The rest of a string up to its end, and the end: a quote, or a line break, which a JSON string cannot hold.
_STRING = re.compile(r'(?:[^"\\\n]|\\.)*', re.DOTALL)
QUOTE = '"'


class OutsideStrings:
    """Cuts a text behind each mark. Every character is looked at once, however the text is cut."""

    def __init__(self, *marks: str) -> None:
        self._stops = (QUOTE, *marks)
        self._in_string = False

    def take(self, text: str) -> tuple[str, str | None, str]:
        """(What comes before the first mark, the mark, what follows it).

        Without a mark: (what is certain to come before one, None, the end that may begin one). Pass that end again,
        in front of what follows.
        """
        start = 0
        while True:
            if self._in_string:
                start = _STRING.match(text, start).end()  # pyright: ignore[reportOptionalMemberAccess]
                if start == len(text) or text[start] == "\\":  # half of an escape
                    return text[:start], None, text[start:]
                start, self._in_string = start + 1, False
            found = first_stop(text, self._stops, start)
            if found is None:
                end = max(start, len(text) - held_back(text, self._stops))
                return text[:end], None, text[end:]
            place, mark = found
            if mark != QUOTE:
                return text[:place], mark, text[place + len(mark) :]
            start, self._in_string = place + 1, True
