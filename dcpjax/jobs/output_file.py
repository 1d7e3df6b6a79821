"""The output: a file that holds whole records at every moment, whatever kills the process or fills the disk.

append     one write at the end of the file; what a failed one left is cut off
open       a lock against a second run, then the torn tail of an earlier one is cut off
rewrite    a new file next to the old one, which takes its name in one step
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from dcpjax.jobs.answered_lines import AnsweredLines
from dcpjax.jobs.options import BatchOptions, Fsync
from dcpjax.jobs.record import RECORD_START, RecordSummary, read_record

SYNC_SECONDS = 1.0  # of fsync="interval"
COPY_BYTES = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputError(OSError):
    """The output cannot be written, or must not be; the message is one sentence."""


@dataclass(frozen=True)
class ByteSpan:
    """Where a record lies in the file, in bytes."""

    start: int
    length: int


class OutputFile:
    """Whole records, one a line. Made by `open_output`."""

    def __init__(
        self, file: int, path: str, *, fsync: Fsync, is_regular: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self.path, self._fsync, self._is_regular, self._clock = file, path, fsync, is_regular, clock
        self._size = 0  # of the whole records
        self._unsynced, self._synced_at = False, clock()

    def append(self, record: bytes) -> None:
        """Add one record, which ends in a line feed. Raises OutputError, having cut off what was written of it."""
        assert record.find(b"\n") == len(record) - 1
        try:
            with _system_errors_as_sentences(self.path):
                self._write(self._file, record)
            self._size += len(record)
            self._unsynced = True
        except BaseException:
            self._cut_if_possible()
            raise
        self.sync_when_due()

    def sync_when_due(self) -> None:
        if self._fsync == "always" or self._clock() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Force what was appended to the disk, unless `fsync` is "never". Raises OutputError."""
        if self._unsynced and self._is_regular and self._fsync != "never":
            with _system_errors_as_sentences(self.path):
                os.fsync(self._file)
        self._unsynced, self._synced_at = False, self._clock()

    def records(self) -> Iterator[tuple[RecordSummary, ByteSpan]]:
        """Every whole record. Raises OutputError for a line that is none; a torn last line is left out."""
        start = 0
        with _system_errors_as_sentences(self.path), open(os.dup(self._file), "rb") as reader:
            reader.seek(0)
            for number, data in enumerate(reader, start=1):
                summary = read_record(data) if data.endswith(b"\n") else None
                if summary is None and (data.endswith(b"\n") or not _is_torn(data)):
                    raise OutputError(
                        f"{self.path} must hold records of dcpjax batch only, but line {number} is none; "
                        "use another output, or `overwrite`"
                    )
                if summary is not None:
                    yield summary, ByteSpan(start, len(data))
                    start += len(data)

    def recover(self, *, retry_errors: bool) -> AnsweredLines:
        """Read the records of an earlier run, and cut off a torn last line."""
        answered, self._size = AnsweredLines(), 0
        for summary, span in self.records():
            answered.add(summary)
            self._size = span.start + span.length
        with _system_errors_as_sentences(self.path):
            os.ftruncate(self._file, self._size)
        if not (retry_errors and answered.errors):
            return answered
        self.rewrite((self, span) for summary, span in self.records() if not summary.is_error)
        return self.recover(retry_errors=False)

    def empty(self) -> None:
        """Throw away the records of an earlier run."""
        if not self._is_regular:
            return
        with _system_errors_as_sentences(self.path):
            os.ftruncate(self._file, 0)
        self._size = 0

    def sort_by_line(self) -> None:
        """Sort the records by line of the input. The file is replaced in one step at the end."""
        lines, starts, lengths = array("Q"), array("Q"), array("Q")
        for summary, span in self.records():
            lines.append(summary.line)
            starts.append(span.start)
            lengths.append(span.length)
        if any(one > next_one for one, next_one in pairwise(lines)):
            places = sorted(range(len(lines)), key=lines.__getitem__)
            self.rewrite((self, ByteSpan(starts[place], lengths[place])) for place in places)

    def close(self) -> None:
        """Give up the lock and leave the file as it is."""
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _write(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # a write may take only a part
            rest = rest[os.write(file, rest) :]

    def _cut_if_possible(self) -> None:
        """Cut off a torn last record; if this fails too, the next run does it."""
        if self._is_regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)

    def rewrite(self, spans: "Iterable[tuple[OutputFile, ByteSpan]]") -> None:
        """Hold these records, of this file or others, in this order, and no more.

        A reader sees the old file or the new one, nothing between.
        """
        temporary = f"{self.path}.rewriting"
        with _system_errors_as_sentences(self.path):
            file = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(file, stat.S_IMODE(os.fstat(self._file).st_mode))
                _lock(file, self.path)
                size = self._copy(spans, file)
                os.fsync(file)
                os.replace(temporary, self.path)
            except BaseException:
                os.close(file)
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            os.close(self._file)
            self._file, self._size = file, size
            _sync_folder(self.path)

    def _copy(self, spans: "Iterable[tuple[OutputFile, ByteSpan]]", file: int) -> int:
        size = 0
        for source, span in spans:
            for start in range(span.start, span.start + span.length, COPY_BYTES):
                data = os.pread(source._file, min(COPY_BYTES, span.start + span.length - start), start)
                self._write(file, data)
                size += len(data)
        return size


