"""The command line: `dcpjax generate`, `dcpjax chat`, `dcpjax plan` and others.

Finds the command, turns what went wrong into one sentence and an exit code; the commands are in `cli_*.py`.
Help, versions and refused flags answer without importing jax.

    0 done    1 a prompt failed    2 refused    3 the output cannot be written
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
    completion,
    config_file,
    env,
    generate,
    inspect,
    plan,
    simulate,
)
from dcpjax.cli.flags import Flags, Parser, parse, spell


class Command(NamedTuple):
    usage: str
    summary: str
    add_flags: Callable[[Parser], None]
    run: Callable[[Flags], int]
    words: str = ""  # what may stand beside flags, in the form of a metavar; empty: nothing that can be guessed


COMMANDS = {
    "generate": Command(
        'dcpjax generate "PROMPT" ["PROMPT" ...] --model MODEL [FLAGS]',
        "complete prompts, or answer them with --chat",
        generate.add_flags,
        generate.run,
    ),
    "batch": Command(
        "dcpjax batch INPUT.jsonl -o OUTPUT.jsonl --model MODEL [FLAGS]",
        "answer a file of requests, safe against whatever stops it",
        batch.add_flags,
        batch.run,
        "FILE",
    ),
    "chat": Command(
        "dcpjax chat --model MODEL [FLAGS]",
        "talk with a model, turn by turn",
        chat.add_flags,
        chat.run,
    ),
    "plan": Command(
        "dcpjax plan MODEL [FLAGS]",
        "show what fits on which layout, without reading weights",
        plan.add_flags,
        plan.run,
        "MODEL",
    ),
    "simulate": Command(
        "dcpjax simulate TRACE MODEL [FLAGS]",
        "replay a recorded trace on a machine that need not exist",
        simulate.add_flags,
        simulate.run,
        "MODEL",
    ),
    "inspect": Command(
        "dcpjax inspect MODEL [FLAGS]",
        "show what is in a model, without loading its weights",
        inspect.add_flags,
        inspect.run,
        "MODEL",
    ),
    "bench": Command(
        "dcpjax bench --model MODEL [FLAGS]",
        "measure a model on this machine, layout beside layout",
        bench.add_flags,
        bench.run,
    ),
    "env": Command(
        "dcpjax env [FLAGS]",
        "show versions, devices and the cache folder, as a bug report needs them",
        env.add_flags,
        env.run,
    ),
    "completion": Command(
        "dcpjax completion bash|zsh|fish",
        "print a script that completes commands and flags in a shell",
        lambda parser: None,
        lambda flags: completion.run(flags, parsers(), {name: command.words for name, command in COMMANDS.items()}),
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
        if not _is_ours(error):
            raise
        print(f"dcpjax: error: {spell(str(error))}", file=sys.stderr)
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
    except SystemExit:  # argparse leaves after --help, and only then
        return 0
    settings = config_file.read_settings(flags, name, parsers)
    if flags.get("print_config"):
        print(config_file.to_yaml(parser, settings))
        return 0
    with settings.naming_file():
        return COMMANDS[name].run(settings.flags)


def parsers() -> dict[str, Parser]:
    """One for each command."""
    return {name: _parser(name) for name in COMMANDS}


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
        f"commands:\n{listed}\n\ndcpjax COMMAND --help lists a command's flags; dcpjax --version tells the "
        'version.\n\nto try it:\n  dcpjax generate --chat "What is the capital of France?" --model smollm2-135m'
    )


def _unknown_command(name: str) -> str:
    if name.startswith("-"):
        return f"flags must follow a command ({', '.join(COMMANDS)}), but {name} comes first; see dcpjax --help"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see dcpjax --help"
    return f"the command must be one of {', '.join(COMMANDS)}, but is {name!r}; {hint}"


def _is_ours(error: ValueError | OSError) -> bool:
    """A mistake of the user's that this package found, or a file that cannot be had; not a fault inside a library."""
    if isinstance(error, OSError):
        return error.filename is not None
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return innermost.f_globals.get("__name__", "").split(".")[0] == "dcpjax"


def _use_utf8() -> None:
    """Text is UTF-8 whatever the locale says, and what is not text is shown as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def _discard_output() -> None:
    """Point standard output nowhere, so that Python's own flush at exit stays silent too."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
