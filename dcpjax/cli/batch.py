"""`dcpjax batch`: a JSONL file of requests in, a JSONL file of results out, safe against whatever stops it.

0 every line has a record, errors among them (--fail-on-errors: 1)    2 refused    3 trouble with the output
130, 143 stopped by Ctrl-C or SIGTERM; the same line with --resume goes on
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.cli.flags import Flags, Parser, add_options, field_helps, flag
from dcpjax.cli.model import MODELS_OWN, SEED, Choice, add_loudness_flags, say
from dcpjax.jobs.job import BatchDefaults, BatchEngineProtocol
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputError
from dcpjax.jobs.run import BatchFiles, OpenEngine, run_files
from dcpjax.jobs.statistics import JobStatistics
from dcpjax.jobs.stop import StopOnSignal
from dcpjax.openai.request import DEFAULT_MAX_TOKENS

COMPLETION_TOKENS = DEFAULT_MAX_TOKENS["completion"] or 1
_LINES_ONLY = ("logit_bias", "structured_outputs", "detokenize")
_WORDS = {"input": "INPUT", "status_file": "--status-file"}  # what errors call an option -> what was typed


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "-o", "--output", "--output-file", metavar="FILE", help="where each line's record goes; required"
    )
    parser.add_argument("-i", "--input", "--input-file", metavar="FILE", help="INPUT, as a flag; - is standard input")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="what records call the model (default: as --model says)"
    )
    parser.add_argument(
        "--status-file", metavar="FILE", help="a JSON object that tells other programs how far the job is"
    )
    parser.add_argument(
        "--json-logs", action="store_true", help="progress, errors and summary as JSON lines on standard error"
    )
    parser.add_argument(
        "--fail-on-errors",
        action=argparse.BooleanOptionalAction,
        help="exit with 1 if a record is an error (default: False: a job that ends has done its work, and a "
        "scheduler need not run it again)",
    )
    helps = {name: spell(text) for name, text in field_helps(BatchOptions).items()}
    add_options(parser, "files of the job", BatchOptions, explain=helps)
    add_loudness_flags(parser)
    _add_model_flags(parser)


def _add_model_flags(parser: Parser) -> None:
    """As other commands have them, but what neither line, flag nor model says is OpenAI's default."""
    parser.add_argument(
        "--model",
        help="a folder in Hugging Face form, a .gguf file, a hub id, or smollm2-135m to try one out; required",
    )
    own = {name: f"the model's own, else {getattr(SamplingParams, name)}" for name in MODELS_OWN}
    add_options(
        parser,
        "choosing tokens, for lines that do not say",
        SamplingParams,
        leave_out=_LINES_ONLY,
        explain={"seed": SEED},
        defaults={**own, "max_tokens": f"{COMPLETION_TOKENS} for completions, up to the model length for chats"},
    )
    add_options(parser, "running the model", EngineConfig, leave_out=["seed", "hf_overrides"])


def run(flags: Flags, open_engine: OpenEngine | None = None) -> int:
    """See the module's docstring for the exit code. `open_engine` replaces the model that the flags name."""
    try:
        return _run(flags, open_engine)
    except OutputError as error:
        say(f"dcpjax: error: {spell(str(error))}")
        return 3
    except ValueError as error:
        error.args = tuple(spell(part) if isinstance(part, str) else part for part in error.args)
        raise


def _run(flags: Flags, open_engine: OpenEngine | None) -> int:
    choice = Choice.from_flags(flags, max_tokens=COMPLETION_TOKENS)
    files, options = _files(flags), BatchOptions.from_options(flags.options(BatchOptions))
    statistics = JobStatistics()
    advice, json_logs = f"to go on: {resume_line(sys.argv)}", flags.get("json_logs", False)
    quiet = flags.get("quiet", False)
    open_engine = open_engine or _opener(choice, progress=not json_logs and not quiet)
    with StopOnSignal(advice=advice) as stop:
        try:
            run_files(
                files,
                options,
                _defaults(flags, choice),
                open_engine,
                statistics=statistics,
                shown=not quiet,
                json_logs=json_logs,
                stop=stop.requested,
            )
        except Exception:
            if statistics.started_at is not None:
                say(f"dcpjax: {advice}")
            raise
    if statistics.state == "stopped":
        say(f"dcpjax: stopped. {advice}")
        return stop.exit_code
    return int(bool(statistics.errors) and flags.get("fail_on_errors", False))


def _opener(choice: Choice, *, progress: bool) -> OpenEngine:
    def open_engine() -> tuple[BatchEngineProtocol, Mapping[str, Any]]:
        from dcpjax.jobs.batch_engine import open_batch_engine

        return open_batch_engine(choice.model, choice.engine, progress=progress)

    return open_engine


def _files(flags: Flags) -> BatchFiles:
    inputs = [*flags.words, *filter(None, [flags.get("input")])]
    if len(inputs) != 1:
        has = f"more: {', '.join(inputs[:3])}" if inputs else "none"
        raise ValueError(f"batch must have one input, but has {has}; use dcpjax batch in.jsonl -o out.jsonl --model M")
    if not flags.get("output"):
        raise ValueError("--output must name the file for the results, but is not given; use --output out.jsonl")
    return BatchFiles(input=inputs[0], output=flags.get("output"), status=flags.get("status_file"))


def _defaults(flags: Flags, choice: Choice) -> BatchDefaults:
    given = flags.options(SamplingParams)
    seed = given.pop("seed", None) or 0
    return BatchDefaults(model=flags.get("served_model_name", choice.model), sampling=given, seed=seed)


def spell(sentence: str) -> str:
    """Options in backticks as flags: "`max_in_flight` must ..." -> "--max-in-flight must ..."."""
    return re.sub(r"`([a-z_]+)`", lambda match: _WORDS.get(match[1], flag(match[1])), sentence)


def resume_line(argv: list[str]) -> str:
    """The command that was typed, going on instead of starting."""
    words = [word for word in argv[1:] if word not in ("--resume", "--overwrite")]
    if words[:1] == ["batch"]:
        words.pop(0)
    return shlex.join(["dcpjax", "batch", "--resume", *words])
