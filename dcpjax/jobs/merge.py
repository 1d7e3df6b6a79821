"""The outputs of a job's shards -> one output, in the order of the input, with every line once.

Memory is about 200 bytes a line. Nothing is written before all parts have been checked.
"""

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dcpjax.jobs.lines import LineReader
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import ByteSpan, OutputFile, open_output, open_part
from dcpjax.jobs.run import Path, open_input

MOST_NAMED = 10  # lines in an error message


@dataclass
class Records:
    """Where the parts' records lie: an entry in each array for a record."""

    lines: "array[int]" = field(default_factory=lambda: array("Q"))
    fingerprints: "array[int]" = field(default_factory=lambda: array("Q"))
    parts: "array[int]" = field(default_factory=lambda: array("L"))
    starts: "array[int]" = field(default_factory=lambda: array("Q"))
    lengths: "array[int]" = field(default_factory=lambda: array("Q"))
    errors: int = 0

    def read(self, part: OutputFile, number: int) -> None:
        for summary, span in part.records():
            self.lines.append(summary.line)
            self.fingerprints.append(int(summary.fingerprint, 16))
            self.parts.append(number)
            self.starts.append(span.start)
            self.lengths.append(span.length)
            self.errors += summary.is_error

    def in_order(self) -> list[int]:
        """Indices of the records by line of the input."""
        return sorted(range(len(self.lines)), key=self.lines.__getitem__)


@dataclass(frozen=True)
class Merged:
    """What a merge has written."""

    records: int
    errors: int  # of the records
    checked: bool  # against the input


def merge_parts(output: Path, parts: Sequence[Path], input: Path | None = None, *, overwrite: bool = False) -> Merged:
    """Join the outputs of all shards of a job into `output`, which appears whole or not at all.

    With `input`, the file that the job answers, every line of it must have its record. Without it only gaps between
    lines can be seen: one that is missing at the end cannot, and blank lines are taken for missing ones.

    Raises:
        ValueError: lines are missing, doubled or changed; the sentence names the first ones.
        OutputError: a part is still being written or holds something else, or the output cannot be written.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(path)) for path in parts]
        records = Records()
        for number, part in enumerate(opened):
            records.read(part, number)
        order = records.in_order()
        _check_doubled(records, order, opened)
        _check_missing(records, order, input)
        spans = ((opened[records.parts[i]], ByteSpan(records.starts[i], records.lengths[i])) for i in order)
        _write(output, spans, parts, overwrite)
        return Merged(len(order), records.errors, input is not None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[OutputFile]:
    part = open_part(path)
    try:
        yield part
    finally:
        part.close()


def _write(output: Path, spans: Iterator[tuple[OutputFile, ByteSpan]], parts: Sequence[Path], overwrite: bool) -> None:
    for path in parts:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(path, output):
                raise ValueError(f"the output of a merge must not be one of its parts, but {path} is; use a new file")
    with open_input(parts[0]) as source:
        file, _ = open_output(output, BatchOptions(overwrite=overwrite), source=source)
    try:
        file.rewrite(spans)
    finally:
        file.close()


def _check_doubled(records: Records, order: Sequence[int], opened: Sequence[OutputFile]) -> None:
    pairs = [(one, other) for one, other in pairwise(order) if records.lines[one] == records.lines[other]]
    if pairs:
        one, other = pairs[0]
        first, second = opened[records.parts[one]].path, opened[records.parts[other]].path
        raise ValueError(
            f"each line must be in one part, but {_named([records.lines[one] for one, _ in pairs])} more than once: "
            f"line {records.lines[one]} in {first} and {second}; leave a part out"
        )


def _check_missing(records: Records, order: Sequence[int], input: Path | None) -> None:
    held = {records.lines[i]: records.fingerprints[i] for i in order}
    last = records.lines[order[-1]] if order else 0
    if input is None:
        missing = [line for line in range(1, last + 1) if line not in held]
        hint = "; name the input with --input if these lines are blank"
    else:
        missing, hint = _not_answered(held, input), ""
    if missing:
        raise ValueError(
            f"each line must have its record in a part, but {_named(missing)} in none; name every part, and finish "
            f"each with `resume` first{hint}"
        )


def _not_answered(held: dict[int, int], input: Path) -> list[int]:
    """Lines of the input without a record. Raises ValueError for a record whose line has changed or is gone."""
    missing, seen = [], 0
    with open_input(input) as source:
        lines = LineReader(source, name=os.fspath(input), max_line_bytes=BatchOptions().max_line_bytes)
        while (line := lines.read()) is not None:
            fingerprint = held.get(line.number)
            seen += fingerprint is not None
            if fingerprint is None and not line.is_blank:
                missing.append(line.number)
            elif fingerprint not in (None, int(line.fingerprint, 16)):
                raise ValueError(f"the parts must answer this input, but line {line.number} of {input} has changed")
    if seen < len(held):
        raise ValueError(f"the parts must answer this input, but {input} has fewer lines; line {max(held)} is beyond")
    return missing


def _named(lines: Sequence[int]) -> str:
    """Lines 3, 4 and 8 are; line 3 is; lines 1, 2, ... and 90 more are."""
    if len(lines) == 1:
        return f"line {lines[0]} is"
    if len(lines) <= MOST_NAMED:
        return f"lines {', '.join(map(str, lines[:-1]))} and {lines[-1]} are"
    return f"lines {', '.join(map(str, lines[:MOST_NAMED]))} and {len(lines) - MOST_NAMED:,} more are"
