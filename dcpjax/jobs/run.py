"""A batch job from the names of its files: open them, see what is done, open the model, run the loop, close.

The model is opened last, and not at all if every line is answered already.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcpjax.api.checks import check_option_names, option_names
from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.vllm_options import ENGINE, SAMPLING, without_neutral
from dcpjax.jobs.answered_lines import AnsweredLines, count_lines
from dcpjax.jobs.job import BatchDefaults, BatchEngineProtocol, BatchJob
from dcpjax.jobs.lines import LineReader
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputFile, open_output
from dcpjax.jobs.progress import Progress
from dcpjax.jobs.shard import Shard
from dcpjax.jobs.statistics import JobStatistics
from dcpjax.jobs.status_file import StatusFile
from dcpjax.openai.parsers.message import MessageFormats

STANDARD_INPUT = 0

# Returns the engine, and the fields of SamplingParams that the model sets for what neither line nor user says.
OpenEngine = Callable[[], tuple[BatchEngineProtocol, Mapping[str, Any]]]
Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class BatchFiles:
    """Names of files. `input` may be "-", standard input; `status` is written for other programs to read."""

    input: Path
    output: Path
    status: Path | None = None


def run_batch(
    input: Path,
    output: Path,
    model: Path,
    *,
    status_file: Path | None = None,
    progress: bool = True,
    **options: Any,
) -> JobStatistics:
    """Answer every line of a JSONL file of requests, in the form of OpenAI's batch files. Returns what was done.

    `options` are those of `BatchOptions`, `EngineConfig` and `SamplingParams`; the last are defaults for lines that do
    not say otherwise. Each line gives one record: its result, or an error. The output holds whole records at every
    moment, so that `resume=True` can continue after any interruption.

    Raises:
        ValueError: a mistake in the options, or an output that exists without `resume` or `overwrite`.
        OutputError: the output cannot be written; what is done is kept.
    """
    options = without_neutral(options, {**ENGINE, **SAMPLING})
    names = {kind: option_names(kind) for kind in (BatchOptions, EngineConfig, SamplingParams)}
    check_option_names(options, [name for listed in names.values() for name in listed])
    batch, engine, sampling = (
        {name: value for name, value in options.items() if name in listed} for listed in names.values()
    )
    EngineConfig.from_options(engine)
    SamplingParams.from_options(sampling)

    def open_engine() -> tuple[BatchEngineProtocol, Mapping[str, Any]]:
        from dcpjax.jobs.batch_engine import open_batch_engine

        return open_batch_engine(model, engine, job, progress=progress)

    statistics, job = JobStatistics(), BatchOptions.from_options(batch)
    run_files(
        BatchFiles(input=input, output=output, status=status_file),
        job,
        BatchDefaults(model=os.fspath(model), seed=sampling.pop("seed", None) or 0, sampling=sampling),
        open_engine,
        statistics=statistics,
        shown=progress,
    )
    return statistics


def run_files(
    files: BatchFiles,
    options: BatchOptions,
    defaults: BatchDefaults,
    open_engine: OpenEngine,
    *,
    statistics: JobStatistics,
    shown: bool = True,
    json_logs: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run a job; `run_batch` and the command share this.

    Whatever is raised, the output holds whole records and `statistics` says how far the job came.
    """
    with open_input(files.input) as source, _opened_output(files.output, options, source) as (file, answered):
        _check_status_path(files, file)
        facts = {"input": os.fspath(files.input), "output": file.path, "model": defaults.model}
        status = None if files.status is None else StatusFile(files.status, facts)
        progress = Progress(statistics, shown=shown, json_logs=json_logs, status_file=status)
        try:
            statistics.resumed, statistics.resumed_errors = answered.count, answered.errors
            statistics.total = _count(source, files, options, answered)
            engine, own = (_NoEngine(), {}) if statistics.total == statistics.resumed else open_engine()
            if options.overwrite:
                file.empty()
            BatchJob(
                lines=_reader(source, files, options),
                file=file,
                answered=answered,
                engine=engine,
                defaults=replace(defaults, sampling={**own, **defaults.sampling}),
                options=options,
                progress=progress,
                stop=stop,
            ).run()
        except BaseException:
            statistics.state = "failed"
            raise
        finally:
            progress.finish(file.path)


@contextlib.contextmanager
def open_input(path: Path) -> Iterator[int]:
    """A file descriptor to read from. Raises ValueError if there is none."""
    if path == "-":
        yield STANDARD_INPUT
        return
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        is_folder = stat.S_ISDIR(os.fstat(source).st_mode)
    except OSError as error:
        raise ValueError(f"`input` must be a readable file, but {path} is not: {error.strerror}") from error
    try:
        if is_folder:
            raise ValueError(f"`input` must be a file of lines, but {path} is a folder; name a file in it")
        yield source
    finally:
        os.close(source)


@contextlib.contextmanager
def _opened_output(path: Path, options: BatchOptions, source: int) -> Iterator[tuple[OutputFile, AnsweredLines]]:
    file, answered = open_output(path, options, source=source)
    try:
        yield file, answered
    finally:
        file.close()


def _reader(source: int, files: BatchFiles, options: BatchOptions) -> LineReader:
    name = "standard input" if files.input == "-" else os.fspath(files.input)
    return LineReader(source, name=name, max_line_bytes=options.max_line_bytes)


def _count(source: int, files: BatchFiles, options: BatchOptions, answered: AnsweredLines) -> int | None:
    """Lines to answer, or None if the input can be read only once. Raises ValueError as `count_lines`."""
    if not stat.S_ISREG(os.fstat(source).st_mode):
        return None
    start = os.lseek(source, 0, os.SEEK_CUR)
    try:
        return count_lines(_reader(source, files, options), answered, Shard.of(options.shard))
    finally:
        os.lseek(source, start, os.SEEK_SET)


class _NoEngine:
    """An engine for a job in which nothing is left to run."""

    num_unfinished, formats = 0, MessageFormats()

    def submit(self, key: int, request: Any) -> None:
        raise AssertionError(f"line {key} has its answer already")

    def advance(self) -> list[Any]:
        return []

    def drop_waiting(self) -> list[int]:
        return []

    def abort(self) -> None:
        pass

    def stats(self) -> Mapping[str, float]:
        return {}


def _check_status_path(files: BatchFiles, file: OutputFile) -> None:
    if files.status is not None and os.path.realpath(files.status) in (os.path.realpath(files.input), file.path):
        raise ValueError(f"`status_file` must be a file of its own, but {files.status} is the input or the output")