def open_output(
    path: str | os.PathLike[str], options: BatchOptions, *, source: int
) -> tuple[OutputFile, AnsweredLines]:
    """Open, lock and recover the output. `source` is the open input, which must be another file.

    What `overwrite` throws away is still there: call `empty` once nothing else can go wrong.

    Raises:
        ValueError: the output holds something and the options do not say what to do with it.
        OutputError: it cannot be written, is the input, or another run writes it.
    """
    real = os.path.realpath(path)  # a rewrite must replace the file, not a link to it
    with _system_errors_as_sentences(real):
        file = os.open(real, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    status = os.fstat(file)
    output = OutputFile(file, real, fsync=options.fsync, is_regular=stat.S_ISREG(status.st_mode))
    try:
        if not stat.S_ISREG(status.st_mode):
            _check_device(real, options)
            return output, AnsweredLines()
        if os.path.samestat(status, os.fstat(source)):
            raise OutputError(f"{real} must not be the input too, but is; use another output")
        _lock(file, real)
        _check_in_place(file, real)
        _sync_folder(real)
        return output, _resume_or_start(output, options, size=os.fstat(file).st_size)
    except BaseException:
        output.close()
        raise


def open_part(path: str | os.PathLike[str]) -> OutputFile:
    """Open an output to read its records; it stays as it is, also a torn end. Raises OutputError as `open_output`."""
    real = os.path.realpath(path)
    try:
        file = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OutputError(f"{real} must be a file that can be read, but is not: {error.strerror}") from error
    output = OutputFile(file, real, fsync="never", is_regular=True)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OutputError(f"{real} must be a regular file of records, but is none")
        _lock(file, real)
    except BaseException:
        output.close()
        raise
    return output


def _resume_or_start(output: OutputFile, options: BatchOptions, *, size: int) -> AnsweredLines:
    if options.overwrite:
        return AnsweredLines()
    if size and not options.resume:
        raise ValueError(
            f"`output` must be a new file, but {output.path} holds {size:,} bytes; "
            "add `resume` to go on or `overwrite` to start afresh"
        )
    return output.recover(retry_errors=options.retry_errors)


def _check_device(path: str, options: BatchOptions) -> None:
    given = [name for name in ("resume", "retry_errors", "ordered") if getattr(options, name)]
    if given:
        raise ValueError(f"`{given[0]}` must come with a regular file, but {path} is none; use another output")


def _is_torn(data: bytes) -> bool:
    """The beginning of a record, or the zeros that some file systems leave after a power failure."""
    return data.startswith(RECORD_START[: len(data)]) or not data.strip(b"\0")


def _lock(file: int, path: str) -> None:
    """Keep other runs out. The system drops the lock when the process ends, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"{path} must be written by one run at a time, but another one writes it; "
            "wait for that one or use another output"
        ) from None
    except OSError:
        return  # some network file systems have no locks


def _check_in_place(file: int, path: str) -> None:
    """Check that `path` still names the locked file: the run that held the lock before may have replaced it."""
    with _system_errors_as_sentences(path):
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise OutputError(f"{path} must stay in place, but another run has just replaced it; run again")


def _sync_folder(path: str) -> None:
    """A new or changed name survives a power failure once its folder was synced."""
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _system_errors_as_sentences(path: str) -> Iterator[None]:
    """Turn the system's errors into OutputError."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        full = error.errno in _DISK_FULL
        remedy = "free some space and go on with `resume`" if full else "use another output, or mend it and `resume`"
        raise OutputError(
            f"{path} must be a file that can be written, but is not: {error.strerror or error}; {remedy}"
        ) from error
