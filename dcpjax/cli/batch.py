"""`dcpjax batch`: reads a JSONL file of requests, writes a JSONL file of results; `--resume` continues a stopped job.

`dcpjax batch merge` joins the results of a job's shards, see `batch_merge`.

Exit codes: 0 every line has a record, which may be an error (1 with --fail-on-errors); 2 wrong flags or input; 3 the
output cannot be written; 130 and 143 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.cli import batch_merge
from dcpjax.cli.flags import Flags, Parser, add_options, field_helps, flag
from dcpjax.cli.model_flags import SEED_HELP, ModelArguments, add_engine_flags, add_model_flag, model_defaults
from dcpjax.cli.verbosity import add_verbosity_flags, print_stderr
from dcpjax.jobs.job import BatchDefaults, BatchEngineProtocol
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputError
from dcpjax.jobs.run import BatchFiles, OpenEngine, run_files
from dcpjax.jobs.statistics import JobStatistics
from dcpjax.jobs.stop import StopOnSignal
from dcpjax.openai.request import DEFAULT_MAX_TOKENS

COMPLETION_TOKENS = DEFAULT_MAX_TOKENS["completion"] or 1
_NO_FLAGS = ("logit_bias", "structured_outputs", "detokenize")  # can only be set in the lines of the input
# What error messages call an option -> its name on the command line
_ARGUMENT_NAMES = {"input": "INPUT", "status_file": "--status-file"}


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        metavar="FILE",
        help="file for the results, a record per input line; required",
    )
    parser.add_argument(
        "-i", "--input", "--input-file", metavar="FILE", help="the input file, instead of INPUT; - is standard input"
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model in the records (default: the value of --model)"
    )
    parser.add_argument(
        "--status-file",
        metavar="FILE",
        help="write the progress of the job to this JSON file, for other programs",
    )
    parser.add_argument(
        "--json-logs",
        action="store_true",
        help="print progress, errors and summary as JSON lines on standard error",
    )
    parser.add_argument(
        "--fail-on-errors",
        action=argparse.BooleanOptionalAction,
        help="exit with 1 if any record is an error (default: False; the job is complete, and a scheduler need not run "
        "it again)",
    )
    helps = {name: _quoted_names_to_flags(text) for name, text in field_helps(BatchOptions).items()}
    add_options(parser, "the job and its files", BatchOptions, explain=helps)
    add_verbosity_flags(parser)
    _add_model_flags(parser)


def _add_model_flags(parser: Parser) -> None:
    """As for other commands, but with OpenAI's defaults for what neither a line, a flag nor the model sets."""
    add_model_flag(parser)
    max_tokens = f"{COMPLETION_TOKENS} for completions, up to the model length for chats"
    add_options(
        parser,
        "sampling, for what a line does not set itself",
        SamplingParams,
        leave_out=_NO_FLAGS,
        explain={"seed": SEED_HELP},
        defaults={**model_defaults(), "max_tokens": max_tokens},
    )
    add_engine_flags(parser)


def run(flags: Flags, open_engine: OpenEngine | None = None) -> int:
    """Run the job and return the exit code. `open_engine` replaces the model of the flags."""
    try:
        return batch_merge.run(flags) if batch_merge.is_asked(flags) else _run(flags, open_engine)
    except OutputError as error:
        print_stderr(f"dcpjax: error: {_quoted_names_to_flags(str(error))}")
        return 3
    except ValueError as error:
        error.args = tuple(_quoted_names_to_flags(part) if isinstance(part, str) else part for part in error.args)
        raise


def _run(flags: Flags, open_engine: OpenEngine | None) -> int:
    arguments = ModelArguments.from_flags(flags, max_tokens=COMPLETION_TOKENS)
    files, options = _files(flags), BatchOptions.from_options(flags.options(BatchOptions))
    statistics = JobStatistics()
    advice, json_logs = f"to go on: {resume_line(sys.argv)}", flags.get("json_logs", False)
    quiet = flags.get("quiet", False)
    open_engine = open_engine or _opener(arguments, options, progress=not json_logs and not quiet)
    with StopOnSignal(advice=advice, grace_seconds=options.grace_seconds) as stop:
        try:
            run_files(
                files,
                options,
                _defaults(flags, arguments),
                open_engine,
                statistics=statistics,
                shown=not quiet,
                json_logs=json_logs,
                stop=stop.requested,
            )
        except Exception:
            if statistics.started_at is not None:
                print_stderr(f"dcpjax: {advice}")
            raise
    if statistics.state == "stopped":
        print_stderr(f"dcpjax: stopped. {advice}")
        return stop.exit_code
    return int(bool(statistics.errors) and flags.get("fail_on_errors", False))


def _opener(arguments: ModelArguments, job: BatchOptions, *, progress: bool) -> OpenEngine:
    def open_engine() -> tuple[BatchEngineProtocol, Mapping[str, Any]]:
        from dcpjax.jobs.batch_engine import open_batch_engine

        return open_batch_engine(arguments.model, arguments.engine, job, progress=progress)

    return open_engine


def _files(flags: Flags) -> BatchFiles:
    inputs = [*flags.positionals, *filter(None, [flags.get("input")])]
    if len(inputs) != 1:
        has = f"more: {', '.join(inputs[:3])}" if inputs else "none"
        raise ValueError(f"batch must have one input, but has {has}; use dcpjax batch in.jsonl -o out.jsonl --model M")
    if not flags.get("output"):
        raise ValueError("--output must name the file for the results, but is not given; use --output out.jsonl")
    return BatchFiles(input=inputs[0], output=flags.get("output"), status=flags.get("status_file"))


def _defaults(flags: Flags, arguments: ModelArguments) -> BatchDefaults:
    given = flags.options(SamplingParams)
    seed = given.pop("seed", None) or 0
    return BatchDefaults(model=flags.get("served_model_name", arguments.model), sampling=given, seed=seed)


def _quoted_names_to_flags(sentence: str) -> str:
    """Replace names in backticks by flags: "`max_in_flight` must ..." -> "--max-in-flight must ..."."""
    return re.sub(r"`([a-z_]+)`", lambda match: _ARGUMENT_NAMES.get(match[1], flag(match[1])), sentence)


def resume_line(argv: list[str]) -> str:
    """The command line that was typed, with --resume."""
    arguments = [argument for argument in argv[1:] if argument not in ("--resume", "--overwrite")]
    if arguments[:1] == ["batch"]:
        arguments.pop(0)
    return shlex.join(["dcpjax", "batch", "--resume", *arguments])
