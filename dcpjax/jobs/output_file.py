"""The output: a file that holds whole records at every moment, whatever kills the process or fills the disk.

    append     one write at the end of the file; what a failed one left is cut off
    open       a lock against a second run, then the torn tail of an earlier one is cut off
    rewrite    a new file beside the old one, which takes its name in one step

Works on lines of bytes and asks `batch_record` what they are; knows nothing about requests.
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

from dcpjax.jobs.answered import Answered
from dcpjax.jobs.options import BatchOptions, Fsync
from dcpjax.jobs.record import BEGINNING, Stored, read_record

SYNC_SECONDS = 1.0  # of fsync="interval"
COPY_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputError(OSError):
    """The output cannot be written, or must not be; one sentence."""


@dataclass(frozen=True)
class Span:
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
            with _explained(self.path):
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
        """Force what was appended to the disk, unless told never to. Raises OutputError."""
        if self._unsynced and self._is_regular and self._fsync != "never":
            with _explained(self.path):
                os.fsync(self._file)
        self._unsynced, self._synced_at = False, self._clock()

    def records(self) -> Iterator[tuple[Stored, Span]]:
        """Every whole record. Raises OutputError for a line that is none; a torn last line is left out."""
        start = 0
        with _explained(self.path), open(os.dup(self._file), "rb") as reader:
            reader.seek(0)
            for number, data in enumerate(reader, start=1):
                stored = read_record(data) if data.endswith(b"\n") else None
                if stored is None and (data.endswith(b"\n") or not _is_torn(data)):
                    raise OutputError(
                        f"{self.path} must hold records of dcpjax batch only, but line {number} is none; "
                        "use another output, or `overwrite`"
                    )
                if stored is not None:
                    yield stored, Span(start, len(data))
                    start += len(data)

    def recover(self, *, retry_errors: bool) -> Answered:
        """See what an earlier run has done, and cut off what it left torn."""
        answered, self._size = Answered(), 0
        for stored, span in self.records():
            answered.add(stored)
            self._size = span.start + span.length
        with _explained(self.path):
            os.ftruncate(self._file, self._size)
        if not (retry_errors and answered.errors):
            return answered
        self._rewrite(span for stored, span in self.records() if not stored.is_error)
        return self.recover(retry_errors=False)

    def empty(self) -> None:
        """Throw away what an earlier run has done."""
        if not self._is_regular:
            return
        with _explained(self.path):
            os.ftruncate(self._file, 0)
        self._size = 0

    def order(self) -> None:
        """Sort the records by line of the input; until that is done the file stays as it was."""
        lines, starts, lengths = array("Q"), array("Q"), array("Q")
        for stored, span in self.records():
            lines.append(stored.line)
            starts.append(span.start)
            lengths.append(span.length)
        if any(one > next_one for one, next_one in pairwise(lines)):
            places = sorted(range(len(lines)), key=lines.__getitem__)
            self._rewrite(Span(starts[place], lengths[place]) for place in places)

    def close(self) -> None:
        """Give up the lock and leave the file as it is."""
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _write(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # a write may take only a part
            rest = rest[os.write(file, rest) :]

    def _cut_if_possible(self) -> None:
        """If it is not possible, the next run does it."""
        if self._is_regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)

    def _rewrite(self, spans: Iterable[Span]) -> None:
        """Keep these records, in this order. A reader sees the old file or the new one."""
        beside = f"{self.path}.rewriting"
        with _explained(self.path):
            file = os.open(beside, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(file, stat.S_IMODE(os.fstat(self._file).st_mode))
                _lock(file, self.path)
                size = self._copy(spans, file)
                os.fsync(file)
                os.replace(beside, self.path)
            except BaseException:
                os.close(file)
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise
            os.close(self._file)
            self._file, self._size = file, size
            _sync_folder(self.path)

    def _copy(self, spans: Iterable[Span], file: int) -> int:
        size = 0
        for span in spans:
            for start in range(span.start, span.start + span.length, COPY_BYTES):
                data = os.pread(self._file, min(COPY_BYTES, span.start + span.length - start), start)
                self._write(file, data)
                size += len(data)
        return size


def open_output(path: str | os.PathLike[str], options: BatchOptions, *, source: int) -> tuple[OutputFile, Answered]:
    """Open, lock and recover the output. `source` is the open input, which must be another file.

    What `overwrite` throws away is still there: call `empty` once nothing else can go wrong.

    Raises:
        ValueError: the output holds something and the options do not say what to do with it.
        OutputError: it cannot be written, is the input, or another run writes it.
    """
    real = os.path.realpath(path)  # a rewrite must replace the file, not a link to it
    with _explained(real):
        file = os.open(real, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    status = os.fstat(file)
    output = OutputFile(file, real, fsync=options.fsync, is_regular=stat.S_ISREG(status.st_mode))
    try:
        if not stat.S_ISREG(status.st_mode):
            _check_device(real, options)
            return output, Answered()
        if os.path.samestat(status, os.fstat(source)):
            raise OutputError(f"{real} must not be the input too, but is; use another output")
        _lock(file, real)
        _check_in_place(file, real)
        _sync_folder(real)
        return output, _begin(output, options, size=os.fstat(file).st_size)
    except BaseException:
        output.close()
        raise


def _begin(output: OutputFile, options: BatchOptions, *, size: int) -> Answered:
    if options.overwrite:
        return Answered()
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
    return data.startswith(BEGINNING[: len(data)]) or not data.strip(b"\0")


def _lock(file: int, path: str) -> None:
    """The lock goes with the process, however that ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"{path} must be written by one run at a time, but another one writes it; "
            "wait for that one or use another output"
        ) from None
    except OSError:
        return  # the file system has no locks, as some network ones


def _check_in_place(file: int, path: str) -> None:
    """The lock must be on the file that has the name: the run that held it before may have rewritten it."""
    with _explained(path):
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise OutputError(f"{path} must stay in place, but another run has just replaced it; run again")


def _sync_folder(path: str) -> None:
    """A new name is safe once its folder is on the disk."""
    with contextlib.suppress(OSError):  # not every file system can
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """The system's error as one sentence."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        full = error.errno in _FULL
        remedy = "free some space and go on with `resume`" if full else "use another output, or mend it and `resume`"
        raise OutputError(
            f"{path} must be a file that can be written, but is not: {error.strerror or error}; {remedy}"
        ) from error
