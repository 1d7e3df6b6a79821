"""The loop of a batch job: admit lines while there is room, run a step, write what is finished.

Joins reader, requests, engine and output; knows nothing about signals, terminals or models.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dcpjax.api.outputs import RequestOutput
from dcpjax.jobs.answered import Answered
from dcpjax.jobs.lines import Line, LineReader
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputFile
from dcpjax.jobs.progress import Progress
from dcpjax.jobs.record import encode_record, error_record, result_record
from dcpjax.jobs.seen import Seen
from dcpjax.openai.request import BatchRequest, parse_record, read_custom_id, read_request

WAIT_SECONDS = 0.2  # for a line from a pipe while nothing runs; a stop is noticed as often
LINES_PER_TURN = 512
MAX_BYTES_IN_FLIGHT = 1 << 28


class Completes(Protocol):
    """What a job needs of an engine. Keys are the job's."""

    def submit(self, key: int, request: BatchRequest) -> None:
        """Queue a request. Raises ValueError for one that cannot be run."""
        ...

    def advance(self) -> list[tuple[int, RequestOutput]]:
        """Run one step; the requests that it finished."""
        ...

    def abort(self) -> None:
        """Drop everything that has not finished."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    def stats(self) -> Mapping[str, float]:
        """For people to look at; `cache_usage` is shown."""
        ...


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What holds for every line: the model's name in records, fields of SamplingParams where a line does not say,
    and the seed of lines without one."""

    model: str
    defaults: Mapping[str, Any]
    seed: int


class BatchJob:
    """One input, one output, one engine. The files stay others' to close."""

    def __init__(
        self,
        *,
        lines: LineReader,
        file: OutputFile,
        answered: Answered,
        engine: Completes,
        serving: Serving,
        options: BatchOptions,
        progress: Progress,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop` is asked before every step and every line."""
        self._lines, self._file, self._answered, self._engine = lines, file, answered, engine
        self._serving, self._options, self._stop, self._clock = serving, options, stop, clock
        self._progress, self._tally = progress, progress.tally
        self._running: dict[int, tuple[BatchRequest, int]] = {}  # by line; with the line's bytes
        self._bytes = 0  # of the lines that run
        self._seen = Seen()
        self._last_line = 0

    def run(self) -> None:
        """Answer every line, or stop when asked to; `tally.state` tells which. Whatever is raised, nothing runs on."""
        self._tally.start()
        try:
            while not self._is_done():
                if self._stop():
                    self._wind_down()
                    return
                self._admit()
                self._advance()
            self._finish()
        except BaseException:
            self._engine.abort()
            raise

    def _is_done(self) -> bool:
        return self._lines.ended and not self._running

    def _admit(self) -> None:
        for _ in range(LINES_PER_TURN):
            if not self._has_room() or self._stop():
                return
            line = self._lines.read(wait_seconds=0 if self._running else WAIT_SECONDS)
            if line is None:
                return
            self._last_line = line.number
            self._take(line)

    def _has_room(self) -> bool:
        return len(self._running) < self._options.max_in_flight and self._bytes < MAX_BYTES_IN_FLIGHT

    def _take(self, line: Line) -> None:
        """Submit a line, or write down what is wrong with it."""
        if line.is_blank:
            self._tally.blank += 1
            return
        is_answered, custom_id = self._answered.has(line), None
        try:
            record = parse_record(line, max_line_bytes=self._options.max_line_bytes)
            custom_id = read_custom_id(record)
            self._seen.add(custom_id, line.number)
            if is_answered:
                return
            request = self._checked(record, line, custom_id)
            self._engine.submit(line.number, request)
        except (ValueError, RecursionError) as error:
            if not is_answered:
                self._refuse(line, custom_id, error)
        else:
            self._running[line.number] = request, line.size
            self._bytes += line.size

    def _checked(self, record: Mapping[str, Any], line: Line, custom_id: str | None) -> BatchRequest:
        defaults, seed = self._serving.defaults, self._serving.seed
        return read_request(record, line, custom_id=custom_id, defaults=defaults, seed=seed)

    def _advance(self) -> None:
        if self._running:
            assert self._engine.num_unfinished, "the engine has lost requests"
            for number, output in self._engine.advance():
                self._write(number, output)
            self._tally.engine = self._engine.stats()
        self._file.sync_when_due()
        self._tally.running = len(self._running)
        self._progress.update()

    def _write(self, number: int, output: RequestOutput) -> None:
        request, size = self._running.pop(number)
        self._bytes -= size
        record = result_record(request, output, model=self._serving.model, created=int(time.time()))
        self._file.append(encode_record(record))
        self._tally.written += 1
        self._tally.take(output)
        if record["error"]:
            self._note(number, record["error"])

    def _refuse(self, line: Line, custom_id: str | None, error: Exception) -> None:
        message = "a line must be JSON, but is nested too deep" if isinstance(error, RecursionError) else str(error)
        code = getattr(error, "code", "invalid_request")
        record = error_record(line.number, line.fingerprint, custom_id, message=message, code=code)
        self._file.append(encode_record(record))
        self._tally.written += 1
        self._note(line.number, record["error"])

    def _note(self, line: int, error: Mapping[str, Any]) -> None:
        self._tally.take_error(line, error["message"])
        self._progress.note_error(line, error["code"], error["message"])

    def _wind_down(self) -> None:
        """Finish what runs within the grace period, drop the rest."""
        self._tally.state, end = "stopping", self._clock() + self._options.grace_seconds
        while self._running and self._clock() < end:
            self._advance()
        self._engine.abort()
        self._file.sync()
        self._tally.state = "stopped"

    def _finish(self) -> None:
        self._answered.check_length(self._last_line)
        self._file.sync()
        if self._options.ordered:
            self._file.order()
        self._tally.total, self._tally.state = self._tally.done, "finished"
