"""Which lines of the input already have a record in the output, and whether they are still the same lines."""

from array import array

from dcpjax.jobs.lines import Line, LineReader
from dcpjax.jobs.record import RecordSummary
from dcpjax.jobs.shard import Shard

_NONE = 0  # no record; a real fingerprint is 0 with a probability of 2**-64


class AnsweredLines:
    """Line number -> fingerprint of the line when it was answered. Eight bytes a line."""

    def __init__(self) -> None:
        self._fingerprints = array("Q")
        self.count = 0
        self.errors = 0

    @property
    def last_line(self) -> int:
        return len(self._fingerprints)

    def add(self, record: RecordSummary) -> None:
        """Raises ValueError for a second record of a line."""
        missing = record.line - len(self._fingerprints)
        if missing > 0:
            self._fingerprints.extend([_NONE] * missing)
        if self._fingerprints[record.line - 1] != _NONE:
            raise ValueError(
                f"the output must answer each line once, but answers line {record.line} twice; "
                "use another output, or `overwrite`"
            )
        self._fingerprints[record.line - 1] = int(record.fingerprint, 16)
        self.count += 1
        self.errors += record.is_error

    def has(self, line: Line) -> bool:
        """Raises ValueError if a different line was answered under this number."""
        found = self._fingerprints[line.number - 1] if line.number <= self.last_line else _NONE
        if found not in (_NONE, int(line.fingerprint, 16)):
            raise ValueError(
                f"`resume` must be given the input that the output answers, but line {line.number} has changed "
                "since; use that input, another output, or `overwrite`"
            )
        return found != _NONE

    def check_length(self, lines: int) -> None:
        """Raises ValueError if the output answers a line beyond the input's `lines`."""
        if lines < self.last_line:
            raise ValueError(
                f"`resume` must be given the input that the output answers, but that had {self.last_line:,} lines "
                f"or more and this one has {lines:,}; use that input, another output, or `overwrite`"
            )


def count_lines(lines: LineReader, answered: AnsweredLines, shard: Shard) -> int:
    """The number of the shard's lines that are not blank.

    Raises ValueError if one that was answered has changed, is gone or is in another shard.
    """
    count, last = 0, 0
    while (line := lines.read()) is not None:
        last = line.number
        if line.is_blank:
            continue
        is_answered, is_own = answered.has(line), shard.has(line.number)
        shard.check_not_answered(line.number, is_answered and not is_own)
        count += is_own
    answered.check_length(last)
    return count
