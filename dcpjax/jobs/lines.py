"""Lines of the input, one at a time, with a number and a fingerprint each.

Holds at most one line in memory, and of a line over the cap no more than the cap.
"""

import codecs
import os
import select
from dataclasses import dataclass
from hashlib import blake2b

CHUNK = 1 << 18  # bytes of one read
FINGERPRINT_BYTES = 8
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the input.

    `data` lacks the line's end and a byte order mark before it, and is None if the line is over the cap.
    `fingerprint` is the hash, in hexadecimal, of every byte of the line but its line feed.
    """

    number: int
    data: bytes | None
    size: int
    fingerprint: str

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class LineReader:
    """Reads a file descriptor and leaves it open. `name` is what errors call it."""

    def __init__(self, file: int, *, name: str, max_line_bytes: int) -> None:
        self._file, self._name, self._max_line_bytes = file, name, max_line_bytes
        self._buffer = bytearray()
        self._searched = 0  # leading bytes of the buffer without a line feed
        self._dropped = 0  # bytes of a line over the cap that were hashed and dropped
        self._hash = blake2b(digest_size=FINGERPRINT_BYTES)
        self._number = 0
        self._at_end = False

    @property
    def ended(self) -> bool:
        """True once every line has been given out."""
        return self._at_end and not self._buffer and not self._dropped

    def read(self, *, wait_seconds: float | None = None) -> Line | None:
        """The next line; None at the end of the input (see `ended`) or if none came within `wait_seconds`.

        Raises ValueError if the input is UTF-16.
        """
        while not self.ended:
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0 or self._at_end:
                return self._pop_line(end if end >= 0 else len(self._buffer))
            self._searched = len(self._buffer)
            self._drop_over_cap()
            if wait_seconds is not None and not select.select([self._file], [], [], wait_seconds)[0]:
                return None
            self._fill()
        return None

    def _fill(self) -> None:
        is_beginning = self._number == 0 and not self._dropped and len(self._buffer) < 2
        chunk = os.read(self._file, CHUNK)
        self._buffer += chunk
        self._at_end = not chunk
        if is_beginning and self._buffer.startswith(_UTF16):
            raise ValueError(
                f"the input must be UTF-8, but {self._name} begins as UTF-16 does; "
                f"use iconv -f UTF-16 -t UTF-8 {self._name}"
            )

    def _drop_over_cap(self) -> None:
        if self._dropped or len(self._buffer) > self._max_line_bytes:
            self._hash.update(self._buffer)
            self._dropped += len(self._buffer)
            self._buffer.clear()
            self._searched = 0

    def _pop_line(self, end: int) -> Line:
        """The line that ends after the buffer's first `end` bytes."""
        data = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._hash.update(data)
        self._number += 1
        size = self._dropped + end
        line = Line(
            number=self._number,
            data=None if size > self._max_line_bytes else data.removeprefix(codecs.BOM_UTF8).removesuffix(b"\r"),
            size=size,
            fingerprint=self._hash.hexdigest(),
        )
        self._searched = self._dropped = 0
        self._hash = blake2b(digest_size=FINGERPRINT_BYTES)
        return line
