"""Runs a command by name, and turns errors into one message and an exit code.

Help, the version and errors about flags do not import jax.

    0 done    1 a prompt failed    2 wrong arguments    3 the output cannot be written
    130 interrupted    141 the reader of standard output went away    143 terminated
"""

import contextlib
import difflib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import dcpjax
from dcpjax.cli import (
    batch,
    bench,
    chat,
    config_file,
    env,
    generate,
    inspect,
    plan,
    serve,
    shell_completion,
    simulate,
)
from dcpjax.cli.flags import Flags, Parser, names_to_flags, parse


class Command(NamedTuple):
    usage: str
    summary: str
    add_flags: Callable[[Parser], None]
    run: Callable[[Flags], int]
    positional: str = ""  # metavar of the positional arguments, for shell completion; "" if they cannot be completed


COMMANDS = {
    "generate": Command(
        'dcpjax generate "PROMPT" ["PROMPT" ...] --model MODEL [FLAGS]',
        "complete prompts, or answer them with --chat",
        generate.add_flags,
        generate.run,
    ),
    "batch": Command(
        "dcpjax batch INPUT.jsonl -o OUTPUT.jsonl --model MODEL [FLAGS]\n"
        "       dcpjax batch merge OUTPUT.jsonl PART.jsonl [PART.jsonl ...] [--input INPUT.jsonl]",
        "answer a file of requests; a stopped job can be resumed",
        batch.add_flags,
        batch.run,
        "FILE",
    ),
    "chat": Command(
        "dcpjax chat --model MODEL [FLAGS]",
        "chat with a model in the terminal",
        chat.add_flags,
        chat.run,
    ),
    "serve": Command(
        "dcpjax serve MODEL [FLAGS]",
        "answer OpenAI's API over HTTP",
        serve.add_flags,
        serve.run,
        "MODEL",
    ),
    "plan": Command(
        "dcpjax plan MODEL [FLAGS]",
        "show how much fits on each device layout and how fast it can be, without reading weights",
        plan.add_flags,
        plan.run,
        "MODEL",
    ),
    "simulate": Command(
        "dcpjax simulate TRACE MODEL [FLAGS]",
        "replay a recorded trace of requests on simulated hardware",
        simulate.add_flags,
        simulate.run,
        "MODEL",
    ),
    "inspect": Command(
        "dcpjax inspect MODEL [FLAGS]",
        "show what a model consists of, without loading its weights",
        inspect.add_flags,
        inspect.run,
        "MODEL",
    ),
    "bench": Command(
        "dcpjax bench --model MODEL [FLAGS]",
        "measure a model's speed on this machine, on one or several layouts",
        bench.add_flags,
        bench.run,
    ),
    "env": Command(
        "dcpjax env [FLAGS]",
        "show versions, devices and the cache folder, for bug reports",
        env.add_flags,
        env.run,
    ),
    "completion": Command(
        "dcpjax completion bash|zsh|fish",
        "print a script for your shell that completes commands and flags",
        lambda parser: None,
        lambda flags: shell_completion.run(
            flags, parsers(), {name: command.positional for name, command in COMMANDS.items()}
        ),
        "{bash,zsh,fish}",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _use_utf8()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except (ValueError, OSError) as error:
        if not _is_user_error(error):
            raise
        print(f"dcpjax: error: {names_to_flags(str(error))}", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"dcpjax {dcpjax.__version__}")
        return 0
    if not name:
        print(_help(), file=sys.stderr)
        return 2
    if name not in COMMANDS:
        raise ValueError(_unknown_command(name))
    parser = _parser(name)
    try:
        flags = parse(parser, arguments[1:])
    except SystemExit:  # raised by argparse after --help only
        return 0
    settings = config_file.read_settings(flags, name, parsers)
    if flags.get("print_config"):
        print(config_file.to_yaml(parser, settings))
        return 0
    with settings.file_named_in_errors():
        return COMMANDS[name].run(settings.flags)


def parsers() -> dict[str, Parser]:
    """The parser of each command."""
    return {name: _parser(name) for name in COMMANDS}


def _positional_metavars() -> dict[str, str]:
    return {name: command.positional for name, command in COMMANDS.items()}


def _parser(name: str) -> Parser:
    command = COMMANDS[name]
    parser = Parser(prog=f"dcpjax {name}", usage=command.usage, description=f"{command.summary}.".capitalize())
    command.add_flags(parser)
    config_file.add_flags(parser)
    return parser


def _help() -> str:
    listed = "\n".join(f"  {name:<12}{command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: dcpjax COMMAND [FLAGS]\n\n{dcpjax.__doc__.splitlines()[0] if dcpjax.__doc__ else ''}\n\n"
        f"commands:\n{listed}\n\ndcpjax COMMAND --help lists a command's flags; dcpjax --version prints the "
        'version.\n\nto try it:\n  dcpjax generate --chat "What is the capital of France?" --model smollm2-135m'
    )


def _unknown_command(name: str) -> str:
    if name.startswith("-"):
        return f"flags must follow a command ({', '.join(COMMANDS)}), but {name} comes first; see dcpjax --help"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see dcpjax --help"
    return f"the command must be one of {', '.join(COMMANDS)}, but is {name!r}; {hint}"


def _is_user_error(error: ValueError | OSError) -> bool:
    """Whether this package found a wrong input, or a file cannot be accessed; other errors keep their traceback."""
    if isinstance(error, OSError):
        return error.filename is not None
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return innermost.f_globals.get("__name__", "").split(".")[0] == "dcpjax"


def _use_utf8() -> None:
    """Use UTF-8 whatever the locale is; print what cannot be encoded as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def _discard_output() -> None:
    """Redirect standard output to os.devnull, so that Python's flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
