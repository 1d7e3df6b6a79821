"""A share of the input's lines: 2/4 is lines 2, 6, 10 and so on.

Lines are dealt out one by one, so that the shares of an input that is sorted by length take about as long.
"""

import re
from dataclasses import dataclass

_FORM = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)


@dataclass(frozen=True)
class Shard:
    """Share `index` of `count`, counted from 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str | None) -> "Shard":
        """From "2/4"; None is all lines. Raises ValueError, as a sentence about `shard`."""
        if text is None:
            return cls()
        found = _FORM.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"`shard` must be I/N, as in 1/4, but is {text!r}")
        index, count = int(found[1]), int(found[2])
        if not 1 <= index <= count:
            nearest = f"{min(max(1, index), max(1, count))}/{max(1, count)}"
            raise ValueError(f"`shard` must be I/N with I from 1 to N, but is {text}; use {nearest}")
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, line: int) -> bool:
        return self.owner(line) == self.index

    def owner(self, line: int) -> int:
        """The index of the share that a line is in."""
        return (line - 1) % self.count + 1

    def check_not_answered(self, line: int, is_answered: bool) -> None:
        """Raise ValueError if the output of this share answers a line of another one."""
        if not is_answered:
            return
        raise ValueError(
            f"`resume` must go on with the same lines, but the output answers line {line}, which is not in "
            f"`shard`={self}; use the `shard` that the output was begun with, or another output"
        )
