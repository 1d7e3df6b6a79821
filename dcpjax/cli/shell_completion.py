"""`dcpjax completion bash|zsh|fish`: prints a script that completes commands, flags and their values."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dcpjax.checkpoint.hub import ALIASES
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.cli.flags import Flags, Parser

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": 'eval "$(dcpjax completion bash)" in ~/.bashrc',
    "zsh": "dcpjax completion zsh > a file named _dcpjax in a folder of $fpath, before compinit",
    "fish": "dcpjax completion fish > ~/.config/fish/completions/dcpjax.fish",
}


class Values(NamedTuple):
    """What can be completed in one place: fixed choices, files, both, or nothing."""

    choices: tuple[str, ...] = ()
    files: bool = False

    @classmethod
    def of(cls, metavar: str) -> "Values":
        """From a metavar: `{a,b}` are choices, FILE and PATH are files, MODEL is both."""
        if metavar.startswith("{"):
            return cls(tuple(metavar.strip("{}").split(",")))
        return cls((*ALIASES, *PRESETS) if metavar == "MODEL" else (), metavar in ("FILE", "PATH", "MODEL"))


class FlagCompletion(NamedTuple):
    """One flag."""

    names: tuple[str, ...]
    values: Values | None  # None: it takes no value
    summary: str


class Completions(NamedTuple):
    """What can be completed for one command."""

    summary: str
    flags: tuple[FlagCompletion, ...]
    positional: Values

    @property
    def names(self) -> list[str]:
        return [name for flag in self.flags for name in flag.names]


def run(flags: Flags, parsers: Mapping[str, Parser], positionals: Mapping[str, str]) -> int:
    """Print the script. `positionals` is, for each command, the metavar of its positional arguments."""
    if len(flags.positionals) != 1 or flags.positionals[0] not in SHELLS:
        has = " ".join(flags.positionals) or "none"
        raise ValueError(f"completion must have one of {', '.join(SHELLS)}, but has {has}; use {SHELLS[0]}")
    commands = {
        name: Completions(str(parser.description), tuple(_flags(parser)), Values.of(positionals[name]))
        for name, parser in parsers.items()
    }
    make = {"bash": bash, "zsh": zsh, "fish": fish}[flags.positionals[0]]
    print(f"{make(commands)}\n# to use it: {INSTALL[flags.positionals[0]]}")
    return 0


def _flags(parser: Parser) -> Iterator[FlagCompletion]:
    yield FlagCompletion(("--help",), None, "show this help")
    for action in parser.actions:
        values = None if action.nargs == 0 else Values.of(str(action.metavar or action.dest.upper()))
        summary = re.split(r" \(|[;:.](?:\s|$)", (action.help or "").replace("%%", "%"))[0]
        yield FlagCompletion(tuple(action.option_strings), values, summary)


def bash(commands: Mapping[str, Completions]) -> str:
    cases = "\n".join(
        f"        {pattern}) {_bash_values(values) if values.choices or values.files else 'return'} ;;"
        for pattern, values in _value_patterns(commands)
    )
    every = "\n".join(
        f"            {name}) words='{' '.join((*command.positional.choices, *command.names))}'"
        f"{' files=yes' if command.positional.files else ''} ;;"
        for name, command in commands.items()
    )
    return f"""_dcpjax() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local words='' files=''
    COMPREPLY=()
    if [[ $previous == '=' ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if [[ $current == '=' ]]; then current=''; fi
    if ((COMP_CWORD == 1)); then command='' words='{" ".join(commands)} --help --version'; fi
    case "$command $previous" in
{cases}
        *)
            case "$command" in
{every}
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $files ]]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}}
complete -F _dcpjax dcpjax"""


def _bash_values(values: Values) -> str:
    return f"words='{' '.join(values.choices)}' files={'yes' if values.files else ''}"


def zsh(commands: Mapping[str, Completions]) -> str:
    listed = "\n".join(f"        {_quoted(f'{name}:{command.summary}')}" for name, command in commands.items())
    cases = "\n".join(
        f"        {pattern}) {_zsh_values(values) or ':'}; return ;;" for pattern, values in _value_patterns(commands)
    )
    every = "\n".join(
        f"        {name}) compadd -- {' '.join(command.names)}; {_zsh_values(command.positional) or ':'} ;;"
        for name, command in commands.items()
    )
    return f"""#compdef dcpjax
_dcpjax() {{
    local -a commands=(
{listed}
    )
    if ((CURRENT == 2)); then _describe command commands; compadd -- --help --version; return; fi
    case "$words[2] $words[CURRENT-1]" in
{cases}
    esac
    case "$words[2]" in
{every}
    esac
}}
if [ "$funcstack[1]" = _dcpjax ]; then _dcpjax "$@"; else compdef _dcpjax dcpjax; fi"""


def _zsh_values(values: Values) -> str:
    words = f"compadd -- {' '.join(values.choices)}" if values.choices else ""
    return "; ".join(filter(None, [words, "_files" if values.files else ""]))


def _value_patterns(commands: Mapping[str, Completions]) -> Iterator[tuple[str, Values]]:
    """(shell pattern of `command flag`, values that may follow); flags with equal values share a pattern."""
    found: dict[tuple[str, Values], list[str]] = {}
    for name, command in commands.items():
        for flag in command.flags:
            if flag.values is not None:
                found.setdefault((name, flag.values), []).extend(f"'{name} {option}'" for option in flag.names)
    return (("|".join(patterns), values) for (_, values), patterns in found.items())


def fish(commands: Mapping[str, Completions]) -> str:
    lines = ["complete -c dcpjax -f"]
    for name, command in commands.items():
        lines.append(f"complete -c dcpjax -n __fish_use_subcommand -a {name} -d {_quoted(command.summary)}")
        inside = f"complete -c dcpjax -n '__fish_seen_subcommand_from {name}'"
        if command.positional.files:
            lines.append(f"{inside} -F")
        if command.positional.choices:
            lines.append(f"{inside} -a {_quoted(' '.join(command.positional.choices))}")
        lines += [f"{inside} {_fish_flag(flag)} -d {_quoted(flag.summary)}" for flag in command.flags]
    return "\n".join(lines)


def _fish_flag(flag: FlagCompletion) -> str:
    names = " ".join(_fish_name(name) for name in flag.names)
    if flag.values is None:
        return names
    words = f" -a {_quoted(' '.join(flag.values.choices))}" if flag.values.choices else ""
    return f"{names} {'-r -F' if flag.values.files else '-x'}{words}"


def _fish_name(name: str) -> str:
    """fish writes `--long` as -l, `-s` as -s, and a long name with a single dash, `-old`, as -o."""
    kind = "l" if name.startswith("--") else "s" if len(name) == 2 else "o"
    return f"-{kind} {name.lstrip('-')}"


def _quoted(text: str) -> str:
    """In single quotes, for zsh and fish; backslashes are removed and quotes replaced."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"
