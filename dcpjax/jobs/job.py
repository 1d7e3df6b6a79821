"""The loop of a batch job: submit lines while there is room, run a step, write the records of what has finished."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dcpjax.api.outputs import RequestOutput
from dcpjax.jobs.answered_lines import AnsweredLines
from dcpjax.jobs.batch_request import BatchRequest, parse_line, read_batch_request, read_custom_id
from dcpjax.jobs.custom_ids import SeenIds
from dcpjax.jobs.lines import Line, LineReader
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputFile
from dcpjax.jobs.progress import Progress
from dcpjax.jobs.record import encode_record, error_record, result_record
from dcpjax.jobs.shard import Shard
from dcpjax.openai.parsers.message import MessageFormats

WAIT_SECONDS = 0.2  # for a line from a pipe while nothing runs, before `stop` is asked again
LINES_PER_TURN = 512
MAX_BYTES_IN_FLIGHT = 1 << 28


class BatchEngineProtocol(Protocol):
    """What a job needs of an engine. The job chooses the keys."""

    def submit(self, key: int, request: BatchRequest) -> None:
        """Queue a request. Raises ValueError for one that cannot be run."""
        ...

    def advance(self) -> list[tuple[int, Sequence[RequestOutput]]]:
        """Run one step; the requests that it finished, with a result for each of their prompts."""
        ...

    def drop_waiting(self) -> list[int]:
        """Drop the requests that have not wholly begun; their keys."""
        ...

    def abort(self) -> None:
        """Drop everything that has not finished."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def formats(self) -> MessageFormats:
        """How the model writes tool calls and reasoning."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Numbers for the status file and the logs; the live line shows `cache_usage`."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchDefaults:
    """What is the same for every line of a job."""

    model: str  # the model's name in records
    sampling: Mapping[str, Any]  # fields of SamplingParams for what a line does not say
    seed: int  # the seeds of lines without one follow from it


class BatchJob:
    """One input, one output, one engine. The caller closes the files."""

    def __init__(
        self,
        *,
        lines: LineReader,
        file: OutputFile,
        answered: AnsweredLines,
        engine: BatchEngineProtocol,
        defaults: BatchDefaults,
        options: BatchOptions,
        progress: Progress,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop` is asked before every step and every line."""
        self._lines, self._file, self._answered, self._engine = lines, file, answered, engine
        self._defaults, self._options, self._stop, self._clock = defaults, options, stop, clock
        self._progress, self._statistics = progress, progress.statistics
        self._running: dict[int, tuple[BatchRequest, int]] = {}  # by line number; with the line's bytes
        self._bytes_running = 0  # of the lines that run
        self._seen_ids, self._shard = SeenIds(), Shard.of(options.shard)
        self._last_line = 0

    def run(self) -> None:
        """Answer every line, or stop when asked to; `statistics.state` says which. An exception aborts all requests."""
        self._statistics.start()
        try:
            while not self._is_done():
                self._submit_lines()
                if self._stop():
                    self._finish_running()
                    return
                self._run_step()
            self._end()
        except BaseException:
            self._engine.abort()
            raise

    def _is_done(self) -> bool:
        return self._lines.ended and not self._running

    def _submit_lines(self) -> None:
        for _ in range(LINES_PER_TURN):
            if not self._has_room() or self._stop():
                return
            line = self._lines.read(wait_seconds=0 if self._running else WAIT_SECONDS)
            if line is None:
                return
            self._last_line = line.number
            self._submit(line)

    def _has_room(self) -> bool:
        return len(self._running) < self._options.max_in_flight and self._bytes_running < MAX_BYTES_IN_FLIGHT

    def _submit(self, line: Line) -> None:
        """Submit a line, or write an error record if it cannot be run."""
        if not self._shard.has(line.number):
            self._pass_over(line)
            return
        if line.is_blank:
            self._statistics.blank += 1
            return
        is_answered, custom_id = self._answered.has(line), None
        try:
            entry = parse_line(line, max_line_bytes=self._options.max_line_bytes)
            custom_id = read_custom_id(entry)
            self._seen_ids.add(custom_id, line.number)
            if is_answered:
                return
            request = self._read_request(entry, line, custom_id)
            self._engine.submit(line.number, request)
        except (ValueError, RecursionError) as error:
            if not is_answered:
                self._write_error(line, custom_id, error)
        else:
            self._running[line.number] = request, line.size
            self._bytes_running += line.size

    def _pass_over(self, line: Line) -> None:
        """Of a line of another shard only its custom id matters: it must not be used again here."""
        self._shard.check_not_answered(line.number, self._answered.has(line))
        with contextlib.suppress(ValueError, RecursionError):  # reported where the line is answered
            custom_id = read_custom_id(parse_line(line, max_line_bytes=self._options.max_line_bytes))
            self._seen_ids.add(custom_id, line.number)

    def _read_request(self, entry: Mapping[str, Any], line: Line, custom_id: str | None) -> BatchRequest:
        sampling, seed = self._defaults.sampling, self._defaults.seed
        return read_batch_request(entry, line, custom_id=custom_id, defaults=sampling, seed=seed)

    def _run_step(self) -> None:
        if self._running:
            assert self._engine.num_unfinished, "the engine has lost requests"
            for number, outputs in self._engine.advance():
                self._write_result(number, outputs)
            self._statistics.engine = self._engine.stats()
        self._file.sync_when_due()
        self._statistics.running = len(self._running)
        self._progress.update()

    def _write_result(self, number: int, outputs: Sequence[RequestOutput]) -> None:
        request, size = self._running.pop(number)
        self._bytes_running -= size
        model, formats = self._defaults.model, self._engine.formats
        record = result_record(request, outputs, model=model, created=int(time.time()), formats=formats)
        self._file.append(encode_record(record))
        self._statistics.written += 1
        for output in outputs:
            self._statistics.add_tokens(output)
        if record["error"]:
            self._report_error(number, record["error"])

    def _write_error(self, line: Line, custom_id: str | None, error: Exception) -> None:
        message = "a line must be JSON, but is nested too deep" if isinstance(error, RecursionError) else str(error)
        code = getattr(error, "code", "invalid_request")
        record = error_record(line.number, line.fingerprint, custom_id, message=message, code=code)
        self._file.append(encode_record(record))
        self._statistics.written += 1
        self._report_error(line.number, record["error"])

    def _report_error(self, line: int, error: Mapping[str, Any]) -> None:
        self._statistics.add_error(line, error["message"])
        self._progress.report_error(line, error["code"], error["message"])

    def _finish_running(self) -> None:
        """Let requests that have begun finish within the grace period, and drop the rest."""
        self._statistics.state, end = "stopping", self._clock() + self._options.grace_seconds
        for number in self._engine.drop_waiting():
            del self._running[number]
        while self._running and self._clock() < end:
            self._run_step()
        self._engine.abort()
        self._running.clear()
        self._bytes_running = self._statistics.running = 0
        self._file.sync()
        self._statistics.state = "stopped"

    def _end(self) -> None:
        self._answered.check_length(self._last_line)
        self._file.sync()
        if self._options.ordered:
            self._file.sort_by_line()
        self._statistics.total, self._statistics.state = self._statistics.done, "finished"
